#pragma once

#include <atomic>
#include <cstdint>
#include <functional>

namespace megatronapp::transport {

/// A counter in shared memory that processes wait on. Lost wake-ups, as after damage, cost a slice of a wait only:
/// every wait of this library looks again at what it waits for after kSliceNs.
struct Bell {
    std::atomic<std::uint32_t> count;     ///< the futex
    std::atomic<std::uint32_t> sleepers;  ///< so that nobody makes a system call to wake no one
};

inline constexpr std::uint64_t kSliceNs = 100'000'000;

void ring(Bell& bell) noexcept;

/// Waits until the count differs from `seen`, or until the monotonic time `until_ns`: for a few microseconds by
/// spinning, then in the kernel. May return early.
void wait(Bell& bell, std::uint32_t seen, std::uint64_t until_ns) noexcept;

/// The earlier of a deadline and the end of a slice that begins now.
[[nodiscard]] std::uint64_t end_of_slice(std::uint64_t deadline_ns) noexcept;

/// Calls a function once in each slice of a wait. It may throw, which ends the wait.
class SliceHook {
  public:
    explicit SliceHook(const std::function<void()>& hook)
        : hook_(hook ? &hook : nullptr), next_ns_(end_of_slice(~0ULL)) {}

    void call_if_due();

  private:
    const std::function<void()>* hook_;
    std::uint64_t next_ns_;
};

/// The monotonic time `seconds` from now; the end of time for huge numbers, now for negative ones.
[[nodiscard]] std::uint64_t deadline_after(double seconds) noexcept;

}  // namespace megatronapp::transport
