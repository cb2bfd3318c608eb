#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "megatronapp/transport/message.hpp"
#include "megatronapp/transport/transfers.hpp"

namespace megatronapp::transport {

struct Settings {
    std::string directory;  ///< of shared memory, the same for all ranks of a node
    std::string job;        ///< uid; letters, digits, '-' and '_'
    std::uint64_t attempt;
    std::uint32_t rank;
    std::uint64_t slot_bytes;  ///< the largest message
    std::uint64_t slots;       ///< messages between two ranks in one direction that are not released yet
    double deadline_s;         ///< for a peer to register, and for a send to get a slot
    std::uint32_t threads;     ///< that copy
    /// Called by waiting threads of the application every 100 ms, so that it can react to signals; may throw.
    std::function<void()> while_waiting = {};
};

/// The transport of one rank. First the peers are added, then all ranks connect; after that any thread may call
/// anything. In a forked child no call does anything but raise TransportError.
///
/// Files of shared memory have names only until all peers have opened them, so that nothing is left however ranks end.
class Endpoint {
  public:
    /// Makes this rank's board, and removes what older attempts of the job left. Raises TransportError.
    explicit Endpoint(Settings settings);
    Endpoint(const Endpoint&) = delete;
    Endpoint& operator=(const Endpoint&) = delete;
    Endpoint(Endpoint&&) = delete;
    Endpoint& operator=(Endpoint&&) = delete;
    /// Closes without waiting for queued messages.
    ~Endpoint();

    /// Makes the inbox for messages of a peer, with all its memory; without messages only boards are shared. The peer
    /// adds this rank in the same way.
    void add_peer(std::uint32_t peer, bool messages);

    /// Opens what the peers have made, waits until they have opened everything, and starts the threads. Raises
    /// TransferTimeoutError, PeerLostError or TransportMismatchError; the endpoint is closed then.
    void connect();

    /// Queues a message and returns its ticket. The memory must stay as it is until the ticket is completed; a small
    /// message is copied before this returns if a slot is free.
    std::uint64_t send(std::uint32_t peer, std::uint64_t key, const std::byte* data, std::uint64_t bytes);

    /// Replaces `tickets` by those of the sends whose memory is free again since the last call: copied, or given up
    /// because the peer failed or the endpoint was closed.
    void take_completed(std::vector<std::uint64_t>& tickets);

    [[nodiscard]] std::optional<Message> poll(std::uint32_t peer, std::uint64_t key);

    /// Raises TransferTimeoutError after `deadline_s` seconds.
    [[nodiscard]] Message receive(std::uint32_t peer, std::uint64_t key, double deadline_s);

    /// A number that changes with every message, log entry or failure, for `wait_activity`.
    [[nodiscard]] std::uint32_t activity() const;
    /// Waits until the number is not `seen`; whether that was so before the deadline.
    bool wait_activity(std::uint32_t seen, double deadline_s);

    /// Stores one of this rank's progress words; the last value wins. Wakes nobody.
    void publish(std::uint32_t index, std::uint64_t value);
    [[nodiscard]] std::uint64_t read(std::uint32_t peer, std::uint32_t index);

    /// Makes this rank the leader of a log with these followers, all of them peers.
    void lead(const std::vector<std::uint32_t>& followers);
    /// Appends to the log; waits while a follower has not read the oldest of 1,024 entries.
    void append(std::uint64_t value, double deadline_s);
    /// The next entry of a leader's log, if there is one; each entry once and in order.
    [[nodiscard]] std::optional<std::uint64_t> poll_entry(std::uint32_t leader);
    [[nodiscard]] std::uint64_t next_entry(std::uint32_t leader, double deadline_s);

    [[nodiscard]] PeerStatistics statistics(std::uint32_t peer);

    /// Ends all threads. Draining waits first, within the deadline, until all queued messages are in slots of their
    /// receivers, and raises the failure of the first peer for which that was not possible, after closing all the same.
    void close(bool drain);

    [[nodiscard]] const Settings& settings() const noexcept;

  private:
    class Implementation;

    [[nodiscard]] Implementation& open() const;
    [[nodiscard]] bool in_forked_child() const noexcept;

    std::uint64_t made_at_fork_;
    std::unique_ptr<Implementation> implementation_;
};

}  // namespace megatronapp::transport
