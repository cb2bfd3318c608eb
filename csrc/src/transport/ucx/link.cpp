#include "megatronapp/transport/ucx/link.hpp"

#include <algorithm>
#include <utility>

#include "megatronapp/transport/errors.hpp"
#include "megatronapp/transport/shm/layout.hpp"

namespace megatronapp::transport::ucx {
namespace {

constexpr std::uint64_t kRoundTrips = 8;  // measured before a path counts as connected

}  // namespace

Link::Link(std::uint32_t peer, const Hello& own)
    : peer_(peer),
      own_(own),
      stride_(InboxLayout::round_up(own.slot_bytes, kPage)),
      memory_(own.slots * stride_),
      in_use_(own.slots, false) {}

void Link::greeted(const Hello& peer) {
    if (peer.slots != own_.slots || peer.slot_bytes != own_.slot_bytes) {
        mismatched("rank " + std::to_string(peer_) + " has " + std::to_string(peer.slots) + " slots of " +
                   std::to_string(peer.slot_bytes) + " bytes, this rank " + std::to_string(own_.slots) + " of " +
                   std::to_string(own_.slot_bytes) + "; start both with the same settings");
        return;
    }
    const std::lock_guard lock(mutex_);
    greeted_ = true;
}

bool Link::reserve(std::uint32_t slot) {
    {
        const std::lock_guard lock(mutex_);
        if (!in_use_[slot]) {
            in_use_[slot] = true;
            return true;
        }
    }
    damaged("a message for slot " + std::to_string(slot) + ", which is in use");
    return false;
}

void Link::landed(const Arrival& arrival) {
    const std::lock_guard lock(mutex_);
    arrivals_.push_back(arrival);
    ++landed_;
}

void Link::returned(std::uint32_t slot) {
    {
        const std::lock_guard lock(mutex_);
        if (returned_.size() < own_.slots) {
            returned_.push_back(slot);
            return;
        }
    }
    damaged("more returned slots than there are");
}

void Link::word(const WordNews& news, std::uint64_t number) {
    const std::lock_guard lock(mutex_);
    Word& word = words_[news.index];
    if (number + 1 > word.number) {
        word = {number + 1, news.value};
    }
}

void Link::entry(const EntryNews& news) {
    const std::lock_guard lock(mutex_);
    entries_.emplace(news.number, news.value);
}

void Link::closing(const Closing& closing) {
    const std::lock_guard lock(mutex_);
    closing_at_ = closing.messages;
}

void Link::damaged(const std::string& what) {
    const std::lock_guard lock(mutex_);
    if (!damage_) {
        damage_ = "rank " + std::to_string(peer_) + " sent " + what +
                  "; its memory, this rank's or the network is faulty: restart the job";
    }
}

void Link::mismatched(const std::string& what) {
    const std::lock_guard lock(mutex_);
    if (!mismatch_) {
        mismatch_ = what;
    }
}

void Link::lost(const std::string& how) {
    const std::lock_guard lock(mutex_);
    if (!loss_) {
        loss_ = how;
    }
}

bool Link::measured(std::uint64_t round_trip_ns) {
    const std::lock_guard lock(mutex_);
    if (round_trips_ >= kRoundTrips) {
        return false;
    }
    ++round_trips_;
    round_trip_ns_ = round_trip_ns_ == 0 ? round_trip_ns : std::min(round_trip_ns_, round_trip_ns);
    return true;
}

bool Link::failed() const {
    const std::lock_guard lock(mutex_);
    return damage_ || mismatch_ || loss_;
}

std::uint64_t Link::entries_read() const {
    const std::lock_guard lock(mutex_);
    return entries_read_;
}

void Link::require_sound() const {
    if (damage_) {
        throw TransportCorruptError(*damage_);
    }
    if (mismatch_) {
        throw TransportMismatchError(*mismatch_);
    }
}

std::optional<std::uint32_t> Link::next_returned() {
    const std::lock_guard lock(mutex_);
    if (returned_.empty()) {
        return std::nullopt;
    }
    const std::uint32_t slot = returned_.front();
    returned_.pop_front();
    return slot;
}

std::optional<Arrival> Link::next_arrival() {
    const std::lock_guard lock(mutex_);
    if (arrivals_.empty()) {
        return std::nullopt;
    }
    const Arrival arrival = arrivals_.front();
    arrivals_.pop_front();
    return arrival;
}

void Link::give_back(std::uint32_t slot) noexcept {
    const std::lock_guard lock(mutex_);
    in_use_[slot] = false;
}

Life Link::life() const {
    const std::lock_guard lock(mutex_);
    require_sound();
    if (closing_at_ && landed_ >= *closing_at_) {
        return Life::kClosed;
    }
    return loss_ ? Life::kLost : Life::kAlive;
}

std::string Link::how_lost() const {
    const std::lock_guard lock(mutex_);
    return loss_.value_or("died; its own log says why");
}

std::uint64_t Link::word(std::uint32_t index) const {
    const std::lock_guard lock(mutex_);
    return words_[index].value;
}

std::optional<std::uint64_t> Link::next_entry() {
    const std::lock_guard lock(mutex_);
    const auto found = entries_.find(entries_read_);
    if (found == entries_.end()) {
        return std::nullopt;
    }
    const std::uint64_t value = found->second;
    entries_.erase(found);
    ++entries_read_;
    return value;
}

bool Link::connected() const {
    const std::lock_guard lock(mutex_);
    require_sound();
    // A peer that has connected and closed already is an error only for what needs it.
    if (greeted_ && (closing_at_ || round_trips_ >= kRoundTrips)) {
        return true;
    }
    if (closing_at_ || loss_) {
        const std::string how = closing_at_ ? "gave up; its own log says why" : *loss_;
        throw PeerLostError("rank " + std::to_string(peer_) + " " + how + " (while the ranks connected)", peer_);
    }
    return false;
}

std::uint64_t Link::round_trip_ns() const {
    const std::lock_guard lock(mutex_);
    return round_trip_ns_;
}

bool Link::round_trip_wanted() const {
    const std::lock_guard lock(mutex_);
    return round_trips_ < kRoundTrips;
}

void Link::end() {
    const std::lock_guard lock(mutex_);
    ended_ = true;
    changed_.notify_all();
}

void Link::await_end() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return ended_; });
}

}  // namespace megatronapp::transport::ucx
