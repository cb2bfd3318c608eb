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

Peer::Peer(std::uint32_t own_rank, std::uint32_t rank, double deadline_s, std::unique_ptr<Path> path,
           std::unique_ptr<RemoteBoard> board, Completions& completions)
    : own_rank_(own_rank),
      rank_(rank),
      deadline_s_(deadline_s),
      completions_(&completions),
      board_(std::move(board)),
      path_(std::move(path)),
      keys_in_flight_(4 * path_->slots()),
      lent_to_(path_->slots()),
      arrived_(path_->slots()),
      arrivals_(path_->slots()),
      slot_states_(path_->slots(), SlotState::kFree),
      later_(path_->slots()) {
    for (auto slot = static_cast<std::uint32_t>(path_->slots()); slot > 0; --slot) {
        free_slots_.push_back(slot - 1);
    }
}

void Peer::post(SendRequest request, std::optional<DeviceStream> stream) {
    request.after = stream ? path_->mark(*stream) : nullptr;  // without the lock: a full stream may block it
    try {
        enqueue(request);
    } catch (...) {
        if (stream) {
            path_->drop_mark(request.after);
        }
        throw;
    }
}

void Peer::enqueue(const SendRequest& request) {
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
        path_->need_slot();
        return std::nullopt;
    }
    const StartedSend started{queue_.pop(), free_slots_.back()};
    free_slots_.pop_back();
    lent_to_[started.slot] = started.request.key;
    ++copying_;
    last_start_ns_ = monotonic_ns();
    return started;
}

void Peer::completed(const StartedSend& started, std::uint64_t start_ns, std::uint64_t end_ns) noexcept {
    {
        const std::lock_guard lock(mutex_);
        transfers_.add({started.request.key, started.request.bytes, start_ns, end_ns, true});
        --copying_;
    }
    ring_activity();
    completions_->add(started.request.ticket);
}

void Peer::failed(const StartedSend& started, const std::string& why) noexcept {
    {
        const std::lock_guard lock(mutex_);
        --copying_;
        ++undelivered_;
        if (!failure_) {
            examine_life(monotonic_ns());  // a path may fail because the peer is lost
        }
        fail({FailureKind::kPath, why, {}});
    }
    completions_->add(started.request.ticket);
}

bool Peer::sending() const {
    const std::lock_guard lock(mutex_);
    return copying_ > 0 || !queue_.empty();
}

std::optional<Arrival> Peer::take(std::uint64_t key, bool posted) {
    const std::lock_guard lock(mutex_);
    if (failure_ && failure_->kind == FailureKind::kCorrupt) {
        raise_failure();
    }
    read_arrivals();
    const std::optional<std::uint32_t> slot = arrived_.find_value(key);
    const bool arrived = slot && whole_locked(*slot);
    const bool is_timed = arrived && timed(*slot);
    if (!arrived || (!is_timed && !posted)) {
        require_well_locked();  // a dead sender does not tell the times any more
    }
    if (!slot || (!posted && !is_timed)) {
        return std::nullopt;
    }
    arrived_.take(key);
    return hold(*slot);
}

void Peer::take_all(std::vector<Arrival>& arrivals) {
    const std::lock_guard lock(mutex_);
    if (failure_ && failure_->kind == FailureKind::kCorrupt) {
        raise_failure();
    }
    read_arrivals();
    std::uint64_t waiting = arrived_.size();
    for (std::uint32_t slot = 0; waiting > 0; ++slot) {
        if (slot_states_[slot] != SlotState::kWaiting) {
            continue;
        }
        --waiting;
        if (whole_locked(slot) && timed(slot)) {
            arrived_.take(arrivals_[slot].key);
            arrivals.push_back(hold(slot));
        }
    }
}

std::vector<std::uint64_t> Peer::posted() {
    const std::lock_guard lock(mutex_);
    if (failure_ && failure_->kind == FailureKind::kCorrupt) {
        raise_failure();
    }
    read_arrivals();
    std::vector<std::uint64_t> keys;
    std::uint64_t waiting = arrived_.size();
    for (std::uint32_t slot = 0; waiting > 0; ++slot) {
        if (slot_states_[slot] == SlotState::kWaiting) {
            --waiting;
            if (!failure_ || whole_locked(slot)) {
                keys.push_back(arrivals_[slot].key);
            }
        }
    }
    if (keys.empty()) {
        require_well_locked();
    }
    return keys;
}

/// Whether the times of a whole message are known; a sender tells them soon after its copy has ended.
bool Peer::timed(std::uint32_t slot) {
    Arrival& arrival = arrivals_[slot];
    if (arrival.end_ns == 0) {
        const CopyTimes times = path_->times(arrival).value_or(CopyTimes{0, 0});
        arrival.start_ns = times.start_ns;
        arrival.end_ns = times.end_ns;
    }
    return arrival.end_ns != 0;
}

/// Its slot is that of the receiver until `give_back`. It is counted once its times are known.
const Arrival& Peer::hold(std::uint32_t slot) noexcept {
    slot_states_[slot] = SlotState::kHeld;
    const Arrival& arrival = arrivals_[slot];
    if (arrival.end_ns != 0) {
        count_received(arrival, {arrival.start_ns, arrival.end_ns});
    }
    return arrival;
}

void Peer::count_received(const Arrival& arrival, const CopyTimes& times) noexcept {
    transfers_.add({arrival.key, arrival.bytes, times.start_ns, times.end_ns, false});
}

std::shared_ptr<LaterTimes> Peer::later_times(const Arrival& arrival) {
    if (arrival.end_ns != 0) {
        return nullptr;
    }
    const std::lock_guard lock(mutex_);
    later_[arrival.slot] = std::make_shared<LaterTimes>();
    return later_[arrival.slot];
}

std::optional<CopyTimes> Peer::times(const Arrival& arrival, LaterTimes& later) {
    const std::lock_guard lock(mutex_);
    if (later_[arrival.slot].get() == &later) {  // otherwise they were kept when the next message came
        keep_times(arrival.slot);
    }
    return later.times;
}

/// Reads the times of the last message of a slot if it was taken before they were known.
void Peer::keep_times(std::uint32_t slot) {
    if (later_[slot] == nullptr) {
        return;
    }
    const std::optional<CopyTimes> times = path_->times(arrivals_[slot]);
    if (times) {
        later_[slot]->times = times;
        later_[slot].reset();
        count_received(arrivals_[slot], *times);
    }
}

bool Peer::whole(std::uint32_t slot) {
    const std::lock_guard lock(mutex_);
    const bool result = whole_locked(slot);
    if (!result) {
        require_well_locked();
    }
    return result;
}

bool Peer::whole_locked(std::uint32_t slot) {
    try {
        return path_->landed(slot);
    } catch (const TransportCorruptError& error) {
        fail({FailureKind::kCorrupt, error.what(), {}});
        throw;
    }
}

void Peer::wait(std::uint32_t slot, DeviceStream stream) {
    static_cast<void>(whole(slot));  // raises the failure of a peer that will never write what is waited for
    path_->wait(slot, stream);
}

void Peer::give_back(std::uint32_t slot, std::optional<DeviceStream> stream) noexcept {
    const bool in_stream = stream && path_->on_device();  // otherwise no work of a stream reads the slot
    {
        const std::lock_guard lock(mutex_);
        if (closed_) {
            return;
        }
        slot_states_[slot] = SlotState::kFree;
        if (!in_stream) {
            path_->give_back(slot);
        }
    }
    if (in_stream) {
        path_->give_back_after(slot, *stream);
    }
    board_->ring_credits();
}

std::uint64_t Peer::word(std::uint32_t index) const {
    const std::lock_guard lock(mutex_);
    return board_->word(index);
}

void Peer::word_published(std::uint32_t index, std::uint64_t value) noexcept {
    const std::lock_guard lock(mutex_);
    board_->word_published(index, value);
}

void Peer::entry_appended(std::uint64_t value) noexcept {
    const std::lock_guard lock(mutex_);
    board_->entry_appended(value);
}

std::optional<std::uint64_t> Peer::next_entry() {
    const std::lock_guard lock(mutex_);
    if (failure_ && failure_->kind == FailureKind::kCorrupt) {
        raise_failure();
    }
    std::optional<std::uint64_t> entry;
    try {
        if (board_->follow(own_rank_)) {
            entry = board_->next_entry();
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
    {
        const std::lock_guard lock(mutex_);
        if (!failure_ && !closed_) {
            examine_life(now_ns);
        }
        if (!failure_ || closed_ || abandoned_) {
            return false;
        }
    }
    abandon();
    return true;
}

void Peer::examine_life(std::uint64_t now_ns) {
    const std::string peer = "rank " + std::to_string(rank_);
    try {
        const Life life = board_->life();
        if (life == Life::kLost) {
            fail({FailureKind::kLost, peer + " " + board_->how_lost(), {}});
        } else if (life == Life::kClosed) {
            fail({FailureKind::kLost, peer + " closed its transport while this rank still needs it", {}});
        } else if (stalled(now_ns)) {
            fail({FailureKind::kTimeout, stalled_text(), {rank_, queue_.front().key, "send", deadline_s_}});
        }
    } catch (const TransportCorruptError& error) {
        fail({FailureKind::kCorrupt, error.what(), {}});
    }
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
        case FailureKind::kPath:
            throw TransportError(failure_->text);
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
            keep_times(arrival->slot);
            later_[arrival->slot].reset();
            slot_states_[arrival->slot] = SlotState::kWaiting;
            arrivals_[arrival->slot] = *arrival;
        }
    } catch (const TransportCorruptError& error) {
        fail({FailureKind::kCorrupt, error.what(), {}});
        throw;
    }
}

void Peer::abandon() noexcept {
    {
        const std::lock_guard lock(mutex_);
        if (std::exchange(abandoned_, true)) {
            return;
        }
    }
    path_->abandon();
}

void Peer::close() noexcept {
    {
        const std::lock_guard lock(mutex_);
        if (std::exchange(closed_, true)) {
            return;
        }
        while (!queue_.empty()) {
            completions_->add(queue_.pop().ticket);
        }
    }
    path_->stop();
}

PeerStatistics Peer::statistics() const {
    const std::lock_guard lock(mutex_);
    return transfers_.statistics(path_->name());
}

}  // namespace megatronapp::transport
