#include "megatronapp/trace/device_clock.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <random>

namespace megatronapp::testing {
namespace {

constexpr std::int64_t kStepNs = 500'000'000;
constexpr std::int64_t kStartNs = 1'000'000'000'000;

TEST(DeviceClock, KnowsATimeWithinItsUncertaintyWhateverTheBoundsAre) {
    std::mt19937_64 random(7);  // NOLINT(cert-msc32-c,cert-msc51-cpp): the same readings in every run
    for (int run = 0; run < 200; ++run) {
        std::uniform_real_distribution<double> rates(-100e-6, 100e-6);
        std::exponential_distribution<double> delays(1.0 / 200'000);
        const double rate = rates(random);
        DeviceClock clock;
        for (std::int64_t host_ns = 0; host_ns < 40 * kStepNs; host_ns += kStepNs / 7) {
            const auto device_ns = static_cast<std::int64_t>(static_cast<double>(host_ns) * (1 + rate));
            const auto before_ns = static_cast<std::int64_t>(delays(random));
            const auto after_ns = static_cast<std::int64_t>(delays(random));
            clock.add_bounds(device_ns, kStartNs + host_ns - before_ns, kStartNs + host_ns + after_ns);
            const double error_ns = std::abs(static_cast<double>(clock.host_ns(device_ns) - kStartNs - host_ns));
            ASSERT_LE(error_ns, clock.uncertainty_ns(device_ns) + 1) << run << ", " << host_ns;
        }
        EXPECT_LT(clock.uncertainty_ns(40 * kStepNs), 100'000) << run;  // of delays of 0.2 ms on average
    }
}

TEST(DeviceClock, FollowsAClockThatChangesItsRate) {
    DeviceClock clock;
    double device = 0;
    std::int64_t device_ns = 0;
    for (std::int64_t step = 0; step < 3600; ++step) {
        const std::int64_t host_ns = step * kStepNs;
        clock.add_bounds(device_ns, kStartNs + host_ns - 4'000, kStartNs + host_ns + 6'000);
        ASSERT_LE(std::abs(clock.host_ns(device_ns) - kStartNs - host_ns), 10'000) << step;
        const double rate = 20e-6 + 2e-6 * std::sin(static_cast<double>(step) * 2 * M_PI / 1200);
        device += static_cast<double>(kStepNs) * (1 + rate);
        device_ns = std::llround(device);
    }
}

TEST(DeviceClock, TakesUpAClockWhoseRelationHasJumped) {
    DeviceClock clock;
    for (std::int64_t step = 0; step < 100; ++step) {
        const std::int64_t jump_ns = step < 50 ? 0 : 3'000'000;
        const std::int64_t host_ns = kStartNs + step * kStepNs + jump_ns;
        clock.add_bounds(step * kStepNs, host_ns - 4'000, host_ns + 6'000);
        ASSERT_LE(std::abs(clock.host_ns(step * kStepNs) - host_ns), 10'000) << step;
    }
}

TEST(DeviceClock, TellsThatADistanceWasMeasuredBadly) {
    DeviceClock clock;
    clock.add_bounds(0, kStartNs - 1'000, kStartNs + 1'000);
    clock.add_bounds(kStepNs, kStartNs + kStepNs - 1'000, kStartNs + kStepNs + 1'000);
    EXPECT_LT(clock.uncertainty_ns(kStepNs), 2'000);
    clock.weaken(15'000);
    EXPECT_GT(clock.uncertainty_ns(kStepNs), 10'000);
}

}  // namespace
}  // namespace megatronapp::testing
