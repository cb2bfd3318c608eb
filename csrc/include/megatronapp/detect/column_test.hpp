/// Test of columns against two references at once: their own levels, and peers that do the same work.
///
/// analyzer/.../detect/statistics says what is tested and why. The plain form of all this, in NumPy, is
/// tests/support/traces/plain_references.py; results are equal to the last bit.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "megatronapp/detect/medians.hpp"

namespace megatronapp::detect {

/// Lengths that are tried, in steps.
inline constexpr std::array<std::int64_t, 12> kWindows{1, 2, 3, 4, 6, 9, 13, 19, 28, 41, 60, 90};
inline constexpr std::size_t kLongest = 90;

struct ColumnSettings {
    std::size_t window;         // residuals that make up a history
    std::int64_t min_history;   // steps from which on a level is used
    std::int64_t least_window;  // shortest window that may be evidence, in steps
    double independent_tests;   // of each column, of which chance lets about one reach the limit
};

/// Limits of one step, in the scale of the values: see ReferenceLimits in the analyzer.
struct ColumnLimits {
    double floor;
    double own;
    double peers;
    double cap;
    double peer_spread;
    double least_peer_spread;
    double largest_step;
};

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

/// The last clear shift of a column, until it is forgotten.
struct LastShift {
    double size = kUnknown;      // below 0 where the column is faster, or the others are slower
    bool is_by_history = false;  // against its own level, or against its peers
    std::int64_t ended = 0;      // steps in a row that show no sign of it
};

/// Judgement of one step, by column.
struct ColumnReading {
    std::span<std::uint8_t> known;
    std::span<std::uint8_t> over;
    std::span<double> size;
    std::span<double> strength;
    std::span<std::uint8_t> by_history;
    std::span<std::uint8_t> calm;  // columns from which may be learned what is usual
};

class ColumnTest {
  public:
    ColumnTest(std::span<const std::int64_t> peers, const ColumnSettings& settings,
               const std::array<double, kWindows.size()>& prior_errors);

    /// Add columns for new peers; there may be as many as before, with other peers.
    void grow(std::span<const std::int64_t> peers);

    /// First half of a step: the deviation of each column, its change against its level relative to the others, and
    /// its distance from its peers. Throws std::invalid_argument where sizes differ from the number of columns.
    void compare(std::span<const double> values, const ColumnLimits& limits, std::span<double> deviation,
                 std::span<double> change, std::span<double> distance);

    /// Second half: judge `shift`, the change, and `relative`, the distance, each without what explains it otherwise,
    /// and learn from healthy columns. Doubts are what these may be too large by; `usual`: columns that may be learned
    /// from.
    void judge(std::span<const double> shift, std::span<const double> relative, std::span<const double> shift_doubt,
               std::span<const double> relative_doubt, std::span<const std::uint8_t> usual,
               const ColumnReading& reading);

    [[nodiscard]] std::size_t columns() const { return peers_.size(); }
    /// Bytes of memory for what is learned of the columns.
    [[nodiscard]] std::size_t memory_bytes() const;

  private:
    struct Side;
    struct Judged;
    [[nodiscard]] double deviation_of(std::size_t column, double floor) const;
    [[nodiscard]] double peer_spread() const;
    [[nodiscard]] Side side(const RecentValues& values, std::size_t column, const ColumnShift& found, double newest,
                            double least, double doubt) const;
    [[nodiscard]] Judged judge_column(std::size_t column, double shift, double relative, double shift_doubt,
                                      double relative_doubt, double spread) const;
    void add_values(std::size_t column, double change, double distance);
    void follow_shift(std::size_t column, double shift, double relative, const Judged& found);
    void learn_levels(std::span<const std::uint8_t> learns);
    void learn_noise(std::span<const double> shift);
    void check(std::size_t size, const char* name) const;

    ColumnSettings settings_;
    ColumnLimits limits_{};
    double limit_ = 0;
    std::vector<std::int64_t> peers_;
    std::vector<double> level_;
    std::vector<std::int64_t> learned_;
    std::vector<double> offset_;
    std::vector<double> before_;
    std::vector<LastShift> last_;
    std::vector<std::int64_t> calm_;  // steps since the last that was part of a shift
    SortedHistory residuals_;
    RecentValues shifts_;
    RecentValues distances_;
    MeanErrors errors_;
    // Of the step between its halves:
    std::vector<double> values_;
    std::vector<double> own_;
    std::vector<double> distance_;
    std::vector<double> deviation_;
};

}  // namespace megatronapp::detect
