/// Medians in linear time. All leave the order of what they are given undefined.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>

namespace megatronapp::detect {

inline constexpr double kUnknown = std::numeric_limits<double>::quiet_NaN();

/// The lower of two middles; NaN without values.
[[nodiscard]] inline double lower_median(std::span<double> values) {
    if (values.empty()) {
        return kUnknown;
    }
    const auto middle = values.begin() + static_cast<std::ptrdiff_t>((values.size() - 1) / 2);
    std::ranges::nth_element(values, middle);
    return *middle;
}

/// The mean of two middles; NaN without values.
[[nodiscard]] inline double median(std::span<double> values) {
    if (values.empty()) {
        return kUnknown;
    }
    const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
    std::ranges::nth_element(values, middle);
    if (values.size() % 2 != 0) {
        return *middle;
    }
    return (*std::max_element(values.begin(), middle) + *middle) / 2;
}

/// The lower median of all values but one, by whether that one is in the lower half.
class MedianOfOthers {
  public:
    explicit MedianOfOthers(std::span<double> values) {
        if (values.size() < 2) {
            return;
        }
        const auto middle = values.begin() + static_cast<std::ptrdiff_t>((values.size() - 2) / 2);
        std::ranges::nth_element(values, middle);
        low_ = *middle;
        high_ = *std::min_element(middle + 1, values.end());
    }

    /// NaN if there are no others.
    [[nodiscard]] double without(double value) const { return value <= low_ ? high_ : low_; }

  private:
    double low_ = kUnknown;
    double high_ = kUnknown;
};

/// Writes for each finite value the lower median of the other finite ones of its group, and NaN for all others.
/// `groups`: a number for each value, from -1 on.
void median_of_others(std::span<const double> values, std::span<const std::int64_t> groups, std::span<double> out);

/// Writes the lower median of the values of each group, and NaN for a group without any. NaN is above all numbers.
/// Groups are numbered from 0 up to the size of `out`.
void segment_medians(std::span<const double> values, std::span<const std::int64_t> groups, std::span<double> out);

/// Writes the lower median of each column of a table, of what is not NaN; NaN for a column of nothing else.
void column_medians(std::span<const double> table, std::span<double> out);

/// Writes the median of each row of a table, the mean of two middles, of what is not NaN; NaN for a row of nothing
/// else.
void row_medians(std::span<const double> table, std::span<double> out);

}  // namespace megatronapp::detect
