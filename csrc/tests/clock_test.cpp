#include "megatronapp/clock.hpp"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <thread>

#include "megatronapp/run_queue.hpp"

namespace megatronapp {
namespace {

TEST(Clock, PairLiesBetweenTwoReadings) {
    const std::uint64_t before = monotonic_ns();
    const ClockPair pair = read_clock_pair();
    const std::uint64_t after = monotonic_ns();
    EXPECT_GE(pair.monotonic_ns, before);
    EXPECT_LE(pair.monotonic_ns, after);
    EXPECT_GT(pair.realtime_ns, 1'600'000'000'000'000'000U);  // some moment after 2020
}

TEST(RunQueue, NeverGoesBackWithinAThread) {
    std::uint64_t last = run_queue_ns();
    for (int i = 0; i < 1000; ++i) {
        const std::uint64_t now = run_queue_ns();
        ASSERT_GE(now, last);
        last = now;
    }
}

TEST(RunQueue, IsTheThreadsOwn) {
    if (::access("/proc/thread-self/schedstat", R_OK) != 0) {
        GTEST_SKIP() << "this kernel has no schedstat";
    }
    const std::uint64_t lifetime_start = monotonic_ns();
    std::uint64_t of_thread = 0;
    std::uint64_t lifetime = 0;
    std::thread([&] {
        of_thread = run_queue_ns();
        lifetime = monotonic_ns() - lifetime_start;
    }).join();
    EXPECT_LE(of_thread, lifetime);  // a new thread cannot have waited longer than it lives
}

TEST(RunQueue, ForkedChildReadsItsOwnFile) {
    const std::uint64_t before = monotonic_ns();
    static_cast<void>(run_queue_ns());
    const pid_t child = ::fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
        ::_exit(run_queue_ns() <= monotonic_ns() - before ? 0 : 1);
    }
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0);
}

}  // namespace
}  // namespace megatronapp
