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

#include "megatronapp/detect/column_history.hpp"
#include "megatronapp/detect/medians.hpp"

namespace megatronapp::detect {

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
    void add_means(std::size_t column, const ColumnShift& found,
                   std::array<std::vector<double>, kWindows.size()>& means) const;
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
    std::vector<std::int64_t> calm_;     // steps since the last that was part of a shift
    std::vector<std::int64_t> suspect_;  // steps in a row, up to now, that may be part of a shift
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
