#include "megatronapp/nccl/transfer_log.hpp"

#include <algorithm>

#include "megatronapp/clock.hpp"

namespace megatronapp::nccl {
namespace {

constexpr std::size_t kChannelsOfOne = 64;  // the most that NCCL uses for one operation

/// Takes the next free element of a pool that is used in turns; null if that one is still in use.
template <typename Element>
Element* taken(std::vector<Element>& pool, std::atomic<std::uint64_t>& next) noexcept {
    Element& element = pool[next.fetch_add(1, std::memory_order_relaxed) % pool.size()];
    bool expected = false;
    return element.used.compare_exchange_strong(expected, true, std::memory_order_acquire) ? &element : nullptr;
}

void lower(std::atomic<std::uint64_t>& least, std::uint64_t value) noexcept {
    std::uint64_t known = least.load(std::memory_order_relaxed);
    while ((known == 0 || value < known) && !least.compare_exchange_weak(known, value, std::memory_order_relaxed)) {
    }
}

void raise(std::atomic<std::uint64_t>& most, std::uint64_t value) noexcept {
    std::uint64_t known = most.load(std::memory_order_relaxed);
    while (value > known && !most.compare_exchange_weak(known, value, std::memory_order_relaxed)) {
    }
}

std::uint32_t next_number(Communicator& communicator, Operation operation, std::int32_t peer) noexcept {
    const auto place = static_cast<std::size_t>(peer);
    if (operation == Operation::kSend && place < communicator.sent.size()) {
        return communicator.sent[place]++;
    }
    if (operation == Operation::kReceive && place < communicator.received.size()) {
        return communicator.received[place]++;
    }
    return communicator.collectives[static_cast<std::size_t>(operation)]++;
}

}  // namespace

TransferLog::TransferLog(std::size_t pending, std::size_t finished)
    : pending_(pending), channels_(pending * kChannelsOfOne / 4), most_finished_(finished) {
    finished_.reserve(finished);
}

TransferLog::Pending* TransferLog::begin(Communicator& communicator, Operation operation, std::uint64_t bytes,
                                         std::int32_t peer, std::uint32_t channels) noexcept {
    const std::uint32_t sequence = next_number(communicator, operation, peer);
    Pending* pending = taken(pending_, next_pending_);
    if (pending == nullptr) {
        dropped_.fetch_add(1, std::memory_order_relaxed);
        return nullptr;
    }
    pending->log = this;
    pending->is_counted.store(channels > 0, std::memory_order_relaxed);
    pending->begun_ns.store(monotonic_ns(), std::memory_order_relaxed);
    pending->ended_ns.store(0, std::memory_order_relaxed);
    pending->open.store(channels + 1, std::memory_order_relaxed);
    pending->start_ns.store(0, std::memory_order_relaxed);
    pending->end_ns.store(0, std::memory_order_relaxed);
    pending->transfer = {.communicator = communicator.hash,
                         .bytes = bytes,
                         .device_start_ns = 0,
                         .device_end_ns = 0,
                         .seen_ns = 0,
                         .sequence = sequence,
                         .operation = operation,
                         .peer = peer,
                         .ranks = communicator.ranks,
                         .rank = communicator.rank,
                         .channels = channels};
    return pending;
}

void TransferLog::enqueued(Pending& pending) noexcept { close_part(pending); }

TransferLog::Channel* TransferLog::begin_channel(Pending& pending, std::uint64_t start_ns) noexcept {
    if (!pending.used.load(std::memory_order_acquire)) {
        return nullptr;  // it was finished without this channel
    }
    lower(pending.start_ns, start_ns);
    Channel* channel = taken(channels_, next_channel_);
    if (channel == nullptr) {
        if (pending.is_counted.load(std::memory_order_relaxed)) {
            close_part(pending);  // its end will not be seen
        }
        return nullptr;
    }
    if (!pending.is_counted.load(std::memory_order_relaxed)) {
        pending.open.fetch_add(1, std::memory_order_relaxed);
    }
    channel->pending = &pending;
    channel->end_ns = 0;
    return channel;
}

void TransferLog::end_channel(Channel& channel) noexcept {
    Pending& pending = *channel.pending;
    raise(pending.end_ns, channel.end_ns);
    pending.ended_ns.store(monotonic_ns(), std::memory_order_relaxed);
    channel.used.store(false, std::memory_order_release);
    close_part(pending);
}

void TransferLog::close_part(Pending& pending) noexcept {
    const bool was_last = pending.open.fetch_sub(1, std::memory_order_acq_rel) == 1;
    if (was_last && pending.is_counted.load(std::memory_order_relaxed)) {
        finish(pending, monotonic_ns());
    }
}

void TransferLog::finish(Pending& pending, std::uint64_t seen_ns) noexcept {
    Transfer transfer = pending.transfer;
    transfer.device_start_ns = pending.start_ns.load(std::memory_order_relaxed);
    transfer.device_end_ns = pending.end_ns.load(std::memory_order_relaxed);
    transfer.seen_ns = seen_ns;
    pending.begun_ns.store(0, std::memory_order_relaxed);
    pending.used.store(false, std::memory_order_release);
    const std::lock_guard lock(finished_mutex_);
    if (transfer.device_end_ns == 0 || finished_.size() == most_finished_) {
        dropped_.fetch_add(1, std::memory_order_relaxed);
    } else {
        finished_.push_back(transfer);
    }
}

void TransferLog::sweep(std::uint64_t quiet_ns, std::uint64_t expire_ns) noexcept {
    const std::uint64_t now_ns = monotonic_ns();
    for (Pending& pending : pending_) {
        if (!pending.used.load(std::memory_order_acquire)) {
            continue;
        }
        const std::uint64_t ended_ns = pending.ended_ns.load(std::memory_order_relaxed);
        const std::uint64_t begun_ns = pending.begun_ns.load(std::memory_order_relaxed);
        const bool is_quiet = !pending.is_counted.load(std::memory_order_relaxed) &&
                              pending.open.load(std::memory_order_acquire) == 0 && ended_ns != 0 &&
                              ended_ns + quiet_ns <= now_ns;
        if (is_quiet || (begun_ns != 0 && ended_ns == 0 && begun_ns + expire_ns <= now_ns)) {
            finish(pending, ended_ns);
        }
    }
}

std::size_t TransferLog::take(std::span<Transfer> out, std::uint64_t quiet_ns, std::uint64_t expire_ns) {
    sweep(quiet_ns, expire_ns);
    const std::lock_guard lock(finished_mutex_);
    const std::size_t count = std::min(out.size(), finished_.size());
    const auto end = finished_.begin() + static_cast<std::ptrdiff_t>(count);
    std::copy(finished_.begin(), end, out.begin());
    finished_.erase(finished_.begin(), end);
    return count;
}

}  // namespace megatronapp::nccl
