#include "megatronapp/trace/device_clock.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>

namespace megatronapp {
namespace {

constexpr double kLargestOffsetNs = 1e12;
constexpr double kNarrowNs = 40'000;
constexpr std::int64_t kNarrowEveryNs = 100'000'000;
constexpr std::int64_t kExpireEveryNs = 2'000'000'000;
constexpr std::size_t kMostBounds = 512;
constexpr std::size_t kLeastBounds = 16;  // remain, however old they are

}  // namespace

void DeviceClock::add_bounds(std::int64_t device_ns, std::int64_t earliest_ns, std::int64_t latest_ns) {
    if (!base_ns_) {
        base_ns_ = earliest_ns - device_ns;
        origin_ns_ = device_ns;
        last_narrow_ns_ = device_ns - kNarrowEveryNs;
        rebuild();
    }
    const std::int64_t zero_ns = device_ns + *base_ns_;
    const Bounds bounds{.device_ns = device_ns,
                        .earliest_ns = static_cast<double>(earliest_ns - zero_ns) - kResolutionNs,
                        .latest_ns = static_cast<double>(latest_ns - zero_ns) + kResolutionNs};
    // What cuts nothing off now may do so once older bounds have expired: some narrow ones stay for that.
    const bool is_narrow = bounds.latest_ns - bounds.earliest_ns <= kNarrowNs + 2 * kResolutionNs &&
                           device_ns - last_narrow_ns_ >= kNarrowEveryNs;
    if (!cut(bounds) && !is_narrow) {
        return;
    }
    if (is_narrow) {
        last_narrow_ns_ = device_ns;
    }
    bounds_.push_back(bounds);
    if (lines_.empty()) {
        rebuild();
    }
    expire();
}

void DeviceClock::weaken(double error_ns) {
    for (Bounds& bounds : bounds_) {
        bounds.earliest_ns -= error_ns;
        bounds.latest_ns += error_ns;
    }
    rebuild();
}

std::int64_t DeviceClock::host_ns(std::int64_t device_ns) const {
    const Interval interval = interval_at(device_ns);
    return device_ns + *base_ns_ + std::llround((interval.low_ns + interval.high_ns) / 2);
}

double DeviceClock::uncertainty_ns(std::int64_t device_ns) const {
    const Interval interval = interval_at(device_ns);
    return (interval.high_ns - interval.low_ns) / 2;
}

DeviceClock::Interval DeviceClock::interval_at(std::int64_t device_ns) const {
    const auto age_ns = static_cast<double>(device_ns - origin_ns_);
    Interval interval{.low_ns = std::numeric_limits<double>::infinity(),
                      .high_ns = -std::numeric_limits<double>::infinity()};
    for (const Line& line : lines_) {
        const double value = line.offset_ns + line.rate * age_ns;
        interval.low_ns = std::min(interval.low_ns, value);
        interval.high_ns = std::max(interval.high_ns, value);
    }
    return interval;
}

bool DeviceClock::cut(const Bounds& bounds) {
    const bool below = cut_side(bounds, false);
    const bool above = cut_side(bounds, true);
    return below || above;
}

bool DeviceClock::cut_side(const Bounds& bounds, bool from_above) {
    // One step of the algorithm of Sutherland and Hodgman: corners inside stay, edges that cross give a corner.
    const auto age_ns = static_cast<double>(bounds.device_ns - origin_ns_);
    const auto slack = [&](const Line& line) {
        const double value = line.offset_ns + line.rate * age_ns;
        return from_above ? bounds.latest_ns - value : value - bounds.earliest_ns;
    };
    cut_lines_.clear();
    bool has_cut = false;
    for (std::size_t i = 0; i < lines_.size(); ++i) {
        const Line& here = lines_[i];
        const Line& next = lines_[i + 1 == lines_.size() ? 0 : i + 1];
        const double inside = slack(here);
        const double next_inside = slack(next);
        if (inside >= 0) {
            cut_lines_.push_back(here);
        } else {
            has_cut = true;
        }
        if ((inside >= 0) != (next_inside >= 0)) {
            const double part = inside / (inside - next_inside);
            cut_lines_.push_back({.offset_ns = here.offset_ns + part * (next.offset_ns - here.offset_ns),
                                  .rate = here.rate + part * (next.rate - here.rate)});
        }
    }
    if (has_cut) {
        lines_.swap(cut_lines_);
    }
    return has_cut;
}

void DeviceClock::expire() {
    if (bounds_.empty()) {
        return;
    }
    const std::int64_t newest_ns = bounds_.back().device_ns;
    if (bounds_.size() <= kMostBounds && newest_ns - bounds_.front().device_ns <= kWindowNs + kExpireEveryNs) {
        return;
    }
    bool has_expired = false;
    while (bounds_.size() > kMostBounds ||
           (bounds_.size() > kLeastBounds && newest_ns - bounds_.front().device_ns > kWindowNs)) {
        bounds_.pop_front();
        has_expired = true;
    }
    if (has_expired) {
        rebuild();
    }
}

void DeviceClock::rebuild() {
    if (!bounds_.empty()) {
        origin_ns_ = bounds_.back().device_ns;
    }
    while (true) {
        lines_ = {{-kLargestOffsetNs, -kLargestRateError},
                  {kLargestOffsetNs, -kLargestRateError},
                  {kLargestOffsetNs, kLargestRateError},
                  {-kLargestOffsetNs, kLargestRateError}};
        // The newest first: it alone leaves lines whatever its place.
        for (auto bounds = bounds_.rbegin(); bounds != bounds_.rend() && !lines_.empty(); ++bounds) {
            cut(*bounds);
        }
        if (!lines_.empty()) {
            return;
        }
        // The clocks have changed their relation, as by the kernel's slewing: what is older no longer holds.
        bounds_.erase(bounds_.begin(), bounds_.begin() + static_cast<std::ptrdiff_t>((bounds_.size() + 1) / 2));
    }
}

}  // namespace megatronapp
