#include "megatronapp/transport/cuda/staged_path.hpp"

#include <sys/prctl.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <ctime>
#include <iterator>
#include <utility>

#include "megatronapp/quiet_threads.hpp"
#include "megatronapp/transport/errors.hpp"

namespace megatronapp::transport {
namespace {

using cuda::Address;
using cuda::CurrentContext;
using cuda::Driver;
using cuda::require;

constexpr std::uint64_t kStopNs = 5'000'000'000;  // for copies to end when this rank closes
constexpr long kNapNs = 10'000;                   // between two looks at words that the device writes

}  // namespace

StagedPath::Memory::Memory(const cuda::SharedDevice& device, std::unique_ptr<HostSlots> path, const std::string& peer)
    : hosts(std::move(path)),
      stride(InboxLayout::round_up(hosts->slot_bytes(), kDeviceLine)),
      staging(hosts->outgoing().empty() ? InboxLayout::round_up(hosts->slots() * stride, kPage) : 0),
      words(InboxLayout::round_up(hosts->slots() * sizeof(SlotWords), kPage)),
      seen_incoming(device, hosts->incoming().data(), hosts->incoming().size()),
      seen_outgoing(device, outgoing().data(), outgoing().size()),
      seen_words(device, words.bytes().data(), words.bytes().size()),
      own_slots(device, hosts->slots() * stride),
      copies(device, peer),
      last_uses(device, 2 * hosts->slots()) {}

std::span<std::byte> StagedPath::Memory::outgoing() const noexcept {
    return hosts->outgoing().empty() ? staging.bytes() : hosts->outgoing();
}

std::byte* StagedPath::Memory::outgoing_slot(std::uint32_t slot) const noexcept {
    return hosts->outgoing().empty() ? staging.bytes().data() + slot * stride : hosts->outgoing_slot(slot);
}

StagedPath::SlotWords& StagedPath::Memory::words_of(std::uint32_t slot) const noexcept {
    return reinterpret_cast<SlotWords*>(words.bytes().data())[slot];
}

StagedPath::StagedPath(const cuda::SharedDevice& device, std::unique_ptr<HostSlots> hosts, std::uint32_t peer,
                       Bell* peer_credits)
    : device_(device),
      slots_(hosts->slots()),
      peer_("rank " + std::to_string(peer)),
      peer_credits_(peer_credits),
      memory_(std::make_unique<Memory>(device, std::move(hosts), peer_)),
      sent_(slots_),
      returned_(slots_),
      bytes_(slots_) {
    try_copy();
    watcher_ = quiet_thread([this] { watch(); });
}

StagedPath::~StagedPath() {
    stop();
    const CurrentContext current(*device_);
    if (!memory_->copies.empty() || !memory_->last_uses.ended_soon()) {
        static_cast<void>(memory_.release());  // NOLINT(bugprone-unused-return-value): the device still uses it
    }
}

/// Copies some bytes through the first slots of the device and of the receiver. Nobody else writes there before the
/// first message.
void StagedPath::try_copy() {
    const CurrentContext current(*device_);
    std::array<std::byte, sizeof(SlotWords)> sent{};
    sent.fill(std::byte{0x5A});
    const std::size_t bytes = std::min<std::size_t>(memory_->hosts->slot_bytes(), sent.size());
    std::byte* words = memory_->words.bytes().data();
    std::byte* target = memory_->outgoing_slot(0);
    std::memcpy(words, sent.data(), bytes);
    memory_->copies.copy_now(memory_->own_slots.address(), memory_->seen_words.address_of(words), bytes);
    memory_->copies.copy_now(memory_->seen_outgoing.address_of(target), memory_->own_slots.address(), bytes);
    std::memset(words, 0, bytes);
    if (std::memcmp(target, sent.data(), bytes) != 0) {
        throw TransportError("a copy from the device of this rank into host memory for " + peer_ +
                             " returned other bytes; check the device (nvidia-smi, dmesg)");
    }
}

void* StagedPath::mark(DeviceStream stream) {
    const CurrentContext current(*device_);
    return memory_->copies.mark(stream);
}

void StagedPath::start(const StartedSend& started, CopySink& sink) noexcept {
    try {
        const CurrentContext current(*device_);
        const std::lock_guard lock(mutex_);
        const std::uint32_t slot = started.slot;
        const std::atomic<std::uint32_t>& word = memory_->words_of(slot).staged;
        memory_->copies.enqueue(started, sink,
                                {.memory = memory_->seen_outgoing.address_of(memory_->outgoing_slot(slot)),
                                 .word_address = memory_->seen_words.address_of(&word),
                                 .word = &word,
                                 .number = ++sent_[slot]});
    } catch (const std::exception& error) {
        sink.failed(started, "a copy to " + peer_ + ": " + error.what());
        return;
    }
    wake_.notify_one();
}

std::optional<Arrival> StagedPath::next_arrival() {
    const std::optional<Arrival> arrival = memory_->hosts->next_arrival();
    if (arrival) {
        bytes_[arrival->slot] = arrival->bytes;
    }
    return arrival;
}

std::byte* StagedPath::slot_data(std::uint32_t slot) const noexcept {
    const Address address = memory_->own_slots.address() + slot * memory_->stride;
    return reinterpret_cast<std::byte*>(address);  // NOLINT(performance-no-int-to-ptr): how a driver names memory
}

void StagedPath::wait(std::uint32_t slot, DeviceStream stream) {
    const CurrentContext current(*device_);
    const Driver& driver = device_->driver();
    if (bytes_[slot] != 0) {
        const Address from = memory_->seen_incoming.address_of(memory_->hosts->slot_data(slot));
        const auto to = reinterpret_cast<Address>(slot_data(slot));
        require(driver, "cuMemcpyAsync", driver.copy(to, from, bytes_[slot], stream_of(stream)), kStreamAdvice);
    }
    memory_->last_uses.record(slot, stream_of(stream));
}

void StagedPath::give_back(std::uint32_t slot) noexcept {
    const std::lock_guard lock(return_mutex_);
    memory_->hosts->give_back(slot);
}

void StagedPath::give_back_after(std::uint32_t slot, DeviceStream stream) noexcept {
    const CurrentContext current(*device_);
    const std::uint32_t number = ++returned_[slot];  // of one thread: that which has the message
    const Address word = memory_->seen_words.address_of(&memory_->words_of(slot).released);
    const cuda::Result code =
        device_->driver().stream_write_32(stream_of(stream), word, number, cuda::kWriteWithBarrier);
    memory_->last_uses.record(slots_ + slot, stream_of(stream));
    if (code != cuda::kSuccess) {
        return;  // so does the next call on this device fail; the slot is not returned
    }
    {
        const std::lock_guard lock(mutex_);
        returns_.push_back({slot, number});
    }
    wake_.notify_one();
}

void StagedPath::watch() noexcept {
    ::prctl(PR_SET_TIMERSLACK, 1UL, 0UL, 0UL, 0UL);  // naps are as short as asked for
    const CurrentContext current(*device_);
    while (true) {
        std::vector<CopyStream::Ended> ended;
        {
            std::unique_lock lock(mutex_);
            wake_.wait(lock, [this] { return stopping_ || !returns_.empty() || !memory_->copies.empty(); });
            if (stopping_ && (memory_->copies.empty() || given_up_)) {
                return;
            }
            ended = memory_->copies.take_ended();
        }
        for (const CopyStream::Ended& entry : ended) {
            hand_over(entry);
        }
        if (!return_released() && ended.empty()) {
            const timespec pause{.tv_sec = 0, .tv_nsec = kNapNs};
            ::nanosleep(&pause, nullptr);
        } else {
            wake_.notify_all();
        }
    }
}

/// Sends what is in pinned memory now; its transfer began with the copy to there.
void StagedPath::hand_over(const CopyStream::Ended& ended) noexcept {
    if (!ended.failure.empty()) {
        ended.sink->failed(ended.started, ended.failure);
        return;
    }
    StartedSend staged = ended.started;
    staged.request.source = MessageSource(memory_->outgoing_slot(staged.slot), staged.request.bytes);
    staged.request.after = nullptr;
    staged.start_ns = ended.times.start_ns;
    memory_->hosts->start(staged, *ended.sink);
}

/// Returns the slots that streams have read; whether there were any.
bool StagedPath::return_released() noexcept {
    std::vector<Return> released;
    {
        const std::lock_guard lock(mutex_);
        const auto is_released = [this](const Return& entry) {
            return memory_->words_of(entry.slot).released.load(std::memory_order_acquire) == entry.number;
        };
        std::copy_if(returns_.begin(), returns_.end(), std::back_inserter(released), is_released);
        std::erase_if(returns_, [&](const Return& entry) {
            return std::any_of(released.begin(), released.end(),
                               [&](const Return& other) { return other.slot == entry.slot; });
        });
    }
    for (const Return& entry : released) {
        give_back(entry.slot);
    }
    if (!released.empty() && peer_credits_ != nullptr) {
        ring(*peer_credits_);
    }
    return !released.empty();
}

std::unique_ptr<Path> staged(const cuda::SharedDevice& device, std::unique_ptr<HostSlots> hosts, std::uint32_t peer,
                             Bell* peer_credits) {
    if (device == nullptr || hosts->slots() == 0) {
        return hosts;
    }
    return std::make_unique<StagedPath>(device, std::move(hosts), peer, peer_credits);
}

void StagedPath::stop() noexcept {
    if (!watcher_.joinable()) {
        return;
    }
    {
        std::unique_lock lock(mutex_);
        stopping_ = true;
        wake_.notify_all();
        const auto limit = std::chrono::nanoseconds(kStopNs);
        given_up_ = !wake_.wait_for(lock, limit, [this] { return memory_->copies.empty(); });
        wake_.notify_all();
    }
    watcher_.join();
    memory_->copies.give_up();
    memory_->hosts->stop();
}

}  // namespace megatronapp::transport
