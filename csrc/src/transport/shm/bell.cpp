#include "megatronapp/transport/shm/bell.hpp"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <ctime>
#include <limits>

#include "megatronapp/clock.hpp"

namespace megatronapp::transport {
namespace {

constexpr std::uint64_t kNsPerSecond = 1'000'000'000;
constexpr int kSpins = 200;  // some 5 microseconds: a transfer in flight may end, a core is not lost

static_assert(sizeof(std::atomic<std::uint32_t>) == sizeof(std::uint32_t), "the kernel compares the word itself");
static_assert(std::atomic<std::uint32_t>::is_always_lock_free, "a lock cannot be shared between processes");

void pause_processor() noexcept {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

}  // namespace

void ring(Bell& bell) noexcept {
    bell.count.fetch_add(1, std::memory_order_seq_cst);
    if (bell.sleepers.load(std::memory_order_seq_cst) != 0) {
        ::syscall(SYS_futex, &bell.count, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
    }
}

void wait(Bell& bell, std::uint32_t seen, std::uint64_t until_ns) noexcept {
    for (int i = 0; i < kSpins; ++i) {
        if (bell.count.load(std::memory_order_acquire) != seen) {
            return;
        }
        pause_processor();
    }
    // FUTEX_WAIT_BITSET takes an absolute time of the monotonic clock.
    const timespec until{.tv_sec = static_cast<time_t>(until_ns / kNsPerSecond),
                         .tv_nsec = static_cast<long>(until_ns % kNsPerSecond)};
    bell.sleepers.fetch_add(1, std::memory_order_seq_cst);
    if (bell.count.load(std::memory_order_seq_cst) == seen) {
        ::syscall(SYS_futex, &bell.count, FUTEX_WAIT_BITSET, seen, &until, nullptr, FUTEX_BITSET_MATCH_ANY);
    }
    bell.sleepers.fetch_sub(1, std::memory_order_seq_cst);
}

std::uint64_t end_of_slice(std::uint64_t deadline_ns) noexcept {
    return std::min(deadline_ns, monotonic_ns() + kSliceNs);
}

void SliceHook::call_if_due() {
    if (hook_ != nullptr && monotonic_ns() >= next_ns_) {
        (*hook_)();
        next_ns_ = monotonic_ns() + kSliceNs;
    }
}

std::uint64_t deadline_after(double seconds) noexcept {
    constexpr double kLongest = 1e9;  // thirty years
    if (!(seconds < kLongest)) {
        return std::numeric_limits<std::int64_t>::max();
    }
    return monotonic_ns() + static_cast<std::uint64_t>(std::max(seconds, 0.0) * static_cast<double>(kNsPerSecond));
}

}  // namespace megatronapp::transport
