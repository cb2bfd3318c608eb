#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <latch>
#include <mutex>
#include <thread>
#include <vector>

namespace megatronapp {

/// A time in which the process did not run, on the monotonic clock.
struct Stop {
    std::uint64_t start_ns;
    std::uint64_t end_ns;

    friend bool operator==(const Stop&, const Stop&) = default;
};

/// Returns the stop that a wake-up proves which was due at `due_ns` and happened at `woke_ns`, after `queued_ns` in the
/// run queue; an empty one (start equal to end) if it was late by less than `kLeastStopNs` for any other reason.
///
/// The process stopped at an unknown moment of the sleep of `period_ns`, in the mean at half of it.
[[nodiscard]] Stop stop_of(std::uint64_t due_ns, std::uint64_t woke_ns, std::uint64_t queued_ns,
                           std::uint64_t period_ns) noexcept;

/// Measures when this process did not run without waiting for a processor: stopped by a signal or a debugger, in a
/// frozen control group, or in a virtual machine that its host does not run.
///
/// A thread sleeps for one period after another. Its run-queue delay explains a late wake-up on a crowded processor;
/// what is left, no thread of the process could use. Stops shorter than the period are seen in proportion to it.
class StopMeter {
  public:
    static constexpr std::uint64_t kPeriodNs = 5'000'000;
    static constexpr std::uint64_t kLeastStopNs = 2'000'000;
    static constexpr std::size_t kMaxStops = 4096;

    /// Measures from when it returns: it waits until the thread runs.
    explicit StopMeter(std::uint64_t period_ns = kPeriodNs);
    StopMeter(StopMeter&&) = delete;
    StopMeter& operator=(StopMeter&&) = delete;
    StopMeter(const StopMeter&) = delete;
    StopMeter& operator=(const StopMeter&) = delete;
    ~StopMeter();

    /// Returns the stops since the last call, in order; beyond kMaxStops the newest are missing.
    [[nodiscard]] std::vector<Stop> take();

    /// Ends the thread; waits for a period at most.
    void close() noexcept;

  private:
    void run();

    std::uint64_t period_ns_;
    std::uint64_t made_at_fork_;
    std::atomic<bool> closing_{false};
    std::mutex mutex_;
    std::vector<Stop> stops_;
    std::latch begun_{1};
    std::thread thread_;
};

}  // namespace megatronapp
