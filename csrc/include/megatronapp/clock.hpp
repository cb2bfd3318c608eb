#pragma once

#include <cstdint>
#include <string>

namespace megatronapp {

/// The same moment on the node's monotonic clock and in real time.
struct ClockPair {
    std::uint64_t monotonic_ns;
    std::uint64_t realtime_ns;
};

/// CLOCK_MONOTONIC, which all processes of one boot share.
[[nodiscard]] std::uint64_t monotonic_ns() noexcept;

/// The same clock as of the last tick (1 to 10 ms ago), at a quarter of the price.
[[nodiscard]] std::uint64_t coarse_monotonic_ns() noexcept;

/// Reads both clocks; of several tries the one with the least time between its monotonic readings.
[[nodiscard]] ClockPair read_clock_pair() noexcept;

/// The kernel's id of this boot, empty where it gives none. Monotonic times of different boots never compare.
[[nodiscard]] std::string boot_id();

}  // namespace megatronapp
