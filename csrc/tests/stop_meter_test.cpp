#include "megatronapp/stop_meter.hpp"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <memory>

namespace megatronapp {
namespace {

constexpr std::uint64_t kMs = 1'000'000;
constexpr std::uint64_t kPeriod = 5 * kMs;

TEST(StopOf, BeginsHalfAPeriodBeforeTheMissedWakeUp) {
    EXPECT_EQ(stop_of(100 * kMs, 180 * kMs, 0, kPeriod), (Stop{.start_ns = 97'500'000, .end_ns = 180 * kMs}));
}

TEST(StopOf, RunQueueDelayAfterItIsNoPartOfIt) {
    EXPECT_EQ(stop_of(100 * kMs, 180 * kMs, 30 * kMs, kPeriod).end_ns, 150 * kMs);
}

TEST(StopOf, LateWakeUpOnACrowdedProcessorIsNone) {
    for (const std::uint64_t queued : {79 * kMs, 80 * kMs, 90 * kMs}) {
        const Stop stop = stop_of(100 * kMs, 180 * kMs, queued, kPeriod);
        EXPECT_EQ(stop.start_ns, stop.end_ns) << queued;
    }
}

TEST(StopMeter, ForkedChildEndsWithoutTheThread) {
    auto meter = std::make_unique<StopMeter>();
    const pid_t child = ::fork();
    if (child == 0) {
        meter.reset();  // would wait for ever for a thread that the child lacks
        ::_exit(0);
    }
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0);
}

}  // namespace
}  // namespace megatronapp
