#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <vector>

namespace megatronapp {

/// Maps times of a device's clock to the host's monotonic clock.
///
/// An event cannot have been passed before the host recorded it, nor after the host saw that it had been. Each event so
/// bounds the line host = offset + rate * device, and all bounds of a window leave a convex polygon of lines (Duda,
/// Harrus, Haddad and Bernard, "Estimating global time in distributed systems", 1987). Any of its lines may be the
/// true one: a time is given as the middle of what they say, and half of their disagreement is its uncertainty.
class DeviceClock {
  public:
    static constexpr std::int64_t kWindowNs = 30'000'000'000;
    static constexpr double kLargestRateError = 150e-6;  ///< oscillators differ by 50e-6; beyond it, history is dropped
    static constexpr double kResolutionNs = 500;         ///< of times of events, by the documentation of the driver

    /// Adds an event that was passed at `device_ns` and, on the host's clock, not before `earliest_ns` and not after
    /// `latest_ns`. Device times are those since any fixed event and must not decrease.
    void add_bounds(std::int64_t device_ns, std::int64_t earliest_ns, std::int64_t latest_ns);

    /// Weakens all bounds, after a distance between two events that was measured only to `error_ns`.
    void weaken(double error_ns);

    /// Host time of a device time, in ns. At least one bound must have been added.
    [[nodiscard]] std::int64_t host_ns(std::int64_t device_ns) const;

    /// By how many ns `host_ns` may be wrong.
    [[nodiscard]] double uncertainty_ns(std::int64_t device_ns) const;

  private:
    struct Bounds {
        std::int64_t device_ns;
        double earliest_ns;  ///< relative to the time on the device, plus base_ns_
        double latest_ns;
    };
    /// host - device = base_ns_ + offset_ns + rate * (device - origin_ns_)
    struct Line {
        double offset_ns;
        double rate;
    };
    struct Interval {
        double low_ns;
        double high_ns;
    };

    [[nodiscard]] Interval interval_at(std::int64_t device_ns) const;
    /// Cuts off the lines that lie beyond a bound; returns whether there were any.
    bool cut(const Bounds& bounds);
    bool cut_side(const Bounds& bounds, bool from_above);
    void expire();
    /// Forms the polygon anew from what is stored, without the oldest bounds if they contradict newer ones.
    void rebuild();

    std::deque<Bounds> bounds_;
    std::vector<Line> lines_;  ///< corners of the polygon, in order around it
    std::vector<Line> cut_lines_;
    std::optional<std::int64_t> base_ns_;
    std::int64_t origin_ns_ = 0;
    std::int64_t last_narrow_ns_ = 0;
};

}  // namespace megatronapp
