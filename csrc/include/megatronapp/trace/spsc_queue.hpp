#pragma once

#include <atomic>
#include <cstddef>
#include <vector>

namespace megatronapp {

/// A queue from one thread to another. Neither waits for the other; all memory is taken by the constructor.
template <typename Value>
class SpscQueue {
  public:
    explicit SpscQueue(std::size_t capacity) : slots_(capacity + 1) {}

    /// Number of values that may be pushed without failing; only for the thread that pushes.
    [[nodiscard]] std::size_t free_slots() const noexcept {
        const std::size_t pushed = pushed_.load(std::memory_order_relaxed);
        const std::size_t popped = popped_.load(std::memory_order_acquire);
        return (popped + slots_.size() - pushed - 1) % slots_.size();
    }

    /// Returns false if the queue is full.
    bool push(const Value& value) noexcept {
        const std::size_t pushed = pushed_.load(std::memory_order_relaxed);
        const std::size_t next = following(pushed);
        if (next == popped_.load(std::memory_order_acquire)) {
            return false;
        }
        slots_[pushed] = value;
        pushed_.store(next, std::memory_order_release);
        return true;
    }

    /// The oldest value, or null; only for the thread that pops.
    [[nodiscard]] Value* front() noexcept {
        const std::size_t popped = popped_.load(std::memory_order_relaxed);
        return popped == pushed_.load(std::memory_order_acquire) ? nullptr : &slots_[popped];
    }

    /// Removes the value that `front` returned.
    void pop() noexcept {
        popped_.store(following(popped_.load(std::memory_order_relaxed)), std::memory_order_release);
    }

  private:
    [[nodiscard]] std::size_t following(std::size_t place) const noexcept {
        return place + 1 == slots_.size() ? 0 : place + 1;
    }

    std::vector<Value> slots_;
    alignas(64) std::atomic<std::size_t> pushed_ = 0;
    alignas(64) std::atomic<std::size_t> popped_ = 0;
};

}  // namespace megatronapp
