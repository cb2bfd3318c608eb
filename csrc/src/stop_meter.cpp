#include "megatronapp/stop_meter.hpp"

#include <pthread.h>

#include <algorithm>
#include <csignal>
#include <ctime>
#include <utility>

#include "megatronapp/clock.hpp"
#include "megatronapp/fork_count.hpp"
#include "megatronapp/run_queue.hpp"

namespace megatronapp {
namespace {

constexpr std::uint64_t kNsPerSecond = 1'000'000'000;

void sleep_until(std::uint64_t due_ns) noexcept {
    const timespec due{.tv_sec = static_cast<time_t>(due_ns / kNsPerSecond),
                       .tv_nsec = static_cast<long>(due_ns % kNsPerSecond)};
    static_cast<void>(clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &due, nullptr));
}

}  // namespace

Stop stop_of(std::uint64_t due_ns, std::uint64_t woke_ns, std::uint64_t queued_ns, std::uint64_t period_ns) noexcept {
    const std::uint64_t end_ns = std::max(due_ns, woke_ns - std::min(woke_ns, queued_ns));
    if (woke_ns < due_ns || end_ns - due_ns < StopMeter::kLeastStopNs) {
        return {.start_ns = due_ns, .end_ns = due_ns};
    }
    return {.start_ns = due_ns - period_ns / 2, .end_ns = end_ns};
}

StopMeter::StopMeter(std::uint64_t period_ns) : period_ns_(period_ns), made_at_fork_(fork_count()) {
    sigset_t all{};
    sigset_t before{};
    sigfillset(&all);
    ::pthread_sigmask(SIG_SETMASK, &all, &before);  // signals are for the threads of the application
    thread_ = std::thread([this] { run(); });
    ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
    begun_.wait();
}

StopMeter::~StopMeter() { close(); }

std::vector<Stop> StopMeter::take() {
    const std::lock_guard lock(mutex_);
    return std::exchange(stops_, {});
}

void StopMeter::close() noexcept {
    closing_ = true;
    if (!thread_.joinable()) {
        return;
    }
    if (made_at_fork_ == fork_count()) {
        thread_.join();
    } else {
        thread_.detach();  // a forked child has the object but not the thread
    }
}

void StopMeter::run() {
    std::uint64_t queued_before_ns = run_queue_ns();
    std::uint64_t woke_ns = monotonic_ns();
    begun_.count_down();
    while (!closing_) {
        // From the last wake-up, not from now: a stop between the two would be lost.
        const std::uint64_t due_ns = woke_ns + period_ns_;
        sleep_until(due_ns);
        const std::uint64_t queued_ns = run_queue_ns();
        woke_ns = monotonic_ns();
        const Stop stop = stop_of(due_ns, woke_ns, queued_ns - queued_before_ns, period_ns_);
        queued_before_ns = queued_ns;
        if (stop.end_ns > stop.start_ns) {
            const std::lock_guard lock(mutex_);
            if (stops_.size() < kMaxStops) {
                stops_.push_back(stop);
            }
        }
    }
}

}  // namespace megatronapp
