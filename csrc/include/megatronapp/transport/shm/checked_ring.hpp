/// Rings of small entries in shared memory with one writer and one reader, or one writer and readers that it waits for.
/// Each entry has a check of its number and contents, so that a reader refuses what the writer did not put there.
/// Who writes keeps its own count and reads nothing back; who reads looks at each shared word once.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "megatronapp/transport/errors.hpp"

namespace megatronapp::transport {

static_assert(std::atomic<std::uint64_t>::is_always_lock_free, "a lock cannot be shared between processes");

using Word = std::atomic<std::uint64_t>;

/// The finalizer of SplitMix64 (Steele, Lea, Flood, 2014) over what came before and the next word.
[[nodiscard]] constexpr std::uint64_t mix(std::uint64_t hash, std::uint64_t word) noexcept {
    std::uint64_t z = (hash ^ word) + 0x9E37'79B9'7F4A'7C15;
    z = (z ^ (z >> 30U)) * 0xBF58'476D'1CE4'E5B9;
    z = (z ^ (z >> 27U)) * 0x94D0'49BB'1331'11EB;
    return z ^ (z >> 31U);
}

template <std::size_t Words>
using RingEntry = std::array<std::uint64_t, Words>;

/// An entry as it lies in shared memory; the last word is its check.
template <std::size_t Words>
using SharedEntry = std::array<Word, Words + 1>;

template <std::size_t Words>
[[nodiscard]] constexpr std::uint64_t check_of(std::uint64_t number, const RingEntry<Words>& entry) noexcept {
    std::uint64_t hash = mix(0, number);
    for (const std::uint64_t word : entry) {
        hash = mix(hash, word);
    }
    return hash;
}

/// The writing side. Its user makes sure that no entry is overwritten before it was read.
template <std::size_t Words>
class CheckedWriter {
  public:
    CheckedWriter(Word* count, SharedEntry<Words>* entries, std::uint64_t capacity) noexcept
        : shared_count_(count), entries_(entries), capacity_(capacity) {}

    void push(const RingEntry<Words>& entry) noexcept {
        SharedEntry<Words>& slot = entries_[count_ % capacity_];
        for (std::size_t i = 0; i < Words; ++i) {
            slot[i].store(entry[i], std::memory_order_relaxed);
        }
        slot[Words].store(check_of(count_, entry), std::memory_order_relaxed);
        shared_count_->store(++count_, std::memory_order_release);
    }

    [[nodiscard]] std::uint64_t count() const noexcept { return count_; }

  private:
    Word* shared_count_;
    SharedEntry<Words>* entries_;
    std::uint64_t capacity_;
    std::uint64_t count_ = 0;
};

/// The reading side.
template <std::size_t Words>
class CheckedReader {
  public:
    CheckedReader(const Word* count, const SharedEntry<Words>* entries, std::uint64_t capacity) noexcept
        : shared_count_(count), entries_(entries), capacity_(capacity) {}

    /// The next entry, if there is one. Raises TransportCorruptError, which names `what` the ring is.
    [[nodiscard]] std::optional<RingEntry<Words>> next(const std::string& what) {
        const std::uint64_t written = shared_count_->load(std::memory_order_acquire);
        if (written == count_) {
            return std::nullopt;
        }
        if (written - count_ > capacity_) {  // also where the count went back
            throw TransportCorruptError(what + ": " + std::to_string(written) + " entries after " +
                                        std::to_string(count_) + ", of " + std::to_string(capacity_) +
                                        " places; something else writes to this memory: restart the job");
        }
        const SharedEntry<Words>& slot = entries_[count_ % capacity_];
        RingEntry<Words> entry{};
        for (std::size_t i = 0; i < Words; ++i) {
            entry[i] = slot[i].load(std::memory_order_relaxed);
        }
        if (slot[Words].load(std::memory_order_relaxed) != check_of(count_, entry)) {
            throw TransportCorruptError(what + ": entry " + std::to_string(count_) +
                                        " has a wrong check; something else writes to this memory: restart the job");
        }
        ++count_;
        return entry;
    }

    [[nodiscard]] std::uint64_t count() const noexcept { return count_; }

  private:
    const Word* shared_count_;
    const SharedEntry<Words>* entries_;
    std::uint64_t capacity_;
    std::uint64_t count_ = 0;
};

}  // namespace megatronapp::transport
