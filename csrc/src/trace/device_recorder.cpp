#include "megatronapp/trace/device_recorder.hpp"

#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <csignal>
#include <limits>

#include "megatronapp/error.hpp"
#include "megatronapp/fork_count.hpp"

namespace megatronapp {
namespace {

constexpr int kCalibrations = 5;
constexpr std::uint64_t kCalibrationTimeoutNs = 10'000'000'000;
constexpr std::size_t kHostRecords = 8192;
constexpr std::size_t kLengths = 8192;
constexpr double kNsPerMs = 1e6;
constexpr int kInvalidContext = 201;                     // CUDA_ERROR_INVALID_CONTEXT
constexpr std::int64_t kNewReferenceNs = 1'000'000'000;  // 32-bit floats of milliseconds: 0.06 us at 1 s
constexpr std::int64_t kExactNs = 8'000'000'000;         // 0.5 us at 8 s
constexpr auto kShortestPause = std::chrono::microseconds(500);
constexpr auto kLongestPause = std::chrono::microseconds(4000);
constexpr std::uint8_t kFlagDeviceClock = 16;
constexpr std::uint8_t kFlagAuxLead = 128;

std::string text_of(const EventDriver& driver, const char* function, int code) {
    const char* name = nullptr;
    if (driver.error_name(code, &name) != kDriverSuccess || name == nullptr) {
        name = "unknown";
    }
    return std::string(function) + " failed with " + name + " (" + std::to_string(code) + ")";
}

/// The device's context on this thread, for as long as it lives.
class CurrentContext {
  public:
    CurrentContext(const EventDriver& driver, DeviceContext context) noexcept : driver_(driver) {
        driver_.context_push(context);
    }
    CurrentContext(const CurrentContext&) = delete;
    CurrentContext& operator=(const CurrentContext&) = delete;
    CurrentContext(CurrentContext&&) = delete;
    CurrentContext& operator=(CurrentContext&&) = delete;
    ~CurrentContext() {
        DeviceContext context = nullptr;
        driver_.context_pop(&context);
    }

  private:
    const EventDriver& driver_;
};

}  // namespace

DeviceRecorder::DeviceRecorder(RingWriter* ring, const EventDriver& driver, int device, HostClock now_ns)
    : ring_(ring),
      driver_(driver),
      now_ns_(now_ns),
      made_at_fork_(fork_count()),
      entries_(kMostPending),
      free_events_(kMostPending + kCalibrations),
      host_records_(kHostRecords),
      lengths_(kLengths) {
    const auto require = [&](const char* function, int code) {
        if (code != kDriverSuccess) {
            throw RingError(text_of(driver_, function, code) + "; times of the device cannot be recorded");
        }
    };
    require("cuInit", driver_.init(0));
    require("cuDeviceGet", driver_.device(&device_, device));
    require("cuDevicePrimaryCtxRetain", driver_.primary_context_retain(&context_, device_));
    try {
        calibrate();
    } catch (...) {
        driver_.primary_context_release(device_);
        throw;
    }
}

DeviceRecorder::~DeviceRecorder() {
    if (in_forked_child()) {
        if (thread_.joinable()) {
            thread_.detach();  // it exists in the parent alone
        }
        return;
    }
    finish(0);
    {
        const CurrentContext current(driver_, context_);
        while (DeviceEvent* event = free_events_.front()) {
            driver_.event_destroy(*event);
            free_events_.pop();
        }
        while (const Entry* entry = entries_.front()) {
            driver_.event_destroy(entry->event);
            entries_.pop();
        }
        driver_.event_destroy(reference_);
    }
    driver_.primary_context_release(device_);
}

bool DeviceRecorder::in_forked_child() const noexcept { return fork_count() != made_at_fork_; }

void DeviceRecorder::calibrate() {
    const CurrentContext current(driver_, context_);
    std::uint64_t narrowest_ns = std::numeric_limits<std::uint64_t>::max();
    std::uint64_t earliest_ns = 0;
    for (int i = 0; i < kCalibrations; ++i) {
        const std::uint64_t before_ns = now_ns_();
        DeviceEvent event = recorded_event(nullptr);
        bool failed = event == nullptr;
        while (!failed && !is_passed(event, failed) && now_ns_() - before_ns < kCalibrationTimeoutNs) {
        }
        if (failed) {
            throw RingError(failure() + "; times of the device cannot be recorded");
        }
        const std::uint64_t width_ns = now_ns_() - before_ns;
        if (width_ns < narrowest_ns) {
            std::swap(reference_, event);
            narrowest_ns = width_ns;
            earliest_ns = before_ns;
        }
        give_back(event);
    }
    last_host_ns_ = static_cast<std::int64_t>(earliest_ns);
    clock_.add_bounds(0, last_host_ns_, static_cast<std::int64_t>(earliest_ns + narrowest_ns));
}

void DeviceRecorder::start() {
    sigset_t all{};
    sigset_t before{};
    sigfillset(&all);
    ::pthread_sigmask(SIG_SETMASK, &all, &before);  // signals are for the threads of the application
    thread_ = std::thread([this] { run(); });
    ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

void DeviceRecorder::record(const Span& span) noexcept {
    if (!host_records_.push(span)) {
        dropped_.fetch_add(1, std::memory_order_relaxed);
    }
}

DeviceEvent DeviceRecorder::recorded_event(DeviceStream stream) noexcept {
    // A thread of autograd may have used no device yet when its first hook runs.
    const auto in_context = [&](auto call) {
        const int code = call();
        if (code != kInvalidContext) {
            return code;
        }
        const CurrentContext current(driver_, context_);
        return call();
    };
    DeviceEvent event = nullptr;
    if (DeviceEvent* pooled = free_events_.front()) {
        event = *pooled;
        free_events_.pop();
    } else if (const int code = in_context([&] { return driver_.event_create(&event, kTimedEventFlags); });
               code != kDriverSuccess) {
        fail("cuEventCreate", code);
        return nullptr;
    }
    if (const int code = in_context([&] { return driver_.event_record(event, stream); }); code != kDriverSuccess) {
        fail("cuEventRecord", code);
        driver_.event_destroy(event);
        return nullptr;
    }
    return event;
}

std::uint64_t DeviceRecorder::begin(const Span& span, DeviceStream stream) noexcept {
    if (ring_ != nullptr) {
        ring_->open_span({.start_ns = now_ns_(), .step = span.step, .microbatch = span.microbatch, .kind = span.kind});
    }
    if (failed_function_.load(std::memory_order_relaxed) != nullptr || in_forked_child()) {
        return 0;
    }
    if (entries_.free_slots() <= kMostOpen) {  // the rest is for the ends of spans that have begun
        dropped_.fetch_add(1, std::memory_order_relaxed);
        return 0;
    }
    const std::uint64_t recorded_ns = now_ns_();
    DeviceEvent event = recorded_event(stream);
    if (event == nullptr) {
        return 0;
    }
    entries_.push({.event = event,
                   .recorded_ns = recorded_ns,
                   .seen_ns = 0,
                   .number = ++numbers_,
                   .span = span,
                   .mark = Mark::kBegin});
    return numbers_;
}

void DeviceRecorder::end(std::uint64_t number, std::uint8_t flags, bool is_anchor, DeviceStream stream) noexcept {
    if (ring_ != nullptr) {
        ring_->close_span();
    }
    if (number == 0 || in_forked_child()) {
        return;
    }
    Entry entry{
        .event = nullptr, .recorded_ns = now_ns_(), .seen_ns = 0, .number = number, .span = {}, .mark = Mark::kEnd};
    entry.span.flags = flags;
    entry.event = recorded_event(stream);
    if (entry.event == nullptr) {
        return;
    }
    bool failed = false;
    while (is_anchor && !failed && entry.seen_ns == 0) {
        const bool passed = is_passed(entry.event, failed);
        const std::uint64_t now_ns = now_ns_();
        if (passed) {
            entry.seen_ns = now_ns;
        } else if (now_ns - entry.recorded_ns > kAnchorSpinNs) {
            break;
        }
    }
    if (!entries_.push(entry)) {
        dropped_.fetch_add(1, std::memory_order_relaxed);
        driver_.event_destroy(entry.event);
    }
}

void DeviceRecorder::mark(const Span& span, DeviceStream stream) noexcept {
    if (failed_function_.load(std::memory_order_relaxed) != nullptr || in_forked_child()) {
        return;
    }
    if (entries_.free_slots() <= kMostOpen) {
        dropped_.fetch_add(1, std::memory_order_relaxed);
        return;
    }
    const std::uint64_t recorded_ns = now_ns_();
    if (DeviceEvent event = recorded_event(stream); event != nullptr) {
        entries_.push({.event = event,
                       .recorded_ns = recorded_ns,
                       .seen_ns = 0,
                       .number = 0,
                       .span = span,
                       .mark = Mark::kPoint});
    }
}

std::vector<DeviceLength> DeviceRecorder::take_lengths() {
    std::vector<DeviceLength> lengths;
    while (const DeviceLength* length = lengths_.front()) {
        lengths.push_back(*length);
        lengths_.pop();
    }
    return lengths;
}

void DeviceRecorder::finish(std::uint64_t timeout_ns) {
    if (in_forked_child()) {
        return;
    }
    end_before_ns_ = now_ns_() + timeout_ns;
    is_ending_ = true;
    if (thread_.joinable()) {
        thread_.join();
    }
}

std::string DeviceRecorder::failure() const {
    const char* function = failed_function_.load(std::memory_order_acquire);
    return function == nullptr ? "" : text_of(driver_, function, failed_code_.load(std::memory_order_relaxed));
}

void DeviceRecorder::fail(const char* function, int code) noexcept {
    if (failed_function_.load(std::memory_order_relaxed) == nullptr) {
        failed_code_.store(code, std::memory_order_relaxed);
        failed_function_.store(function, std::memory_order_release);
    }
}

void DeviceRecorder::run() {
    const CurrentContext current(driver_, context_);
    auto pause = kShortestPause;
    while (!is_ending_.load()) {
        pause = harvest() ? kShortestPause : std::min(2 * pause, kLongestPause);
        std::this_thread::sleep_for(pause);
    }
    while (entries_.front() != nullptr && failure().empty() && now_ns_() < end_before_ns_.load()) {
        if (!harvest()) {
            std::this_thread::sleep_for(kShortestPause);
        }
    }
    harvest(true);
}

bool DeviceRecorder::harvest(bool is_last) {
    const bool has_records = read_host_records();
    const bool has_passed = failed_function_.load(std::memory_order_acquire) == nullptr && read_events();
    convert(is_last);
    show_position();
    return has_records || has_passed;
}

bool DeviceRecorder::read_host_records() noexcept {
    bool has_records = false;
    while (const Span* span = host_records_.front()) {
        write(*span);
        host_records_.pop();
        has_records = true;
    }
    return has_records;
}

bool DeviceRecorder::read_events() {
    bool has_passed = false;
    while (const Entry* entry = entries_.front()) {
        bool failed = false;
        if (!is_passed(entry->event, failed)) {
            break;
        }
        const std::uint64_t seen_ns = entry->seen_ns == 0 ? now_ns_() : entry->seen_ns;
        const Passed passed{.entry = *entry, .device_ns = device_ns_of(entry->event)};
        entries_.pop();
        clock_.add_bounds(passed.device_ns, static_cast<std::int64_t>(passed.entry.recorded_ns),
                          static_cast<std::int64_t>(seen_ns));
        follow(passed);
        passed_.push_back(passed);
        has_passed = true;
    }
    return has_passed;
}

bool DeviceRecorder::is_passed(DeviceEvent event, bool& failed) noexcept {
    const int code = driver_.event_query(event);
    if (code != kDriverSuccess && code != kDriverNotReady) {
        fail("cuEventQuery", code);
        failed = true;
    }
    return code == kDriverSuccess;
}

std::int64_t DeviceRecorder::device_ns_of(DeviceEvent event) {
    float elapsed_ms = 0;
    if (const int code = driver_.event_elapsed(&elapsed_ms, reference_, event); code != kDriverSuccess) {
        fail("cuEventElapsedTime", code);
    }
    const auto elapsed_ns = static_cast<std::int64_t>(std::llround(static_cast<double>(elapsed_ms) * kNsPerMs));
    const std::int64_t device_ns = std::max(reference_ns_ + elapsed_ns, newest_ns_);
    newest_ns_ = device_ns;
    if (elapsed_ns < kNewReferenceNs) {
        give_back(event);
        return device_ns;
    }
    if (elapsed_ns > kExactNs) {
        const float next = std::nextafter(elapsed_ms, std::numeric_limits<float>::infinity());
        clock_.weaken(static_cast<double>(next - elapsed_ms) * kNsPerMs / 2);
    }
    give_back(reference_);
    reference_ = event;
    reference_ns_ = device_ns;
    return device_ns;
}

void DeviceRecorder::give_back(DeviceEvent event) noexcept {
    if (event != nullptr && !free_events_.push(event)) {
        driver_.event_destroy(event);
    }
}

void DeviceRecorder::follow(const Passed& passed) {
    const Entry& entry = passed.entry;
    if (entry.mark == Mark::kBegin) {
        inside_.push_back({.start_ns = static_cast<std::uint64_t>(clock_.host_ns(passed.device_ns)),
                           .step = entry.span.step,
                           .microbatch = entry.span.microbatch,
                           .kind = entry.span.kind});
        inside_numbers_.push_back(entry.number);
    } else if (entry.mark == Mark::kEnd) {
        const auto found = std::find(inside_numbers_.begin(), inside_numbers_.end(), entry.number);
        if (found != inside_numbers_.end()) {
            inside_.erase(inside_.begin() + (found - inside_numbers_.begin()));
            inside_numbers_.erase(found);
        }
    }
}

void DeviceRecorder::show_position() noexcept {
    if (ring_ == nullptr) {
        return;
    }
    // Without an event that has not been passed, the device may be idle: what the host is inside of says more.
    const bool is_busy = entries_.front() != nullptr && failed_function_.load() == nullptr && !inside_.empty();
    std::optional<OpenSpan> position;
    if (is_busy) {
        position = inside_.back();
    }
    if (position != shown_) {
        ring_->show_device_span(position);
        shown_ = position;
    }
}

void DeviceRecorder::convert(bool is_last) {
    while (!passed_.empty()) {
        const std::int64_t device_ns = passed_.front().device_ns;
        const double uncertainty_ns = clock_.uncertainty_ns(device_ns);
        if (uncertainty_ns > kGoodUncertaintyNs && !is_last &&
            static_cast<std::int64_t>(now_ns_()) - clock_.host_ns(device_ns) < kLongestHoldNs) {
            return;
        }
        uncertainty_ns_.store(uncertainty_ns, std::memory_order_relaxed);
        convert_one(passed_.front());
        passed_.pop_front();
    }
}

void DeviceRecorder::convert_one(const Passed& passed) {
    // Never before an earlier event, although the clock may have learnt meanwhile: so spans nest or do not meet.
    const std::int64_t host_ns = std::max(clock_.host_ns(passed.device_ns), last_host_ns_);
    last_host_ns_ = host_ns;
    const Entry& entry = passed.entry;
    Span span = entry.span;
    if (entry.mark == Mark::kBegin) {
        span.start_ns = static_cast<std::uint64_t>(host_ns);
        open_.push_back({.number = entry.number, .span = span});
        return;
    }
    if (entry.mark == Mark::kPoint) {
        span.start_ns = static_cast<std::uint64_t>(host_ns);
        span.flags |= kFlagDeviceClock;
        write(span);
        return;
    }
    const auto found =
        std::find_if(open_.begin(), open_.end(), [&](const Open& open) { return open.number == entry.number; });
    if (found == open_.end()) {
        return;
    }
    span = found->span;
    open_.erase(found);
    span.flags |= entry.span.flags | kFlagDeviceClock | kFlagAuxLead;
    span.duration_ns = static_cast<std::uint64_t>(host_ns) - span.start_ns;
    const std::int64_t lead_ns = std::max<std::int64_t>(host_ns - static_cast<std::int64_t>(entry.recorded_ns), 0);
    span.aux =
        static_cast<std::uint32_t>(std::min(static_cast<std::uint64_t>(lead_ns) / kDurationUnitNs, kMaxDurationUnits));
    write(span);
    lengths_.push({.kind = span.kind, .flags = span.flags, .duration_ns = span.duration_ns});
}

void DeviceRecorder::write(const Span& span) noexcept {
    if (ring_ != nullptr) {
        ring_->record(span);
    }
}

}  // namespace megatronapp
