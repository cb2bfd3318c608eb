#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "megatronapp/transport/message.hpp"
#include "megatronapp/transport/message_source.hpp"
#include "megatronapp/transport/settings.hpp"
#include "megatronapp/transport/transfers.hpp"

namespace megatronapp::transport {

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

    /// Makes the inbox for messages of a peer, with all its memory; with a device that happens in `connect`, once it is
    /// known what the peer has. Without messages only boards are shared. The peer adds this rank in the same way.
    void add_peer(std::uint32_t peer, bool messages);

    /// Prepares for peers on other nodes; the address of this rank, which they add. `library`: path or name of UCX's
    /// libucp.so.0; `devices`: of the network, as UCX names them, or empty. Raises TransportError.
    std::vector<std::byte> open_network(const std::string& library, const std::string& devices);

    /// Adds a peer on another node, with memory for its messages. The peer adds this rank in the same way.
    void add_remote_peer(std::uint32_t peer, bool messages, std::vector<std::byte> address);

    /// Shortest round trip to a peer on another node when ranks connected; none for one on this node.
    [[nodiscard]] std::optional<std::uint64_t> round_trip_ns(std::uint32_t peer) const;

    /// Opens what the peers have made, waits until they have opened everything, and starts the threads. Raises
    /// TransferTimeoutError, PeerLostError or TransportMismatchError; the endpoint is closed then.
    void connect();

    /// Queues a message and returns its ticket. The memory must stay as it is until the ticket is completed; a small
    /// message is copied before this returns if a slot is free.
    /// With a stream it is sent once all has ended that is enqueued there.
    std::uint64_t send(std::uint32_t peer, std::uint64_t key, const std::byte* data, std::uint64_t bytes,
                       std::optional<DeviceStream> stream = {});

    /// Sends one message of `bytes` bytes that is gathered from parts (`MessageSource::gathered`); otherwise as `send`.
    std::uint64_t send_parts(std::uint32_t peer, std::uint64_t key, std::vector<MessagePart> parts, std::uint64_t bytes,
                             std::optional<DeviceStream> stream = {});

    /// Replaces `tickets` by those of the sends whose memory is free again since the last call: copied, or given up
    /// because the peer failed or the endpoint was closed.
    void take_completed(std::vector<std::uint64_t>& tickets);

    [[nodiscard]] std::optional<Message> poll(std::uint32_t peer, std::uint64_t key) { return take(peer, key, false); }
    /// Keys of messages whose copies are enqueued on their sender's device and have not ended.
    [[nodiscard]] std::vector<std::uint64_t> posted(std::uint32_t peer);
    /// Also a message whose copy is enqueued on its sender's device and has not ended.
    [[nodiscard]] std::optional<Message> poll_posted(std::uint32_t peer, std::uint64_t key) {
        return take(peer, key, true);
    }

    /// All messages of these peers that have arrived, in no order. Raises the failure of the first of them that failed
    /// if there are none: what a peer sent before it failed comes first.
    [[nodiscard]] std::vector<Message> take_arrived(const std::vector<std::uint32_t>& peers);

    /// Raises TransferTimeoutError after `deadline_s` seconds.
    [[nodiscard]] Message receive(std::uint32_t peer, std::uint64_t key, double deadline_s);

    /// A number that changes with every message, log entry or failure, for `wait_activity`.
    [[nodiscard]] std::uint32_t activity() const;
    /// Waits until the number is not `seen`; whether that was so before the deadline.
    bool wait_activity(std::uint32_t seen, double deadline_s);

    /// Stores one of this rank's progress words; the last value wins. Wakes nobody.
    void publish(std::uint32_t index, std::uint64_t value);
    /// Stores it once all has ended that is enqueued on a stream of the device.
    void publish_after(DeviceStream stream, std::uint32_t index, std::uint64_t value);
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
    std::uint64_t post(std::uint32_t peer, std::uint64_t key, MessageSource source, std::uint64_t bytes,
                       std::optional<DeviceStream> stream);
    [[nodiscard]] std::optional<Message> take(std::uint32_t peer, std::uint64_t key, bool posted);
    [[nodiscard]] bool in_forked_child() const noexcept;

    std::uint64_t made_at_fork_;
    std::unique_ptr<Implementation> implementation_;
};

}  // namespace megatronapp::transport
