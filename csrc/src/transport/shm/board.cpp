#include "megatronapp/transport/shm/board.hpp"

#include <algorithm>
#include <new>
#include <utility>

#include "megatronapp/transport/errors.hpp"

namespace megatronapp::transport {
namespace {

void require_word(std::uint32_t index) {
    if (index >= kProgressWords) {
        throw TransportError("progress word " + std::to_string(index) + " does not exist; use 0 to " +
                             std::to_string(kProgressWords - 1));
    }
}

/// Writes what the board is while nobody else can see it, and takes its lock.
LifeLock prepare(const SharedFile& file, const Identity& identity) {
    auto* layout = new (file.data()) BoardLayout{};
    layout->identity = identity;
    layout->state.store(kOpenWord, std::memory_order_relaxed);
    return file.lock();
}

}  // namespace

OwnBoard::OwnBoard(SharedFile file, const Identity& identity)
    : file_(std::move(file)),
      lock_(prepare(file_, identity)),
      log_(&layout().log_count, layout().log.data(), kLogEntries) {
    if (!file_.publish()) {
        throw TransportError(file_.path() + ": another process is rank " + std::to_string(identity.owner) +
                             " of this attempt; give each process a rank of its own, and each attempt a new number");
    }
}

const Word& OwnBoard::word(std::uint32_t index) const {
    require_word(index);
    return layout().words[index];
}

void OwnBoard::publish_word(std::uint32_t index, std::uint64_t value) const {
    require_word(index);
    layout().words[index].store(value, std::memory_order_release);
}

void OwnBoard::lead(const std::vector<std::uint32_t>& followers) {
    if (!followers_.empty() || followers.empty() || followers.size() > kMaxFollowers) {
        throw TransportError("a log is led once, with 1 to " + std::to_string(kMaxFollowers) + " followers, not " +
                             std::to_string(followers.size()) + " more");
    }
    for (std::size_t i = 0; i < followers.size(); ++i) {
        followers_.push_back({followers[i], 0});
        layout().followers[i].rank.store(std::uint64_t{followers[i]} + 1, std::memory_order_release);
    }
}

std::optional<std::uint32_t> OwnBoard::slowest_follower() {
    for (std::size_t i = 0; i < followers_.size(); ++i) {
        FollowerState& follower = followers_[i];
        const std::uint64_t cursor = layout().followers[i].cursor.load(std::memory_order_acquire);
        if (cursor < follower.cursor || cursor > log_.count()) {
            throw TransportCorruptError("the log's cursor of rank " + std::to_string(follower.rank) + " is " +
                                        std::to_string(cursor) + " after " + std::to_string(follower.cursor) + ", of " +
                                        std::to_string(log_.count()) +
                                        " entries; something else writes to this memory: restart the job");
        }
        follower.cursor = cursor;
        if (log_.count() - cursor >= kLogEntries) {
            return follower.rank;
        }
    }
    return std::nullopt;
}

void OwnBoard::close() const noexcept { layout().state.store(kClosedWord, std::memory_order_seq_cst); }

PeerBoard::PeerBoard(SharedFile file, std::uint32_t rank)
    : file_(std::move(file)), rank_(rank), log_(&layout().log_count, layout().log.data(), kLogEntries) {}

Life PeerBoard::life() const {
    // In this order: a rank closes its board before its lock ends.
    const bool locked = file_.locked();
    const std::uint64_t state = layout().state.load(std::memory_order_seq_cst);
    if (state == kClosedWord) {
        return Life::kClosed;
    }
    if (state != kOpenWord) {
        throw TransportCorruptError("the board of rank " + std::to_string(rank_) + " is in state " +
                                    std::to_string(state) +
                                    ", which no rank writes; something else writes to this memory: restart the job");
    }
    return locked ? Life::kAlive : Life::kLost;
}

std::uint64_t PeerBoard::word(std::uint32_t index) const {
    require_word(index);
    return layout().words[index].load(std::memory_order_acquire);
}

bool PeerBoard::follow(std::uint32_t own_rank) noexcept {
    for (Follower& follower : layout().followers) {
        if (place_ == nullptr && follower.rank.load(std::memory_order_acquire) == std::uint64_t{own_rank} + 1) {
            place_ = &follower;
        }
    }
    return place_ != nullptr;
}

std::optional<std::uint64_t> PeerBoard::next_entry() {
    const std::optional<RingEntry<1>> entry = log_.next("the log of rank " + std::to_string(rank_));
    if (!entry) {
        return std::nullopt;
    }
    place_->cursor.store(log_.count(), std::memory_order_release);
    if (layout().log_count.load(std::memory_order_acquire) - log_.count() >= kLogEntries / 2) {
        ring_activity();
    }
    return entry->front();
}

}  // namespace megatronapp::transport
