#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "megatronapp/transport/errors.hpp"
#include "megatronapp/transport/transfers.hpp"

namespace megatronapp::transport {

/// A message that the sender has announced: in a slot of its receiver, or on its way into it.
struct Arrival {
    std::uint64_t key;
    std::uint64_t bytes;
    std::uint32_t slot;
    /// True times of the copy on the monotonic clock; both 0 where a path announces a message before its copy ends.
    std::uint64_t start_ns;
    std::uint64_t end_ns;
    /// When the sender was asked to send it: a message waits for a slot and for a thread or stream before its copy.
    std::uint64_t queued_ns;
    /// Number of the message among those of its slot, where a path announces it before its copy ends.
    std::uint32_t sequence = 0;
};

/// The times of a message that was taken before they were known.
struct LaterTimes {
    std::optional<CopyTimes> times;
};

/// Learns how transfers ended that a path has started. Called from any thread, never with a lock of the path held.
class CopySink {
  public:
    CopySink() = default;
    CopySink(const CopySink&) = delete;
    CopySink& operator=(const CopySink&) = delete;
    CopySink(CopySink&&) = delete;
    CopySink& operator=(CopySink&&) = delete;
    virtual ~CopySink() = default;

    /// The message is in its slot and announced; nothing reads the sender's memory any more.
    virtual void completed(const StartedSend& started, std::uint64_t start_ns, std::uint64_t end_ns) noexcept = 0;

    /// The transfer ended without its message, and nothing reads the sender's memory any more. The path carries no
    /// further message to this peer; `why` says what failed, where, and what to do.
    virtual void failed(const StartedSend& started, const std::string& why) noexcept = 0;
};

/// How messages reach one peer and come from it; chosen per peer when ranks connect. A path moves bytes between the
/// caller's memory and numbered slots, and carries two streams of small news between the ranks: announced messages one
/// way, returned slots the other. Keys, queues, credits, deadlines and failures belong to `Peer`, for all paths alike.
///
/// A transfer begins with `start` and ends when the path calls the sink, once for each start: within `start` (memcpy),
/// or later from a thread of the path (a copy engine, a network card). The path announces the message to the receiver,
/// at the latest before it calls `completed`. A path that announces earlier, when the copy is only enqueued, reports by
/// `landed` whether it has ended, and by `times` when; it wakes the receiver for such an announcement itself. `Peer`
/// wakes the receiver after `completed`, and the sender after `give_back`; a path that can return slots in another way
/// (a device's stream, a network card) wakes this rank's `credits` itself.
class Path {
  public:
    Path() = default;
    Path(const Path&) = delete;
    Path& operator=(const Path&) = delete;
    Path(Path&&) = delete;
    Path& operator=(Path&&) = delete;
    virtual ~Path() = default;

    [[nodiscard]] virtual const char* name() const noexcept = 0;
    [[nodiscard]] virtual std::uint64_t slots() const noexcept = 0;
    [[nodiscard]] virtual std::uint64_t slot_bytes() const noexcept = 0;
    /// Whether messages are received in memory of a device.
    [[nodiscard]] virtual bool on_device() const noexcept { return false; }

    // The sending half. `start` is called by any number of threads at once, for different slots; the others by one.

    /// Whether `start` only enqueues, so that the caller's thread does it instead of waking another one.
    [[nodiscard]] virtual bool starts_at_once() const noexcept { return false; }
    virtual void start(const StartedSend& started, CopySink& sink) noexcept = 0;
    /// Marks the present end of a stream, for a transfer that begins after it. Raises TransportError.
    [[nodiscard]] virtual void* mark(DeviceStream /*stream*/) { raise_no_device(); }
    /// Takes a mark back that no transfer uses.
    virtual void drop_mark(void* /*mark*/) noexcept {}
    /// A slot that the receiver has returned, if there is one. Raises TransportCorruptError.
    [[nodiscard]] virtual std::optional<std::uint32_t> next_returned() = 0;
    /// Messages wait for a slot, and there is none.
    virtual void need_slot() noexcept {}

    // The receiving half; one thread at a time.

    /// An announced message, if there is one; slot and bytes are within bounds. Raises TransportCorruptError.
    [[nodiscard]] virtual std::optional<Arrival> next_arrival() = 0;
    /// Whether the message in this slot is whole. Raises TransportCorruptError.
    [[nodiscard]] virtual bool landed(std::uint32_t /*slot*/) { return true; }
    /// Start and end of the copy of a message, where the announcement did not have them and they are known. Not to be
    /// called once `next_arrival` has been called that returned the next message of its slot and that one was released;
    /// until then, and from when that message is announced on, they are known. Raises TransportCorruptError.
    [[nodiscard]] virtual std::optional<CopyTimes> times(const Arrival& /*arrival*/) { return std::nullopt; }
    [[nodiscard]] virtual std::byte* slot_data(std::uint32_t slot) const noexcept = 0;
    virtual void give_back(std::uint32_t slot) noexcept = 0;
    /// Lets a stream wait until the message in this slot is whole. Raises TransportError.
    virtual void wait(std::uint32_t /*slot*/, DeviceStream /*stream*/) { raise_no_device(); }
    /// Returns a slot once all has ended that is enqueued on a stream.
    virtual void give_back_after(std::uint32_t slot, DeviceStream /*stream*/) noexcept { give_back(slot); }

    // The end; called by one thread, without locks, and before the sink is destroyed.

    /// The peer has failed, or this rank is about to close: ends all that waits for the peer, and transfers to it.
    virtual void abandon() noexcept {}
    /// Ends all threads of the path, after reporting all transfers; the sink is not called any more.
    virtual void stop() noexcept {}

  private:
    [[noreturn]] void raise_no_device() const {
        throw TransportError(std::string("messages of this peer travel through ") + name() +
                             ", which has no streams; name a device when the endpoint is made, or name no stream");
    }
};

}  // namespace megatronapp::transport
