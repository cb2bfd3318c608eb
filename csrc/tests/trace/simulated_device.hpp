#pragma once

#include <algorithm>
#include <cstdint>

#include "megatronapp/trace/event_driver.hpp"

namespace megatronapp {

struct DeviceEventHandle {
    std::uint64_t passed_ns;
};

namespace testing {

/// Stands in for a device and its driver: one stream in simulated time, whose clock runs wrong by `ppm`.
struct SimulatedDevice {
    static constexpr std::uint64_t kCallNs = 700;
    static constexpr std::uint64_t kPassNs = 3'000;  // from recording an event on an idle device to passing it
    static constexpr std::uint64_t kNever = std::uint64_t{1} << 62U;

    static inline std::uint64_t now_ns;
    static inline std::uint64_t busy_until_ns;
    static inline double ppm;
    static inline std::int64_t events;
    static inline std::int64_t contexts;
    static inline int query_code;

    static void reset(double rate_ppm) {
        now_ns = busy_until_ns = 1'000'000'000'000;
        ppm = rate_ppm;
        events = contexts = 0;
        query_code = kDriverSuccess;
    }

    /// Work that the host launches in `host_ns` and the device does in `device_ns`.
    static void launch(std::uint64_t device_ns, std::uint64_t host_ns) {
        const std::uint64_t begin_ns = std::max(now_ns, busy_until_ns);
        now_ns += host_ns;
        busy_until_ns = begin_ns + device_ns;
    }

    /// When an event would be passed that is recorded now.
    static std::uint64_t next_ns() { return std::max(now_ns + kPassNs, busy_until_ns); }

    static void synchronize() { now_ns = std::max(now_ns, busy_until_ns); }

    static std::uint64_t read_clock() { return now_ns += 30; }

    static EventDriver driver();
};

inline EventDriver SimulatedDevice::driver() {
    return {
        .init = [](unsigned) { return kDriverSuccess; },
        .error_name =
            [](int, const char** name) {
                *name = "CUDA_ERROR_OF_THE_SIMULATION";
                return kDriverSuccess;
            },
        .device =
            [](int* device, int ordinal) {
                *device = ordinal;
                return ordinal == 0 ? kDriverSuccess : 101;
            },
        .primary_context_retain =
            [](DeviceContext* context, int) {
                *context = nullptr;
                ++contexts;
                return kDriverSuccess;
            },
        .primary_context_release =
            [](int) {
                --contexts;
                return kDriverSuccess;
            },
        .context_push = [](DeviceContext) { return kDriverSuccess; },
        .context_pop = [](DeviceContext*) { return kDriverSuccess; },
        .event_create =
            [](DeviceEvent* event, unsigned) {
                *event = new DeviceEventHandle{};
                ++events;
                return kDriverSuccess;
            },
        .event_destroy =
            [](DeviceEvent event) {
                delete event;
                --events;
                return kDriverSuccess;
            },
        .event_record =
            [](DeviceEvent event, DeviceStream) {
                event->passed_ns = next_ns();
                now_ns += kCallNs;
                return kDriverSuccess;
            },
        .event_query =
            [](DeviceEvent event) {
                now_ns += kCallNs;
                if (query_code != kDriverSuccess) {
                    return query_code;
                }
                return event->passed_ns <= now_ns ? kDriverSuccess : kDriverNotReady;
            },
        .event_elapsed =
            [](float* milliseconds, DeviceEvent start, DeviceEvent end) {
                const auto apart_ns = static_cast<double>(static_cast<std::int64_t>(end->passed_ns - start->passed_ns));
                *milliseconds = static_cast<float>(apart_ns * (1 + ppm * 1e-6) / 1e6);
                return kDriverSuccess;
            },
    };
}

}  // namespace testing
}  // namespace megatronapp
