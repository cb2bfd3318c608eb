/// What the test of columns remembers: the newest values of each, their noise, and the errors of means over windows.
///
/// The plain form of all this, in NumPy, is tests/support/traces/plain_references.py.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace megatronapp::detect {

/// Lengths that are tried, in steps.
inline constexpr std::array<std::int64_t, 12> kWindows{1, 2, 3, 4, 6, 9, 13, 19, 28, 41, 60, 90};
inline constexpr std::size_t kLongest = 90;
/// Newest steps that must agree with a shift for it to be there now.
inline constexpr std::int64_t kRecent = 4;
inline constexpr double kMadToSigma = 1.4826;

/// Standard errors of means over the windows, in deviations of a step.
class MeanErrors {
  public:
    /// `prior`: errors of the windows before anything is learned.
    explicit MeanErrors(const std::array<double, kWindows.size()>& prior);

    /// Learn from the absolute means of a step, in any order, by window.
    void add(std::array<std::vector<double>, kWindows.size()>& means);
    [[nodiscard]] const std::array<double, kWindows.size()>& value() const { return value_; }
    /// The error of a mean over any number of steps.
    [[nodiscard]] double over(std::int64_t steps) const;

  private:
    void update();
    std::array<double, kWindows.size()> squares_{};
    std::array<double, kWindows.size()> weights_{};
    std::array<double, kWindows.size()> value_{};
    std::array<double, kLongest + 1> of_steps_{};
};

/// What the test against one reference finds in a column.
struct ColumnShift {
    double score = 0;
    double lowest = 0;
    std::size_t best = 0;   // of the windows
    std::size_t worst = 0;  // the window with the lowest ratio
    std::array<double, kWindows.size()> means{};
    std::size_t filled = 0;  // windows that have a mean
};

/// The newest values of each column.
class RecentValues {
  public:
    void grow(std::size_t columns);
    [[nodiscard]] std::size_t memory_bytes() const { return values_.capacity() * sizeof(double); }
    void add(std::size_t column, double value);
    /// Forget all but the newest values.
    void keep(std::size_t column, std::int64_t steps) { count_[column] = std::min(count_[column], steps); }
    /// `bias`: standard error of what the values are compared with; `deviation`: of a single step.
    [[nodiscard]] ColumnShift test(std::size_t column, double deviation, double bias, const MeanErrors& errors) const;
    /// The median of the newest values in a window.
    [[nodiscard]] double median_of(std::size_t column, std::size_t window) const;
    /// The median of the newest steps where all of them are much larger than a shift of that `size`, else `size`.
    [[nodiscard]] double grown_size(std::size_t column, std::size_t window, double size, double deviation) const;
    /// Whether the newest steps are not clearly below half of a shift of that size.
    [[nodiscard]] bool is_recent(std::size_t column, const ColumnShift& shift, double size, double deviation,
                                 const MeanErrors& errors) const;

  private:
    [[nodiscard]] double at(std::size_t column, std::size_t age) const;
    std::vector<double> values_;  // [column][place], newest at newest_
    std::vector<std::uint8_t> newest_;
    std::vector<std::int64_t> count_;
};

/// The last accepted values of each column, sorted.
class SortedHistory {
  public:
    explicit SortedHistory(std::size_t window) : window_(window) {}
    void grow(std::size_t columns);
    [[nodiscard]] std::size_t memory_bytes() const { return (ring_.capacity() + sorted_.capacity()) * sizeof(double); }
    void add(std::size_t column, double value);
    [[nodiscard]] std::size_t count(std::size_t column) const;
    /// Lower median of the absolute distances from the lower median; NaN without values.
    [[nodiscard]] double deviation(std::size_t column) const;

  private:
    std::size_t window_;
    std::vector<double> ring_;
    std::vector<double> sorted_;
    std::vector<std::int64_t> next_;
};

}  // namespace megatronapp::detect
