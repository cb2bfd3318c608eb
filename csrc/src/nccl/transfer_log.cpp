#include "megatronapp/nccl/transfer_log.hpp"

#include <algorithm>
#include <iterator>

#include "megatronapp/clock.hpp"

namespace megatronapp::nccl {
namespace {

constexpr std::size_t kChannelsOfOne = 64;  // the most that NCCL uses for one operation

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
    : free_(pending), channels_(pending * kChannelsOfOne / 4), most_finished_(finished) {
    finished_.reserve(finished);
}

TransferLog::Pending* TransferLog::begin(Communicator& communicator, Operation operation, std::uint64_t bytes,
                                         std::int32_t peer, std::uint32_t channels) noexcept {
    const std::uint32_t sequence = next_number(communicator, operation, peer);
    const std::lock_guard lock(mutex_);
    begun_[num_begun_++ % begun_.size()] = {bytes, communicator.hash};
    if (free_.empty()) {
        ++dropped_;
        return nullptr;
    }
    in_flight_.splice(in_flight_.end(), free_, free_.begin());
    Pending& pending = in_flight_.back();
    pending.used = true;
    pending.place = std::prev(in_flight_.end());
    pending.is_enqueued = false;
    pending.is_counted = channels > 0;
    pending.awaited = channels;
    pending.open = 0;
    pending.begun_ns = monotonic_ns();
    pending.ended_ns = 0;
    pending.transfer = {.communicator = communicator.hash,
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
    return &pending;
}

void TransferLog::enqueued(Pending& pending) noexcept {
    const std::lock_guard lock(mutex_);
    if (pending.used) {
        pending.is_enqueued = true;
        finish_if_complete(pending);
    }
}

TransferLog::Channel* TransferLog::begin_channel(Pending& pending, std::uint64_t start_ns) noexcept {
    const std::lock_guard lock(mutex_);
    if (!pending.used) {
        return nullptr;  // it was finished without this channel
    }
    std::uint64_t& first_ns = pending.transfer.device_start_ns;
    if (start_ns != 0 && (first_ns == 0 || start_ns < first_ns)) {
        first_ns = start_ns;
    }
    pending.awaited -= pending.awaited > 0 ? 1 : 0;
    Channel& channel = channels_[next_channel_++ % channels_.size()];
    if (channel.used) {  // too many are open: the end of this one will not be seen
        finish_if_complete(pending);
        return nullptr;
    }
    ++pending.open;
    channel.used = true;
    channel.pending = &pending;
    channel.end_ns = 0;
    return &channel;
}

void TransferLog::channel_ends_at(Channel& channel, std::uint64_t end_ns) noexcept {
    const std::lock_guard lock(mutex_);
    channel.end_ns = end_ns;
}

void TransferLog::end_channel(Channel& channel) noexcept {
    const std::lock_guard lock(mutex_);
    if (!channel.used) {
        return;  // NCCL has missed the begin of another channel, and ends this one again in its place
    }
    channel.used = false;
    Pending& pending = *channel.pending;
    pending.transfer.device_end_ns = std::max(pending.transfer.device_end_ns, channel.end_ns);
    pending.ended_ns = monotonic_ns();
    --pending.open;
    finish_if_complete(pending);
}

void TransferLog::finish_if_complete(Pending& pending) noexcept {
    if (pending.is_counted && pending.is_enqueued && pending.awaited == 0 && pending.open == 0) {
        finish(pending, monotonic_ns());
    }
}

void TransferLog::finish(Pending& pending, std::uint64_t seen_ns) noexcept {
    pending.used = false;
    Transfer& transfer = pending.transfer;
    transfer.seen_ns = seen_ns;
    // NCCL reuses the places of its times, so that those of a late report may be of later operations.
    const bool has_times = transfer.device_start_ns != 0 && transfer.device_start_ns <= transfer.device_end_ns;
    if (!has_times || finished_.size() == most_finished_) {
        ++dropped_;
    } else {
        finished_.push_back(transfer);
    }
    free_.splice(free_.end(), in_flight_, pending.place);  // at the end: late calls for it find it unused for long
}

void TransferLog::sweep(const Patience& patience) noexcept {
    const std::uint64_t now_ns = monotonic_ns();
    for (auto place = in_flight_.begin(); place != in_flight_.end();) {
        Pending& pending = *place++;
        if (pending.open > 0) {
            continue;
        }
        const std::uint64_t quiet_ns = pending.is_counted ? patience.missing_ns : patience.quiet_ns;
        const bool has_ended = pending.ended_ns != 0;
        if (now_ns >= (has_ended ? pending.ended_ns + quiet_ns : pending.begun_ns + patience.expire_ns)) {
            finish(pending, pending.ended_ns);
        }
    }
}

std::size_t TransferLog::take(std::span<Transfer> out, const Patience& patience) {
    const std::lock_guard lock(mutex_);
    sweep(patience);
    const std::size_t count = std::min(out.size(), finished_.size());
    const auto end = finished_.begin() + static_cast<std::ptrdiff_t>(count);
    std::copy(finished_.begin(), end, out.begin());
    finished_.erase(finished_.begin(), end);
    return count;
}

std::optional<std::uint64_t> TransferLog::communicator_of(std::uint64_t bytes) const {
    const std::lock_guard lock(mutex_);
    const std::uint64_t known = std::min<std::uint64_t>(num_begun_, begun_.size());
    for (std::uint64_t back = 1; back <= known; ++back) {
        const Begun& each = begun_[(num_begun_ - back) % begun_.size()];
        if (each.bytes == bytes) {
            return each.communicator;
        }
    }
    return std::nullopt;
}

std::size_t TransferLog::in_flight() const {
    const std::lock_guard lock(mutex_);
    return in_flight_.size();
}

std::uint64_t TransferLog::dropped() const {
    const std::lock_guard lock(mutex_);
    return dropped_;
}

}  // namespace megatronapp::nccl
