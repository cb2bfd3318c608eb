#include "megatronapp/transport/peer.hpp"

#include <algorithm>
#include <sstream>
#include <utility>

#include "megatronapp/clock.hpp"

namespace megatronapp::transport {
namespace {

std::string seconds_text(double seconds) {
    std::ostringstream text;
    text << seconds << " s";
    return text.str();
}

std::string key_text(std::uint64_t key) {
    std::ostringstream text;
    text << "0x" << std::hex << key;
    return text.str();
}

}  // namespace

Peer::Peer(std::uint32_t own_rank, std::uint32_t rank, double deadline_s, std::unique_ptr<Path> path, PeerBoard board,
           Completions& completions)
    : own_rank_(own_rank),
      rank_(rank),
      deadline_s_(deadline_s),
      completions_(&completions),
      path_(std::move(path)),
      board_(std::move(board)),
      keys_in_flight_(4 * path_->slots()),
      lent_to_(path_->slots()),
      arrived_(path_->slots()),
      arrivals_(path_->slots()),
      slot_states_(path_->slots(), SlotState::kFree) {
    for (auto slot = static_cast<std::uint32_t>(path_->slots()); slot > 0; --slot) {
        free_slots_.push_back(slot - 1);
    }
}

void Peer::post(const SendRequest& request) {
    const std::lock_guard lock(mutex_);
    require_well_locked();
    if (closed_) {
        throw TransportError("this endpoint is closed");
    }
    if (path_->slots() == 0) {
        throw TransportError("rank " + std::to_string(rank_) +
                             " was added without messages; add it with messages on both ranks");
    }
    if (request.bytes > path_->slot_bytes()) {
        throw TransportError("a message of " + std::to_string(request.bytes) + " bytes to rank " +
                             std::to_string(rank_) + " does not fit a slot of " + std::to_string(path_->slot_bytes()) +
                             "; give all ranks larger slots");
    }
    read_returned();
    if (!keys_in_flight_.insert(request.key, 0)) {
        throw DuplicateKeyError("key " + key_text(request.key) + " was sent to rank " + std::to_string(rank_) +
                                " before, and that message is not released yet; use a key once at a time");
    }
    queue_.push(request);
}

std::optional<StartedSend> Peer::start_next(std::uint64_t most_bytes) noexcept {
    const std::lock_guard lock(mutex_);
    if (failure_ || closed_ || queue_.empty() || queue_.front().bytes > most_bytes) {
        return std::nullopt;
    }
    try {
        read_returned();
    } catch (const TransportCorruptError&) {
        return std::nullopt;  // recorded; the next call of the user raises it
    }
    if (free_slots_.empty()) {
        return std::nullopt;
    }
    const StartedSend started{queue_.pop(), free_slots_.back()};
    free_slots_.pop_back();
    lent_to_[started.slot] = started.request.key;
    ++copying_;
    last_start_ns_ = monotonic_ns();
    return started;
}

void Peer::copy(const StartedSend& started) {
    const SendRequest& request = started.request;
    const std::uint64_t start_ns = monotonic_ns();
    path_->copy(started.slot, request.data, request.bytes);
    const std::uint64_t end_ns = monotonic_ns();
    {
        const std::lock_guard lock(mutex_);
        path_->announce({request.key, request.bytes, started.slot, start_ns, end_ns});
        transfers_.add({request.key, request.bytes, start_ns, end_ns, true});
        --copying_;
    }
    ring_activity();
    completions_->add(request.ticket);
}

bool Peer::sending() const {
    const std::lock_guard lock(mutex_);
    return copying_ > 0 || !queue_.empty();
}

std::optional<Arrival> Peer::take(std::uint64_t key) {
    const std::lock_guard lock(mutex_);
    if (failure_ && failure_->kind == FailureKind::kCorrupt) {
        raise_failure();
    }
    read_arrivals();
    const std::optional<std::uint32_t> slot = arrived_.take(key);
    if (!slot) {
        require_well_locked();
        return std::nullopt;
    }
    slot_states_[*slot] = SlotState::kHeld;
    const Arrival& arrival = arrivals_[*slot];
    transfers_.add({arrival.key, arrival.bytes, arrival.start_ns, arrival.end_ns, false});
    return arrival;
}

void Peer::give_back(std::uint32_t slot) noexcept {
    {
        const std::lock_guard lock(mutex_);
        if (closed_) {
            return;
        }
        slot_states_[slot] = SlotState::kFree;
        path_->give_back(slot);
    }
    ring(board_.layout().credits);
}

std::optional<std::uint64_t> Peer::next_entry() {
    const std::lock_guard lock(mutex_);
    if (failure_ && failure_->kind == FailureKind::kCorrupt) {
        raise_failure();
    }
    std::optional<std::uint64_t> entry;
    try {
        if (board_.follow(own_rank_)) {
            entry = board_.next_entry();
        }
    } catch (const TransportCorruptError& error) {
        fail({FailureKind::kCorrupt, error.what(), {}});
        throw;
    }
    if (!entry) {
        require_well_locked();
    }
    return entry;
}

bool Peer::examine(std::uint64_t now_ns) {
    const std::lock_guard lock(mutex_);
    if (failure_ || closed_) {
        return false;
    }
    const std::string peer = "rank " + std::to_string(rank_);
    try {
        const Life life = board_.life();
        if (life == Life::kLost) {
            fail({FailureKind::kLost, peer + " died; its own log says why", {}});
        } else if (life == Life::kClosed) {
            fail({FailureKind::kLost, peer + " closed its transport while this rank still needs it", {}});
        } else if (stalled(now_ns)) {
            fail({FailureKind::kTimeout, stalled_text(), {rank_, queue_.front().key, "send", deadline_s_}});
        }
    } catch (const TransportCorruptError& error) {
        fail({FailureKind::kCorrupt, error.what(), {}});
    }
    return failure_.has_value();
}

bool Peer::stalled(std::uint64_t now_ns) const noexcept {
    if (queue_.empty()) {
        return false;
    }
    const std::uint64_t since = std::max(queue_.front().queued_ns, last_start_ns_);
    return now_ns > since && static_cast<double>(now_ns - since) > deadline_s_ * 1e9;
}

std::string Peer::stalled_text() const {
    return "send of key " + key_text(queue_.front().key) + " to rank " + std::to_string(rank_) +
           ": no slot became free within " + seconds_text(deadline_s_) +
           "; that rank hangs or does not release messages";
}

void Peer::require_well() const {
    const std::lock_guard lock(mutex_);
    require_well_locked();
}

void Peer::require_well_locked() const {
    if (failure_) {
        raise_failure();
    }
}

void Peer::raise_failure() const {
    switch (failure_->kind) {
        case FailureKind::kLost:
            throw PeerLostError(failure_->text, rank_);
        case FailureKind::kTimeout:
            throw TransferTimeoutError(failure_->text, failure_->timeout);
        default:
            throw TransportCorruptError(failure_->text);
    }
}

void Peer::require_delivered() const {
    const std::lock_guard lock(mutex_);
    if (failure_ && undelivered_ > 0) {
        raise_failure();
    }
}

/// Keeps the first failure, and gives the memory of queued messages back to the caller.
void Peer::fail(Failure failure) {
    if (!failure_) {
        failure_ = std::move(failure);
    }
    while (!queue_.empty()) {
        completions_->add(queue_.pop().ticket);
        ++undelivered_;
    }
}

void Peer::read_returned() {
    try {
        while (const std::optional<std::uint32_t> slot = path_->next_returned()) {
            std::optional<std::uint64_t>& key = lent_to_[*slot];
            if (!key) {
                throw TransportCorruptError("rank " + std::to_string(rank_) + " returned slot " +
                                            std::to_string(*slot) + ", which it does not have");
            }
            keys_in_flight_.take(*key);
            key.reset();
            free_slots_.push_back(*slot);
        }
    } catch (const TransportCorruptError& error) {
        fail({FailureKind::kCorrupt, error.what(), {}});
        throw;
    }
}

void Peer::read_arrivals() {
    try {
        while (const std::optional<Arrival> arrival = path_->next_arrival()) {
            if (slot_states_[arrival->slot] != SlotState::kFree || !arrived_.insert(arrival->key, arrival->slot)) {
                throw TransportCorruptError("rank " + std::to_string(rank_) + " sent key " + key_text(arrival->key) +
                                            " in slot " + std::to_string(arrival->slot) +
                                            ", and one of them is in use");
            }
            slot_states_[arrival->slot] = SlotState::kWaiting;
            arrivals_[arrival->slot] = *arrival;
        }
    } catch (const TransportCorruptError& error) {
        fail({FailureKind::kCorrupt, error.what(), {}});
        throw;
    }
}

void Peer::close() noexcept {
    const std::lock_guard lock(mutex_);
    closed_ = true;
    while (!queue_.empty()) {
        completions_->add(queue_.pop().ticket);
    }
}

PeerStatistics Peer::statistics() const {
    const std::lock_guard lock(mutex_);
    return transfers_.statistics(path_->name());
}

}  // namespace megatronapp::transport
