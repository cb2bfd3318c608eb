#include "megatronapp/detect/column_history.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <span>

#include "megatronapp/detect/medians.hpp"

namespace megatronapp::detect {
namespace {

/// Deviations to which a single value is limited, so that a disturbed step weighs no more than a few others.
constexpr double kClip = 8.0;
constexpr double kLargestError = 2.0;
constexpr double kMemory = 0.99;
constexpr double kPriorWeight = 20.0;
/// How many times larger than the shift over a longer window the newest steps must all be for it to have grown.
constexpr double kGrown = 1.5;

double square(double value) { return value * value; }

}  // namespace

MeanErrors::MeanErrors(const std::array<double, kWindows.size()>& prior) {
    for (std::size_t window = 0; window < kWindows.size(); ++window) {
        squares_[window] = kPriorWeight * square(prior[window]);
        weights_[window] = kPriorWeight;
    }
    update();
}

void MeanErrors::add(std::array<std::vector<double>, kWindows.size()>& means) {
    for (std::size_t window = 0; window < kWindows.size(); ++window) {
        if (means[window].empty()) {
            continue;
        }
        const double middle = kMadToSigma * median(means[window]);
        squares_[window] = kMemory * squares_[window] + square(std::min(middle, kLargestError));
        weights_[window] = kMemory * weights_[window] + 1.0;
    }
    update();
}

void MeanErrors::update() {
    for (std::size_t window = 0; window < kWindows.size(); ++window) {
        const double least = 1.0 / std::sqrt(static_cast<double>(kWindows[window]));
        value_[window] = std::max(std::sqrt(squares_[window] / weights_[window]), least);
    }
    std::size_t below = 0;
    for (std::size_t steps = 1; steps <= kLongest; ++steps) {
        if (below + 1 < kWindows.size() && static_cast<std::size_t>(kWindows[below + 1]) <= steps) {
            ++below;
        }
        const auto past = static_cast<double>(static_cast<std::int64_t>(steps) - kWindows[below]);
        if (past == 0) {
            of_steps_[steps] = value_[below];
            continue;
        }
        const auto length = static_cast<double>(kWindows[below + 1] - kWindows[below]);
        of_steps_[steps] = (value_[below + 1] - value_[below]) / length * past + value_[below];
    }
}

double MeanErrors::over(std::int64_t steps) const {
    const auto longest = static_cast<std::int64_t>(kLongest);
    const double inside = of_steps_[static_cast<std::size_t>(std::clamp<std::int64_t>(steps, 1, longest))];
    return inside * std::sqrt(static_cast<double>(longest) / static_cast<double>(std::max(steps, longest)));
}

void RecentValues::grow(std::size_t columns) {
    values_.resize(columns * kLongest, 0.0);
    newest_.resize(columns, 0);
    count_.resize(columns, 0);
}

void RecentValues::add(std::size_t column, double value) {
    newest_[column] = static_cast<std::uint8_t>((newest_[column] + kLongest - 1) % kLongest);
    values_[(column * kLongest) + newest_[column]] = value;
    ++count_[column];
}

double RecentValues::at(std::size_t column, std::size_t age) const {
    return values_[(column * kLongest) + ((newest_[column] + age) % kLongest)];
}

ColumnShift RecentValues::test(std::size_t column, double deviation, double bias, const MeanErrors& errors) const {
    ColumnShift found;
    const double offset = bias / deviation;
    const double limit = kClip * std::sqrt(1.0 + square(offset));
    double best = -std::numeric_limits<double>::infinity();
    double lowest = std::numeric_limits<double>::infinity();
    double sum = 0.0;
    std::size_t age = 0;
    for (; found.filled < kWindows.size() && kWindows[found.filled] <= count_[column]; ++found.filled) {
        const std::size_t window = found.filled;
        for (; age < static_cast<std::size_t>(kWindows[window]); ++age) {
            sum += std::min(std::max(at(column, age) / deviation, -limit), limit);
        }
        found.means[window] = sum / static_cast<double>(kWindows[window]);
        const double ratio = found.means[window] / std::sqrt(square(errors.value()[window]) + square(offset));
        if (ratio > best) {
            best = ratio;
            found.best = window;
        }
        if (ratio < lowest) {
            lowest = ratio;
            found.worst = window;
        }
    }
    found.score = std::isfinite(best) ? best : 0.0;
    found.lowest = found.filled < kWindows.size() ? std::min(lowest, 0.0) : lowest;
    return found;
}

double RecentValues::median_of(std::size_t column, std::size_t window) const {
    std::array<double, kLongest> values{};
    const auto length = static_cast<std::size_t>(kWindows[window]);
    for (std::size_t age = 0; age < length; ++age) {
        values[age] = at(column, age);
    }
    return median(std::span(values).first(length));
}

double RecentValues::grown_size(std::size_t column, std::size_t window, double size, double deviation) const {
    if (kWindows[window] <= kRecent) {
        return size;
    }
    std::array<double, static_cast<std::size_t>(kRecent)> newest{};
    for (std::size_t age = 0; age < newest.size(); ++age) {
        newest[age] = at(column, age);
        if (!(newest[age] > kGrown * size + 2.0 * deviation)) {
            return size;
        }
    }
    return median(std::span(newest));
}

bool RecentValues::is_recent(std::size_t column, const ColumnShift& shift, double size, double deviation,
                             const MeanErrors& errors) const {
    const std::int64_t steps = std::min(kWindows[shift.best], kRecent);
    double sum = 0.0;
    for (std::size_t age = 0; age < static_cast<std::size_t>(steps); ++age) {
        sum += at(column, age);
    }
    const double mean = sum / static_cast<double>(steps);
    const double least = 0.5 * size - 2.0 * deviation * errors.over(steps);
    if (!(mean > least && mean > 0) || !(at(column, 0) > 0.5 * size - 2.0 * deviation)) {
        return false;
    }
    return steps < 2 || (at(column, 0) + at(column, 1)) / 2 > 0.5 * size - 1.4 * deviation;
}

void SortedHistory::grow(std::size_t columns) {
    ring_.resize(columns * window_);
    sorted_.resize(columns * window_);
    next_.resize(columns, 0);
}

std::size_t SortedHistory::count(std::size_t column) const {
    return std::min(static_cast<std::size_t>(next_[column]), window_);
}

void SortedHistory::add(std::size_t column, double value) {
    const std::span<double> sorted = std::span(sorted_).subspan(column * window_, window_);
    double& oldest = ring_[(column * window_) + (static_cast<std::size_t>(next_[column]) % window_)];
    std::size_t filled = count(column);
    if (filled == window_) {
        const auto place = std::ranges::lower_bound(sorted, oldest);
        std::copy(place + 1, sorted.end(), place);
        --filled;
    }
    const auto end = sorted.begin() + static_cast<std::ptrdiff_t>(filled);
    const auto place = std::upper_bound(sorted.begin(), end, value);
    std::copy_backward(place, end, end + 1);
    *place = oldest = value;
    ++next_[column];
}

double SortedHistory::deviation(std::size_t column) const {
    const std::size_t filled = count(column);
    if (filled == 0) {
        return kUnknown;
    }
    const std::span<const double> sorted = std::span(sorted_).subspan(column * window_, filled);
    const std::size_t middle = (filled - 1) / 2;
    const double center = sorted[middle];
    // The two sides of the center are sorted by distance: step to the nearer of both until half are passed.
    std::size_t below = middle;  // one more than the next on the left
    std::size_t above = middle;  // the next on the right
    double distance = 0.0;
    for (std::size_t passed = 0; passed <= middle; ++passed) {
        const double left = below > 0 ? center - sorted[below - 1] : std::numeric_limits<double>::infinity();
        const double right = above < filled ? sorted[above] - center : std::numeric_limits<double>::infinity();
        if (left < right) {
            distance = left;
            --below;
        } else {
            distance = right;
            ++above;
        }
    }
    return distance;
}

}  // namespace megatronapp::detect
