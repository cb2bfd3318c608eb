#include "megatronapp/clock.hpp"

#include <ctime>
#include <fstream>
#include <limits>

namespace megatronapp {
namespace {

constexpr std::uint64_t kNsPerSecond = 1'000'000'000;
constexpr int kPairTries = 5;

std::uint64_t read_clock(clockid_t id) noexcept {
    timespec now{};
    clock_gettime(id, &now);
    return static_cast<std::uint64_t>(now.tv_sec) * kNsPerSecond + static_cast<std::uint64_t>(now.tv_nsec);
}

}  // namespace

std::uint64_t monotonic_ns() noexcept { return read_clock(CLOCK_MONOTONIC); }

std::uint64_t coarse_monotonic_ns() noexcept { return read_clock(CLOCK_MONOTONIC_COARSE); }

ClockPair read_clock_pair() noexcept {
    ClockPair best{};
    std::uint64_t narrowest = std::numeric_limits<std::uint64_t>::max();
    for (int i = 0; i < kPairTries; ++i) {
        const std::uint64_t before = read_clock(CLOCK_MONOTONIC);
        const std::uint64_t real = read_clock(CLOCK_REALTIME);
        const std::uint64_t width = read_clock(CLOCK_MONOTONIC) - before;
        if (width < narrowest) {
            narrowest = width;
            best = {before + width / 2, real};
        }
    }
    return best;
}

std::string boot_id() {
    std::ifstream file("/proc/sys/kernel/random/boot_id");
    std::string id;
    std::getline(file, id);
    return id;
}

}  // namespace megatronapp
