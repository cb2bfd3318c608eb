/// Log of the operations of NCCL in this process, with the times at which their kernels moved data.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

namespace megatronapp::nccl {

/// Numbers are part of what the reader of the log knows.
enum class Operation : std::uint32_t {
    kOther = 0,
    kAllReduce = 1,
    kReduceScatter = 2,
    kAllGather = 3,
    kBroadcast = 4,
    kReduce = 5,
    kSend = 6,
    kReceive = 7,
};

/// A finished operation: 64 bytes, read by NumPy.
struct Transfer {
    std::uint64_t communicator;  // the hash that NCCL gives it, equal on all its ranks
    std::uint64_t bytes;
    std::uint64_t device_start_ns;  // global timer of the device when the first channel began
    std::uint64_t device_end_ns;    // and when the last one had ended
    std::uint64_t seen_ns;          // monotonic clock of the host when the end was seen
    std::uint32_t sequence;         // n-th operation of this kind and peer in the communicator, from 0
    Operation operation;
    std::int32_t peer;  // rank in the communicator that a send or receive is with; else -1
    std::int32_t ranks;
    std::int32_t rank;  // this rank in the communicator
    std::uint32_t channels;
};
static_assert(sizeof(Transfer) == 64);

class TransferLog;

/// A communicator as NCCL has announced it.
struct Communicator {
    TransferLog* log;
    std::uint64_t hash;
    std::int32_t ranks;
    std::int32_t rank;
    /// Operations so far; of sends and receives one count for each peer. Used by the thread that enqueues.
    std::array<std::uint32_t, 8> collectives{};
    std::vector<std::uint32_t> sent;
    std::vector<std::uint32_t> received;
};

/// All of its functions may be called from any thread, and none waits for the training.
class TransferLog {
  public:
    /// What NCCL gets as its handle of an event.
    struct Handle {
        explicit Handle(bool channel) noexcept : is_channel(channel) {}
        const bool is_channel;
        std::atomic<bool> used{false};
    };

    /// An operation between its enqueuing and the end of its last kernel.
    struct Pending : Handle {
        Pending() noexcept : Handle(false) {}
        std::atomic<std::uint32_t> open{0};      // channels that have not ended, and 1 until it is enqueued
        std::atomic<bool> is_counted{true};      // NCCL has announced how many channels there will be
        std::atomic<std::uint64_t> begun_ns{0};  // host time of its enqueuing
        std::atomic<std::uint64_t> ended_ns{0};  // host time of the newest end of a channel
        std::atomic<std::uint64_t> start_ns{0};
        std::atomic<std::uint64_t> end_ns{0};
        TransferLog* log{nullptr};
        Transfer transfer{};
    };

    /// The part of an operation that one channel moves.
    struct Channel : Handle {
        Channel() noexcept : Handle(true) {}
        Pending* pending{nullptr};
        std::uint64_t end_ns{0};
    };

    static constexpr std::uint64_t kQuietNs = 20'000'000;
    static constexpr std::uint64_t kExpireNs = 60'000'000'000;

    TransferLog(std::size_t pending, std::size_t finished);

    /// Returns null, and counts the operation as dropped, where too many are pending.
    Pending* begin(Communicator& communicator, Operation operation, std::uint64_t bytes, std::int32_t peer,
                   std::uint32_t channels) noexcept;
    /// Its enqueuing has ended; channels may still begin and end.
    void enqueued(Pending& pending) noexcept;
    Channel* begin_channel(Pending& pending, std::uint64_t start_ns) noexcept;
    void end_channel(Channel& channel) noexcept;

    /// Copies finished operations to `out`, oldest first, and returns their number. NCCL does not say how many channels
    /// a send or receive has: one is finished once it has been quiet for `quiet_ns` after the end of a channel. Those
    /// without an end after `expire_ns`, as in a CUDA graph that captures them, are dropped.
    std::size_t take(std::span<Transfer> out, std::uint64_t quiet_ns = kQuietNs, std::uint64_t expire_ns = kExpireNs);
    [[nodiscard]] std::uint64_t dropped() const noexcept { return dropped_.load(std::memory_order_relaxed); }

  private:
    void close_part(Pending& pending) noexcept;
    void finish(Pending& pending, std::uint64_t seen_ns) noexcept;
    void sweep(std::uint64_t quiet_ns, std::uint64_t expire_ns) noexcept;

    std::vector<Pending> pending_;
    std::vector<Channel> channels_;
    std::atomic<std::uint64_t> next_pending_{0};
    std::atomic<std::uint64_t> next_channel_{0};
    std::atomic<std::uint64_t> dropped_{0};
    std::mutex finished_mutex_;
    std::vector<Transfer> finished_;
    std::size_t most_finished_;
};

}  // namespace megatronapp::nccl
