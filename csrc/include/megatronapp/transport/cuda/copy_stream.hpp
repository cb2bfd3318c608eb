#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <span>
#include <string>
#include <vector>

#include "megatronapp/transport/cuda/cuda_device.hpp"
#include "megatronapp/transport/path.hpp"

namespace megatronapp::transport {

/// Copies of messages on a stream of a device that nothing else uses, until they have ended. A word in registered
/// memory gets the number of a copy at its end, so that the driver, which is slow to answer, is asked only then.
///
/// All but marks need a lock of the caller; all need the context of the device.
class CopyStream {
  public:
    /// Where a copy goes, and how its end is told.
    struct Target {
        cuda::Address memory;
        cuda::Address word_address;  ///< of `word`, as the device sees it
        const std::atomic<std::uint32_t>* word;
        std::uint32_t number;  ///< of the copy among those that use this word, from 1
    };

    struct Ended {
        StartedSend started;
        CopySink* sink;
        std::uint32_t number;
        CopyTimes times;
        std::string failure;  ///< empty for a copy that has ended well
    };

    /// `peer`: the receiver, for messages. Raises CudaError.
    CopyStream(const cuda::SharedDevice& device, std::string peer);

    /// Marks the present end of a stream, for a copy that begins after it. Raises CudaError.
    [[nodiscard]] void* mark(DeviceStream stream);
    void drop_mark(void* mark) { marks_.give_back(static_cast<cuda::Event>(mark)); }

    /// Enqueues the copies of a message's parts, after its mark, and the word; whether that succeeded. If a call of the
    /// driver fails, what was enqueued before still reads the sender's memory: `take_ended` reports the failure once
    /// that has ended. Raises CudaError if nothing was enqueued.
    bool enqueue(const StartedSend& started, CopySink& sink, const Target& target);

    [[nodiscard]] bool empty() const noexcept { return flights_.empty(); }
    /// Removes the copies that have ended, all of them if the device has failed.
    [[nodiscard]] std::vector<Ended> take_ended();
    /// Tells the sinks of all copies that are left that this rank does not wait for them any more.
    void give_up() noexcept;

    /// Copies some bytes, and waits for that. Raises CudaError.
    void copy_now(cuda::Address to, cuda::Address from, std::size_t bytes);

  private:
    /// A copy that is enqueued and has not ended.
    struct Flight {
        StartedSend started;
        CopySink* sink;
        Target target;
        cuda::Event start;
        cuda::Event end;
        cuda::EventClock::SharedOrigin origin;
        std::string failure;
    };

    /// Arguments of a batch, whose memory is kept from message to message.
    struct Batch {
        std::vector<cuda::Address> to;
        std::vector<cuda::Address> from;
        std::vector<std::size_t> bytes;

        void clear() noexcept {
            to.clear();
            from.clear();
            bytes.clear();
        }
    };

    void enqueue_copies(Flight& flight);
    void enqueue_batch(std::span<const MessagePart> parts, cuda::Address memory);
    [[nodiscard]] bool failed_copy_ended(const Flight& flight) const;
    [[nodiscard]] std::optional<CopyTimes> times_of(const Flight& flight);
    [[nodiscard]] Ended ended(const Flight& flight, const CopyTimes& times, const std::string& failure);

    cuda::SharedDevice device_;
    std::string peer_;
    cuda::EventPool marks_;
    cuda::EventPool events_;
    cuda::EventClock clock_;
    cuda::OwnStream stream_;
    Batch batch_;
    std::deque<Flight> flights_;
    std::uint64_t examined_ns_ = 0;
};

/// What to do about a call on a stream that failed.
inline constexpr const char* kStreamAdvice =
    "an earlier kernel may have failed: run with CUDA_LAUNCH_BLOCKING=1 to see which";

[[nodiscard]] inline cuda::Stream stream_of(DeviceStream stream) noexcept {
    return static_cast<cuda::Stream>(stream.handle);
}

}  // namespace megatronapp::transport
