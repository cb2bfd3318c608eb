#include "megatronapp/transport/cuda/cuda_path.hpp"

#include <sys/prctl.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <ctime>
#include <utility>

#include "megatronapp/clock.hpp"
#include "megatronapp/quiet_threads.hpp"
#include "megatronapp/transport/cuda/cuda_slots.hpp"
#include "megatronapp/transport/errors.hpp"

namespace megatronapp::transport {
namespace {

using cuda::Address;
using cuda::CurrentContext;
using cuda::Driver;
using cuda::require;

constexpr std::uint64_t kStopNs = 5'000'000'000;  // for copies to end when this rank closes
constexpr std::int32_t kMostBehind = 64;
constexpr long kNapNs = 10'000;  // between two looks at words that devices write
void nap() noexcept {
    const timespec pause{.tv_sec = 0, .tv_nsec = kNapNs};
    ::nanosleep(&pause, nullptr);
}

}  // namespace

CudaPath::Memory::Memory(const cuda::SharedDevice& device, std::unique_ptr<cuda::DeviceMemory> slots, InboxFile to,
                         InboxFile from, std::uint64_t count, const std::string& peer)
    : to_peer(std::move(to)),
      from_peer(std::move(from)),
      seen_to_peer(device, to_peer.file().data(), to_peer.file().bytes()),
      seen_from_peer(device, from_peer.file().data(), from_peer.file().bytes()),
      own_slots(std::move(slots)),
      copies(device, peer),
      last_uses(device, 2 * count) {}

CudaPath::CudaPath(const cuda::SharedDevice& device, std::unique_ptr<cuda::DeviceMemory> own_slots, InboxFile to_peer,
                   InboxFile from_peer, const Identity& identity, std::uint32_t peer, Bells bells)
    : device_(device),
      slots_(identity.slots),
      slot_bytes_(identity.slot_bytes),
      pinned_(SlotMemory{identity.memory} == SlotMemory::kPinned),
      peer_("rank " + std::to_string(peer)),
      bells_(bells),
      memory_(std::make_unique<Memory>(device, std::move(own_slots), std::move(to_peer), std::move(from_peer), slots_,
                                       peer_)),
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
    if (!memory_->copies.empty() || !memory_->last_uses.ended_soon()) {
        static_cast<void>(memory_.release());  // NOLINT(bugprone-unused-return-value): the device still uses it
        return;
    }
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
    const auto bytes = std::min<std::size_t>(slot_bytes_, sizeof(Identity));
    const Identity sent = memory_->to_peer.header().identity;
    Identity back{};
    memory_->copies.copy_now(target(0), memory_->seen_to_peer.address_of(&memory_->to_peer.header().identity), bytes);
    memory_->copies.copy_now(reinterpret_cast<Address>(&back), target(0), bytes);
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
    return memory_->copies.mark(stream);
}

void CudaPath::start(const StartedSend& started, CopySink& sink) noexcept {
    try {
        const CurrentContext current(*device_);
        const std::lock_guard lock(send_mutex_);
        const SendRequest& request = started.request;
        const std::uint32_t slot = started.slot;
        const std::atomic<std::uint32_t>& arrived = memory_->to_peer.flags(slot).arrived;
        const CopyStream::Target place{.memory = target(slot),
                                       .word_address = memory_->seen_to_peer.address_of(&arrived),
                                       .word = &arrived,
                                       .number = ++sent_[slot]};
        if (memory_->copies.enqueue(started, sink, place)) {
            lent_[slot] = true;
            announcements_.push({request.key, request.bytes, slot, 0, 0, request.queued_ns});
        }
    } catch (const std::exception& error) {
        sink.failed(started, "a copy to " + peer_ + ": " + error.what());
        return;
    }
    ring(*bells_.activity);
    wake_.notify_one();
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
        given_up_ = !wake_.wait_for(lock, limit, [this] { return memory_->copies.empty(); });
        wake_.notify_all();
    }
    watcher_.join();
    memory_->copies.give_up();
}

void CudaPath::watch_flights() noexcept {
    ::prctl(PR_SET_TIMERSLACK, 1UL, 0UL, 0UL, 0UL);  // naps are as short as asked for
    const CurrentContext current(*device_);
    while (true) {
        std::vector<CopyStream::Ended> ended;
        {
            std::unique_lock lock(send_mutex_);
            wake_.wait(lock, [this] { return stopping_ || needs_slot_ || !memory_->copies.empty(); });
            if (stopping_ && (memory_->copies.empty() || given_up_)) {
                return;
            }
            ended = memory_->copies.take_ended();
            for (const CopyStream::Ended& entry : ended) {
                publish_times(entry);
            }
            ring_credits_if_returned();
        }
        for (const auto& [started, sink, number, times, failure] : ended) {
            if (failure.empty()) {
                sink->completed(started, times.start_ns, times.end_ns);
            } else {
                sink->failed(started, failure);
            }
        }
        if (ended.empty()) {
            nap();
        } else {
            wake_.notify_all();
        }
    }
}

/// Tells the receiver the times of a copy that has ended well.
void CudaPath::publish_times(const CopyStream::Ended& ended) noexcept {
    if (!ended.failure.empty()) {
        return;
    }
    const auto& [start_ns, end_ns] = ended.times;
    const std::uint32_t slot = ended.started.slot;
    SlotTimes& shared = memory_->to_peer.flags(slot).times[ended.number % 2];
    shared.times[0].store(start_ns, std::memory_order_relaxed);
    shared.times[1].store(end_ns, std::memory_order_relaxed);
    shared.times[2].store(check_of(ended.number, RingEntry<2>{start_ns, end_ns}), std::memory_order_relaxed);
    shared.sequence.store(ended.number, std::memory_order_release);
    timed_[slot] = ended.number;
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
