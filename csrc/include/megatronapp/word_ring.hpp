/// The protocol that every changing part of the ring file follows.
///
/// One producer, many readers, nobody blocks. The producer counts `claim` up before it touches a slot and `commit`
/// after it has filled it. A reader copies committed items and then looks at `claim`: an item whose slot has been
/// claimed again may be torn and is given up. Slots are relaxed atomic words and two fences order them against the
/// counters (the sequence lock of Boehm, "Can seqlocks get along with programming language memory models?", 2012,
/// with one counter per ring in place of one per slot).
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

namespace megatronapp {

static_assert(std::atomic<std::uint64_t>::is_always_lock_free, "a lock cannot be shared between processes");

/// Counts over the whole life of a ring; items below `commit` are whole, those from there up to `claim` are not yet.
struct RingCounters {
    std::atomic<std::uint64_t> claim;
    std::atomic<std::uint64_t> commit;
};

template <std::size_t Words>
using Item = std::array<std::uint64_t, Words>;

template <std::size_t Words>
using Slot = std::array<std::atomic<std::uint64_t>, Words>;

/// The writing side. Not safe for two threads at once.
template <std::size_t Words>
class WordProducer {
  public:
    WordProducer(RingCounters& counters, Slot<Words>* slots, std::uint64_t capacity) noexcept
        : counters_(&counters), slots_(slots), capacity_(capacity) {}

    void push(const Item<Words>& item) noexcept {
        counters_->claim.store(++count_, std::memory_order_relaxed);
        // A reader that sees any word below also sees the claim above.
        std::atomic_thread_fence(std::memory_order_release);
        Slot<Words>& slot = slots_[position_];
        for (std::size_t word = 0; word < Words; ++word) {
            slot[word].store(item[word], std::memory_order_relaxed);
        }
        counters_->commit.store(count_, std::memory_order_release);
        position_ = position_ + 1 == capacity_ ? 0 : position_ + 1;
    }

  private:
    RingCounters* counters_;
    Slot<Words>* slots_;
    std::uint64_t capacity_;
    std::uint64_t count_ = 0;
    std::uint64_t position_ = 0;
};

/// What a copy brought: the whole items are out[skipped] to out[skipped + count - 1], the first has index `first`.
struct Copied {
    std::uint64_t first;
    std::uint64_t skipped;
    std::uint64_t count;
};

/// The reading side; holds no state, so one object serves any number of threads.
template <std::size_t Words>
class WordConsumer {
  public:
    WordConsumer(const RingCounters& counters, const Slot<Words>* slots, std::uint64_t capacity) noexcept
        : counters_(&counters), slots_(slots), capacity_(capacity) {}

    [[nodiscard]] std::uint64_t committed() const noexcept { return counters_->commit.load(std::memory_order_acquire); }

    /// Copies at most `max` committed items, from index `from` or the oldest that is still there.
    [[nodiscard]] Copied copy(std::uint64_t from, std::uint64_t max, Item<Words>* out) const noexcept {
        const std::uint64_t end = committed();
        const std::uint64_t first = std::max(from, end > capacity_ ? end - capacity_ : 0);
        const std::uint64_t wanted = first < end ? std::min(max, end - first) : 0;
        for (std::uint64_t i = 0; i < wanted; ++i) {
            const Slot<Words>& slot = slots_[(first + i) % capacity_];
            for (std::size_t word = 0; word < Words; ++word) {
                out[i][word] = slot[word].load(std::memory_order_relaxed);
            }
        }
        // Pairs with the producer's fence: a word of a newer item above shows its claim below.
        std::atomic_thread_fence(std::memory_order_acquire);
        const std::uint64_t claimed = counters_->claim.load(std::memory_order_relaxed);
        const std::uint64_t oldest = claimed > capacity_ ? claimed - capacity_ : 0;
        const std::uint64_t skipped = oldest > first ? std::min(oldest - first, wanted) : 0;
        return {first + skipped, skipped, wanted - skipped};
    }

  private:
    const RingCounters* counters_;
    const Slot<Words>* slots_;
    std::uint64_t capacity_;
};

}  // namespace megatronapp
