#include "megatronapp/transport/cuda_path.hpp"

#include <sys/prctl.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <ctime>
#include <utility>

#include "megatronapp/clock.hpp"
#include "megatronapp/transport/cuda_slots.hpp"
#include "megatronapp/transport/errors.hpp"
#include "megatronapp/transport/quiet_threads.hpp"

namespace megatronapp::transport {
namespace {

using cuda::Address;
using cuda::CurrentContext;
using cuda::Driver;
using cuda::require;

constexpr std::uint64_t kStopNs = 5'000'000'000;  // for copies to end when this rank closes
constexpr std::uint64_t kExamineNs = 10'000'000;  // between two questions whether the device works
constexpr std::int32_t kMostBehind = 64;
constexpr long kNapNs = 10'000;  // between two looks at words that devices write
constexpr const char* kStreamAdvice = "an earlier kernel may have failed: run with CUDA_LAUNCH_BLOCKING=1 to see which";

cuda::Stream stream_of(DeviceStream stream) noexcept { return static_cast<cuda::Stream>(stream.handle); }

void nap() noexcept {
    const timespec pause{.tv_sec = 0, .tv_nsec = kNapNs};
    ::nanosleep(&pause, nullptr);
}

}  // namespace

CudaPath::Memory::Memory(const cuda::SharedDevice& device, std::unique_ptr<cuda::DeviceMemory> slots, InboxFile to,
                         InboxFile from, std::uint64_t count)
    : to_peer(std::move(to)),
      from_peer(std::move(from)),
      seen_to_peer(device, to_peer.file().data(), to_peer.file().bytes()),
      seen_from_peer(device, from_peer.file().data(), from_peer.file().bytes()),
      own_slots(std::move(slots)),
      marks(device, cuda::kUntimedEvent),
      events(device, cuda::kTimedEvent),
      clock(device),
      stream(device),
      last_uses(device, 2 * count) {}

CudaPath::CudaPath(const cuda::SharedDevice& device, std::unique_ptr<cuda::DeviceMemory> own_slots, InboxFile to_peer,
                   InboxFile from_peer, const Identity& identity, std::uint32_t peer, Bells bells)
    : device_(device),
      slots_(identity.slots),
      slot_bytes_(identity.slot_bytes),
      pinned_(SlotMemory{identity.memory} == SlotMemory::kPinned),
      peer_("rank " + std::to_string(peer)),
      bells_(bells),
      memory_(std::make_unique<Memory>(device, std::move(own_slots), std::move(to_peer), std::move(from_peer), slots_)),
      announcements_(&memory_->to_peer.header().announced, memory_->to_peer.announcements(), slots_),
      sent_(slots_),
      timed_(slots_),
      lent_(slots_),
      arrivals_(&memory_->from_peer.header().announced, memory_->from_peer.announcements(), slots_),
      received_(slots_) {
    if (!pinned_) {
        const SlotHandle handle = memory_->to_peer.header().handle;  // once: what is checked is what is used
        if (handle.check != handle.computed_check()) {
            throw TransportCorruptError("the inbox of " + peer_ + ": its memory handle is damaged; restart the job");
        }
        cuda::IpcHandle of_driver{};
        std::memcpy(of_driver.bytes.data(), handle.words.data(), sizeof(of_driver.bytes));
        memory_->peer_slots.emplace(device, of_driver);
    }
    try_copy();
    watcher_ = quiet_thread([this] { watch_flights(); });
}

CudaPath::~CudaPath() {
    stop();
    const CurrentContext current(*device_);
    if (!flights_.empty() || !memory_->last_uses.ended_soon()) {
        static_cast<void>(memory_.release());  // NOLINT(bugprone-unused-return-value): the device still uses it
        return;
    }
    flights_.clear();
    memory_->peer_slots.reset();
    memory_->to_peer.header().detached.store(1, std::memory_order_release);
    InboxFile inbox = std::move(memory_->from_peer);
    std::unique_ptr<cuda::DeviceMemory> slots = std::move(memory_->own_slots);
    memory_.reset();
    retire_slots(std::move(inbox), std::move(slots));
}

/// Copies some bytes into the first slot and back. Nobody else writes there before the ranks are connected.
void CudaPath::try_copy() {
    const CurrentContext current(*device_);
    const Driver& driver = device_->driver();
    const auto bytes = std::min<std::size_t>(slot_bytes_, sizeof(Identity));
    const Identity sent = memory_->to_peer.header().identity;
    Identity back{};
    cuda::Stream stream = memory_->stream.get();
    static_cast<void>(memory_->clock.origin());  // while no stream waits, it is there at once
    const Address identity = memory_->seen_to_peer.address_of(&memory_->to_peer.header().identity);
    require(driver, "cuMemcpyAsync", driver.copy(target(0), identity, bytes, stream), kStreamAdvice);
    require(driver, "cuMemcpyAsync", driver.copy(reinterpret_cast<Address>(&back), target(0), bytes, stream),
            kStreamAdvice);
    require(driver, "cuStreamSynchronize", driver.stream_synchronize(stream), kStreamAdvice);
    if (std::memcmp(&sent, &back, bytes) != 0) {
        throw TransportError("a copy to the device of " + peer_ +
                             " and back returned other bytes; place the slots in host memory on all ranks");
    }
}

Address CudaPath::target(std::uint32_t slot) const noexcept {
    return pinned_ ? memory_->seen_to_peer.address_of(memory_->to_peer.slot_data(slot))
                   : memory_->peer_slots->address() + slot * memory_->to_peer.layout().slot_stride;
}

std::string CudaPath::slot_text(std::uint32_t slot) const { return "slot " + std::to_string(slot) + " of " + peer_; }

void* CudaPath::mark(DeviceStream stream) {
    const CurrentContext current(*device_);
    cuda::Event event = memory_->marks.take();
    const Driver& driver = device_->driver();
    const cuda::Result code = driver.event_record(event, stream_of(stream));
    if (code != cuda::kSuccess) {
        memory_->marks.give_back(event);
        throw cuda::CudaError(driver, "cuEventRecord", code, kStreamAdvice);
    }
    return event;
}

void CudaPath::start(const StartedSend& started, CopySink& sink) noexcept {
    try {
        const CurrentContext current(*device_);
        const std::lock_guard lock(send_mutex_);
        enqueue(started, sink);
    } catch (const std::exception& error) {
        sink.failed(started, "a copy to " + peer_ + ": " + error.what());
        return;
    }
    ring(*bells_.activity);
    wake_.notify_one();
}

void CudaPath::enqueue(const StartedSend& started, CopySink& sink) {
    const auto& [request, slot] = started;
    const Driver& driver = device_->driver();
    cuda::Stream stream = memory_->stream.get();
    Flight flight{started, &sink, ++sent_[slot], nullptr, nullptr, memory_->clock.origin(), {}};
    flight.start = memory_->events.take();
    flight.end = memory_->events.take();
    if (request.after != nullptr) {
        auto* event = static_cast<cuda::Event>(request.after);
        require(driver, "cuStreamWaitEvent", driver.stream_wait_event(stream, event, 0), kStreamAdvice);
        memory_->marks.give_back(event);
    }
    require(driver, "cuEventRecord", driver.event_record(flight.start, stream), kStreamAdvice);
    enqueue_copies(flight);
    const bool is_on_its_way = flight.failure.empty();
    flights_.push_back(std::move(flight));
    if (is_on_its_way) {
        lent_[slot] = true;
        announcements_.push({request.key, request.bytes, slot, 0, 0, request.queued_ns});
    }
}

/// Enqueues a copy for each part, an event, and the word that says that all of them have ended. Copies that are
/// enqueued when a later call fails still read the sender's memory: the failure is then that of the flight, and
/// reported once they have ended.
void CudaPath::enqueue_copies(Flight& flight) {
    const auto& [request, slot] = flight.started;
    const Driver& driver = device_->driver();
    cuda::Stream stream = memory_->stream.get();
    bool copies = false;
    try {
        for (const MessagePart& part : request.source.parts()) {
            require(driver, "cuMemcpyAsync",
                    driver.copy(target(slot) + part.offset, reinterpret_cast<Address>(part.data), part.bytes, stream),
                    kStreamAdvice);
            copies = true;
        }
        require(driver, "cuEventRecord", driver.event_record(flight.end, stream), kStreamAdvice);
        const Address arrived = memory_->seen_to_peer.address_of(&memory_->to_peer.flags(slot).arrived);
        require(driver, "cuStreamWriteValue32",
                driver.stream_write_32(stream, arrived, flight.sequence, cuda::kWriteWithBarrier), kStreamAdvice);
    } catch (const cuda::CudaError& error) {
        if (!copies || driver.event_record(flight.end, stream) != cuda::kSuccess) {  // a device that can do nothing
            throw;
        }
        flight.failure = "a copy to " + peer_ + ": " + error.what();
    }
}

std::optional<std::uint32_t> CudaPath::next_returned() {
    const std::lock_guard lock(send_mutex_);
    for (std::uint32_t slot = 0; slot < slots_; ++slot) {
        if (!lent_[slot]) {
            continue;
        }
        const std::uint32_t released = memory_->to_peer.flags(slot).released.load(std::memory_order_acquire);
        if (released == sent_[slot]) {
            if (timed_[slot] != sent_[slot]) {
                continue;  // soon: the receiver may still ask for the times of this message
            }
            lent_[slot] = false;
            return slot;
        }
        if (released != sent_[slot] - 1) {
            throw TransportCorruptError(slot_text(slot) + " was returned with number " + std::to_string(released) +
                                        " after " + std::to_string(sent_[slot]) +
                                        " messages; something else writes to this memory: restart the job");
        }
    }
    return std::nullopt;
}

void CudaPath::need_slot() noexcept {
    {
        const std::lock_guard lock(send_mutex_);
        needs_slot_ = true;
    }
    wake_.notify_all();
}

std::optional<Arrival> CudaPath::next_arrival() {
    const std::lock_guard lock(receive_mutex_);
    const std::optional<RingEntry<kAnnouncementWords>> entry = arrivals_.next("the messages of " + peer_);
    if (!entry) {
        return std::nullopt;
    }
    const auto [key, bytes, slot, start_ns, end_ns, queued_ns] = *entry;
    if (slot >= slots_ || bytes > slot_bytes_) {
        throw TransportCorruptError("the messages of " + peer_ + ": " + std::to_string(bytes) + " bytes in slot " +
                                    std::to_string(slot) + ", of " + std::to_string(slots_) + " slots of " +
                                    std::to_string(slot_bytes_) + " bytes");
    }
    Received& received = received_[slot];
    received = {.sequence = received.sequence + 1, .bytes = bytes, .abandoned = false};
    return Arrival{key, bytes, static_cast<std::uint32_t>(slot), 0, 0, queued_ns, received.sequence};
}

/// Whether the word of the slot says that its message is whole; needs the lock of the receiving half.
bool CudaPath::whole(std::uint32_t slot) const {
    const std::uint32_t arrived = memory_->from_peer.flags(slot).arrived.load(std::memory_order_acquire);
    const std::uint32_t sequence = received_[slot].sequence;
    // Behind by more than one where messages were returned that were never whole.
    const auto beyond = static_cast<std::int32_t>(arrived - sequence);
    if (beyond > 0 || beyond < -kMostBehind) {
        throw TransportCorruptError(slot_text(slot) + " holds message " + std::to_string(arrived) + ", not " +
                                    std::to_string(sequence) +
                                    "; something else writes to this memory: restart the job");
    }
    return arrived == sequence && !received_[slot].abandoned;
}

bool CudaPath::landed(std::uint32_t slot) {
    const std::lock_guard lock(receive_mutex_);
    return whole(slot);
}

std::optional<CopyTimes> CudaPath::times(const Arrival& arrival) {
    const SlotTimes& shared = memory_->from_peer.flags(arrival.slot).times[arrival.sequence % 2];
    if (shared.sequence.load(std::memory_order_acquire) != arrival.sequence) {
        return std::nullopt;
    }
    const RingEntry<2> times{shared.times[0].load(std::memory_order_relaxed),
                             shared.times[1].load(std::memory_order_relaxed)};
    if (shared.times[2].load(std::memory_order_relaxed) != check_of(arrival.sequence, times)) {
        throw TransportCorruptError("the times of " + slot_text(arrival.slot) +
                                    " have a wrong check; something else writes to this memory: restart the job");
    }
    return CopyTimes{times[0], times[1]};
}

std::byte* CudaPath::slot_data(std::uint32_t slot) const noexcept {
    const Address address = memory_->own_slots->address() + slot * memory_->from_peer.layout().slot_stride;
    return reinterpret_cast<std::byte*>(address);  // NOLINT(performance-no-int-to-ptr): how a driver names memory
}

void CudaPath::wait(std::uint32_t slot, DeviceStream stream) {
    const CurrentContext current(*device_);
    const Driver& driver = device_->driver();
    std::unique_lock lock(receive_mutex_);
    const bool is_whole = whole(slot);
    const Received received = received_[slot];
    lock.unlock();
    if (is_whole && !pinned_) {
        return;
    }
    if (!is_whole) {
        const Address arrived = memory_->seen_from_peer.address_of(&memory_->from_peer.flags(slot).arrived);
        require(driver, "cuStreamWaitValue32",
                driver.stream_wait_32(stream_of(stream), arrived, received.sequence, cuda::kWaitUntilAtLeast),
                kStreamAdvice);
    }
    if (pinned_ && received.bytes != 0) {
        const Address from = memory_->seen_from_peer.address_of(memory_->from_peer.slot_data(slot));
        const auto to = reinterpret_cast<Address>(slot_data(slot));
        require(driver, "cuMemcpyAsync", driver.copy(to, from, received.bytes, stream_of(stream)), kStreamAdvice);
    }
    memory_->last_uses.record(slot, stream_of(stream));
}

void CudaPath::give_back(std::uint32_t slot) noexcept {
    const std::lock_guard lock(receive_mutex_);
    memory_->from_peer.flags(slot).released.store(received_[slot].sequence, std::memory_order_release);
}

void CudaPath::give_back_after(std::uint32_t slot, DeviceStream stream) noexcept {
    const CurrentContext current(*device_);
    std::unique_lock lock(receive_mutex_);
    const std::uint32_t sequence = received_[slot].sequence;
    lock.unlock();
    const Address released = memory_->seen_from_peer.address_of(&memory_->from_peer.flags(slot).released);
    // If it fails, so does the next call on this device; the slot is then not returned.
    static_cast<void>(
        device_->driver().stream_write_32(stream_of(stream), released, sequence, cuda::kWriteWithBarrier));
    memory_->last_uses.record(slots_ + slot, stream_of(stream));
}

void CudaPath::abandon() noexcept {
    needs_slot_ = false;
    const std::lock_guard lock(receive_mutex_);
    for (std::uint32_t slot = 0; slot < slots_; ++slot) {
        Received& received = received_[slot];
        std::atomic<std::uint32_t>& arrived = memory_->from_peer.flags(slot).arrived;
        if (received.sequence != 0 && arrived.load(std::memory_order_acquire) != received.sequence) {
            received.abandoned = true;
            arrived.store(received.sequence, std::memory_order_release);
        }
    }
}

void CudaPath::stop() noexcept {
    if (!watcher_.joinable()) {
        return;
    }
    {
        std::unique_lock lock(send_mutex_);
        stopping_ = true;
        wake_.notify_all();
        const auto limit = std::chrono::nanoseconds(kStopNs);
        given_up_ = !wake_.wait_for(lock, limit, [this] { return flights_.empty(); });
        wake_.notify_all();
    }
    watcher_.join();
    for (const Flight& flight : flights_) {
        flight.sink->failed(flight.started, "a copy to " + peer_ +
                                                " did not end while this rank closed: its device "
                                                "hangs; see what it runs");
    }
}

void CudaPath::watch_flights() noexcept {
    ::prctl(PR_SET_TIMERSLACK, 1UL, 0UL, 0UL, 0UL);  // naps are as short as asked for
    const CurrentContext current(*device_);
    while (true) {
        std::vector<Ended> ended;
        {
            std::unique_lock lock(send_mutex_);
            wake_.wait(lock, [this] { return stopping_ || needs_slot_ || !flights_.empty(); });
            if (stopping_ && (flights_.empty() || given_up_)) {
                return;
            }
            ended = take_ended();
            ring_credits_if_returned();
        }
        for (const Ended& entry : ended) {
            report(entry);
        }
        if (ended.empty()) {
            nap();
        } else {
            wake_.notify_all();
        }
    }
}

/// Removes the copies that have ended, all of them if the device has failed.
std::vector<CudaPath::Ended> CudaPath::take_ended() {
    std::vector<Ended> ended;
    try {
        while (!flights_.empty()) {
            if (!flights_.front().failure.empty()) {
                if (!failed_copy_ended(flights_.front())) {
                    break;
                }
                ended.push_back({flights_.front(), {}, flights_.front().failure});
                flights_.pop_front();
                continue;
            }
            const std::optional<CopyTimes> times = times_of(flights_.front());
            if (!times) {
                break;
            }
            publish_times(flights_.front(), *times);
            ended.push_back({std::move(flights_.front()), *times, {}});
            flights_.pop_front();
        }
    } catch (const cuda::CudaError& error) {
        for (Flight& flight : flights_) {
            ended.push_back({std::move(flight), {}, "a copy to " + peer_ + ": " + error.what()});
        }
        flights_.clear();
    }
    return ended;
}

/// Whether nothing that was enqueued for a failed copy reads the sender's memory any more.
bool CudaPath::failed_copy_ended(const Flight& flight) const {
    const cuda::Result code = device_->driver().event_query(flight.end);
    require(device_->driver(), "cuEventQuery", code == cuda::kNotReady ? cuda::kSuccess : code, kStreamAdvice);
    return code == cuda::kSuccess;
}

/// The times of a copy, if it has ended. Asks the driver, which is slow, only after the copy's word or rarely.
std::optional<CopyTimes> CudaPath::times_of(const Flight& flight) {
    const SlotFlags& flags = memory_->to_peer.flags(flight.started.slot);
    // A later message may be in the slot already, as the receiver's stream can return it before this thread looks.
    const std::uint32_t beyond = flags.arrived.load(std::memory_order_acquire) - flight.sequence;
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
    const std::optional<std::uint64_t> end_ns = memory_->clock.time_of(*flight.origin, flight.end);
    const std::optional<std::uint64_t> start_ns = memory_->clock.time_of(*flight.origin, flight.start);
    if (!start_ns || !end_ns) {
        return std::nullopt;
    }
    // The origin is known to some microseconds: neither a copy before its send nor one in the future.
    const std::uint64_t latest_ns = std::max(std::min(*end_ns, monotonic_ns()), flight.started.request.queued_ns);
    const std::uint64_t earliest_ns = std::min(flight.started.request.queued_ns, latest_ns);
    return CopyTimes{std::clamp(*start_ns, earliest_ns, latest_ns), latest_ns};
}

void CudaPath::publish_times(const Flight& flight, const CopyTimes& times) noexcept {
    SlotTimes& shared = memory_->to_peer.flags(flight.started.slot).times[flight.sequence % 2];
    shared.times[0].store(times.start_ns, std::memory_order_relaxed);
    shared.times[1].store(times.end_ns, std::memory_order_relaxed);
    shared.times[2].store(check_of(flight.sequence, RingEntry<2>{times.start_ns, times.end_ns}),
                          std::memory_order_relaxed);
    shared.sequence.store(flight.sequence, std::memory_order_release);
    timed_[flight.started.slot] = flight.sequence;
}

void CudaPath::report(const Ended& ended) noexcept {
    const Flight& flight = ended.flight;
    memory_->events.give_back(flight.start);
    memory_->events.give_back(flight.end);
    if (ended.failure.empty()) {
        flight.sink->completed(flight.started, ended.times.start_ns, ended.times.end_ns);
    } else {
        flight.sink->failed(flight.started, ended.failure);
    }
}

void CudaPath::ring_credits_if_returned() noexcept {
    if (!needs_slot_) {
        return;
    }
    for (std::uint32_t slot = 0; slot < slots_; ++slot) {
        if (lent_[slot] && timed_[slot] == sent_[slot] &&
            memory_->to_peer.flags(slot).released.load(std::memory_order_acquire) == sent_[slot]) {
            needs_slot_ = false;
            ring(*bells_.credits);
            return;
        }
    }
}

}  // namespace megatronapp::transport
