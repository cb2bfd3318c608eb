/// Nanoseconds of one record, of one span opened and closed, and of one run-queue reading, beside a bare clock reading.
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <string>

#include "megatronapp/clock.hpp"
#include "megatronapp/ring_writer.hpp"
#include "megatronapp/run_queue.hpp"

namespace {

constexpr int kBlocks = 15;
constexpr std::uint64_t kCalls = 200'000;

template <typename Function>
double median_ns(std::uint64_t calls, Function function) {
    std::array<double, kBlocks> blocks{};
    for (double& block : blocks) {
        const std::uint64_t start = megatronapp::monotonic_ns();
        for (std::uint64_t i = 0; i < calls; ++i) {
            function(i);
        }
        block = static_cast<double>(megatronapp::monotonic_ns() - start) / static_cast<double>(calls);
    }
    std::nth_element(blocks.begin(), blocks.begin() + kBlocks / 2, blocks.end());
    return blocks[kBlocks / 2];
}

}  // namespace

int main() {
    const std::string path = "/dev/shm/megatronapp-record-cost." + std::to_string(::getpid());
    megatronapp::RingWriter writer(path, 65536, 0, "");
    std::uint64_t sink = 0;
    const double clock = median_ns(kCalls, [&](std::uint64_t) { sink += megatronapp::monotonic_ns(); });
    const double record = median_ns(kCalls, [&](std::uint64_t i) {
        writer.record({.start_ns = i,
                       .duration_ns = i * 8,
                       .step = 1,
                       .ordinal = static_cast<std::uint32_t>(i),
                       .aux = 3,
                       .comm = 4,
                       .microbatch = 5,
                       .kind = 6,
                       .chunk = 7,
                       .layer = 8,
                       .flags = 0});
    });
    const double open_close = median_ns(kCalls, [&](std::uint64_t i) {
        writer.open_span({.start_ns = i, .step = 1, .microbatch = 2, .kind = 3});
        writer.close_span();
    });
    const double run_queue = median_ns(kCalls / 10, [&](std::uint64_t) { sink += megatronapp::run_queue_ns(); });
    writer.close(true);
    std::printf(
        "{\"clock_ns\": %.1f, \"record_ns\": %.1f, \"open_close_ns\": %.1f, \"run_queue_ns\": %.1f, \"sink\": %d}\n",
        clock, record, open_close, run_queue, static_cast<int>(sink % 2));
    return 0;
}
