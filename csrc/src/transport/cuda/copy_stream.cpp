#include "megatronapp/transport/cuda/copy_stream.hpp"

#include <algorithm>
#include <utility>

#include "megatronapp/clock.hpp"

namespace megatronapp::transport {
namespace {

using cuda::Address;
using cuda::Driver;
using cuda::require;

constexpr std::uint64_t kExamineNs = 10'000'000;  // between two questions whether the device works

}  // namespace

CopyStream::CopyStream(const cuda::SharedDevice& device, std::string peer)
    : device_(device),
      peer_(std::move(peer)),
      marks_(device, cuda::kUntimedEvent),
      events_(device, cuda::kTimedEvent),
      clock_(device),
      stream_(device) {
    const cuda::CurrentContext current(*device_);
    static_cast<void>(clock_.origin());  // while no stream waits, it is there at once
}

void* CopyStream::mark(DeviceStream stream) {
    cuda::Event event = marks_.take();
    const Driver& driver = device_->driver();
    const cuda::Result code = driver.event_record(event, stream_of(stream));
    if (code != cuda::kSuccess) {
        marks_.give_back(event);
        throw cuda::CudaError(driver, "cuEventRecord", code, kStreamAdvice);
    }
    return event;
}

bool CopyStream::enqueue(const StartedSend& started, CopySink& sink, const Target& target) {
    const Driver& driver = device_->driver();
    Flight flight{started, &sink, target, nullptr, nullptr, clock_.origin(), {}};
    flight.start = events_.take();
    flight.end = events_.take();
    if (started.request.after != nullptr) {
        auto* event = static_cast<cuda::Event>(started.request.after);
        require(driver, "cuStreamWaitEvent", driver.stream_wait_event(stream_.get(), event, 0), kStreamAdvice);
        marks_.give_back(event);
    }
    require(driver, "cuEventRecord", driver.event_record(flight.start, stream_.get()), kStreamAdvice);
    enqueue_copies(flight);
    const bool is_on_its_way = flight.failure.empty();
    flights_.push_back(std::move(flight));
    return is_on_its_way;
}

void CopyStream::enqueue_copies(Flight& flight) {
    const Driver& driver = device_->driver();
    cuda::Stream stream = stream_.get();
    const Target& target = flight.target;
    const std::span<const MessagePart> parts = flight.started.request.source.parts();
    bool copies = false;
    try {
        if (parts.size() > 1 && driver.copy_batch != nullptr) {
            copies = true;  // a batch that fails may have begun
            enqueue_batch(parts, target.memory);
        } else {
            for (const MessagePart& part : parts) {
                const auto from = reinterpret_cast<Address>(part.data);
                require(driver, "cuMemcpyAsync", driver.copy(target.memory + part.offset, from, part.bytes, stream),
                        kStreamAdvice);
                copies = true;
            }
        }
        require(driver, "cuEventRecord", driver.event_record(flight.end, stream), kStreamAdvice);
        require(driver, "cuStreamWriteValue32",
                driver.stream_write_32(stream, target.word_address, target.number, cuda::kWriteWithBarrier),
                kStreamAdvice);
    } catch (const cuda::CudaError& error) {
        if (!copies || driver.event_record(flight.end, stream) != cuda::kSuccess) {  // a device that can do nothing
            throw;
        }
        flight.failure = "a copy to " + peer_ + ": " + error.what();
    }
}

/// Enqueues the copies of all parts by one call, which takes the host a fraction of the time of one call for each.
void CopyStream::enqueue_batch(std::span<const MessagePart> parts, Address memory) {
    const Driver& driver = device_->driver();
    batch_.clear();
    for (const MessagePart& part : parts) {
        batch_.to.push_back(memory + part.offset);
        batch_.from.push_back(reinterpret_cast<Address>(part.data));
        batch_.bytes.push_back(part.bytes);
    }
    cuda::CopyAttributes attributes{
        .source_access_order = cuda::kSourceInStreamOrder, .source_location = {}, .target_location = {}, .flags = 0};
    std::size_t first_copy = 0;
    require(driver, "cuMemcpyBatchAsync",
            driver.copy_batch(batch_.to.data(), batch_.from.data(), batch_.bytes.data(), parts.size(), &attributes,
                              &first_copy, 1, stream_.get()),
            kStreamAdvice);
}

std::vector<CopyStream::Ended> CopyStream::take_ended() {
    std::vector<Ended> result;
    try {
        while (!flights_.empty()) {
            const Flight& flight = flights_.front();
            std::optional<CopyTimes> times;
            if (flight.failure.empty()) {
                times = times_of(flight);
            } else if (failed_copy_ended(flight)) {
                times = CopyTimes{0, 0};
            }
            if (!times) {
                break;
            }
            result.push_back(ended(flight, *times, flight.failure));
            flights_.pop_front();
        }
    } catch (const cuda::CudaError& error) {
        for (const Flight& flight : flights_) {
            result.push_back(ended(flight, {0, 0}, "a copy to " + peer_ + ": " + error.what()));
        }
        flights_.clear();
    }
    return result;
}

CopyStream::Ended CopyStream::ended(const Flight& flight, const CopyTimes& times, const std::string& failure) {
    events_.give_back(flight.start);
    events_.give_back(flight.end);
    return {flight.started, flight.sink, flight.target.number, times, failure};
}

/// Whether nothing that was enqueued for a failed copy reads the sender's memory any more.
bool CopyStream::failed_copy_ended(const Flight& flight) const {
    const cuda::Result code = device_->driver().event_query(flight.end);
    require(device_->driver(), "cuEventQuery", code == cuda::kNotReady ? cuda::kSuccess : code, kStreamAdvice);
    return code == cuda::kSuccess;
}

/// The times of a copy, if it has ended. Asks the driver, which is slow, only after the copy's word or rarely.
std::optional<CopyTimes> CopyStream::times_of(const Flight& flight) {
    // A later message may be in the slot already, as the receiver's stream can return it before this thread looks.
    const std::uint32_t beyond = flight.target.word->load(std::memory_order_acquire) - flight.target.number;
    if (static_cast<std::int32_t>(beyond) < 0) {
        const std::uint64_t now_ns = monotonic_ns();
        if (now_ns - examined_ns_ >= kExamineNs) {
            examined_ns_ = now_ns;
            const cuda::Result code = device_->driver().event_query(flight.end);
            require(device_->driver(), "cuEventQuery", code == cuda::kNotReady ? cuda::kSuccess : code, kStreamAdvice);
        }
        return std::nullopt;
    }
    // Also where a peer that closes has written the word itself: the events say whether this device has ended.
    const std::optional<std::uint64_t> end_ns = clock_.time_of(*flight.origin, flight.end);
    const std::optional<std::uint64_t> start_ns = clock_.time_of(*flight.origin, flight.start);
    if (!start_ns || !end_ns) {
        return std::nullopt;
    }
    // The origin is known to some microseconds: neither a copy before its send nor one in the future.
    const std::uint64_t latest_ns = std::max(std::min(*end_ns, monotonic_ns()), flight.started.request.queued_ns);
    const std::uint64_t earliest_ns = std::min(flight.started.request.queued_ns, latest_ns);
    return CopyTimes{std::clamp(*start_ns, earliest_ns, latest_ns), latest_ns};
}

void CopyStream::give_up() noexcept {
    for (const Flight& flight : flights_) {
        flight.sink->failed(flight.started, "a copy to " + peer_ +
                                                " did not end while this rank closed: its device hangs; see what it "
                                                "runs");
    }
}

void CopyStream::copy_now(Address to, Address from, std::size_t bytes) {
    const Driver& driver = device_->driver();
    require(driver, "cuMemcpyAsync", driver.copy(to, from, bytes, stream_.get()), kStreamAdvice);
    require(driver, "cuStreamSynchronize", driver.stream_synchronize(stream_.get()), kStreamAdvice);
}

}  // namespace megatronapp::transport
