#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "megatronapp/transport/path.hpp"
#include "megatronapp/transport/shm/layout.hpp"
#include "megatronapp/transport/ucx/api.hpp"
#include "megatronapp/transport/ucx/link.hpp"
#include "megatronapp/transport/ucx/loop.hpp"
#include "megatronapp/transport/ucx/wire.hpp"

namespace megatronapp::transport::ucx {

struct WorkerSettings {
    std::string library;  ///< path or name of libucp.so.0
    std::string devices;  ///< of the network, as UCX names them ("eth0", "mlx5_0:1"); empty: UCX chooses
    Recipient self;
    double deadline_s;
    BoardLayout* board;  ///< of this rank; its bells are rung, and cursors of followers entered
};

/// UCX of one rank: a worker, an endpoint for each peer on another node, and the thread that alone uses them.
/// Other threads leave orders for it. A peer is lost if UCX says so, or if nothing was heard of it for half the
/// deadline.
class Worker {
  public:
    /// Raises TransportError if UCX cannot be loaded or has no such device.
    explicit Worker(WorkerSettings settings);
    Worker(const Worker&) = delete;
    Worker& operator=(const Worker&) = delete;
    Worker(Worker&&) = delete;
    Worker& operator=(Worker&&) = delete;
    ~Worker();

    /// Where peers reach this worker: bytes that only UCX understands.
    [[nodiscard]] const std::vector<std::byte>& address() const noexcept { return address_; }
    [[nodiscard]] const std::string& version() const noexcept { return library_->version; }

    /// Adds a peer before `start`. Raises TransportError if there is not enough memory.
    std::shared_ptr<Link> add(std::uint32_t peer, std::vector<std::byte> address, const Hello& own);

    /// Starts the thread, which greets the peers.
    void start();
    /// Waits until all peers have answered. Raises TransferTimeoutError, PeerLostError, TransportMismatchError or
    /// TransportCorruptError.
    void await_connected(const std::function<void()>& while_waiting);

    // Orders; any thread.
    void send(const Link& link, const StartedSend& started, CopySink& sink);
    void tell(const Link& link, Kind kind, const Body& body);
    /// Takes leave of the peer, within a second, or drops it at once if it has failed; `Link::await_end` waits for
    /// that.
    void leave(const Link& link);

    /// Leaves all peers and ends the thread.
    void stop();

  private:
    void run();
    void sleep();
    void enqueue(const Order& order);
    void wake() noexcept;
    void make_context();
    void release() noexcept;
    void require(Status status, const std::string& what) const;

    WorkerSettings settings_;
    const Library* library_;
    ContextHandle* context_ = nullptr;
    WorkerHandle* worker_ = nullptr;
    std::vector<std::byte> address_;
    int progress_descriptor_ = -1;
    int wake_descriptor_ = -1;
    std::unique_ptr<Loop> loop_;  ///< after `start` of the thread alone
    std::vector<std::shared_ptr<Link>> links_;

    std::mutex mutex_;
    std::vector<Order> orders_;
    bool stopped_ = false;
    std::vector<Order> taken_;  ///< of the thread
    std::atomic<bool> asleep_ = false;
    std::atomic<bool> stopping_ = false;
    std::thread thread_;
};

}  // namespace megatronapp::transport::ucx
