#include "megatronapp/detect/medians.hpp"

#include <cmath>
#include <stdexcept>
#include <string>
#include <vector>

namespace megatronapp::detect {
void median_of_others(std::span<const double> values, std::span<const std::int64_t> groups, std::span<double> out) {
    if (groups.size() != values.size() || out.size() != values.size()) {
        throw std::invalid_argument("median_of_others: " + std::to_string(values.size()) + " values, " +
                                    std::to_string(groups.size()) + " groups and " + std::to_string(out.size()) +
                                    " results; give one of each per column");
    }
    std::int64_t last = -1;
    for (const std::int64_t group : groups) {
        if (group < -1 || group >= static_cast<std::int64_t>(std::numeric_limits<std::int32_t>::max())) {
            throw std::invalid_argument("median_of_others: " + std::to_string(group) + " is no number of a group");
        }
        last = std::max(last, group);
    }
    const auto place_of = [&](std::size_t column) { return static_cast<std::size_t>(groups[column] + 1); };
    std::vector<std::size_t> begin(static_cast<std::size_t>(last) + 3, 0);
    for (std::size_t column = 0; column < values.size(); ++column) {
        begin[place_of(column) + 1] += std::isfinite(values[column]) ? 1 : 0;
    }
    for (std::size_t group = 1; group < begin.size(); ++group) {
        begin[group] += begin[group - 1];
    }
    std::vector<double> sorted(begin.back());
    std::vector<std::size_t> next(begin);
    for (std::size_t column = 0; column < values.size(); ++column) {
        if (std::isfinite(values[column])) {
            sorted[next[place_of(column)]++] = values[column];
        }
    }
    std::vector<MedianOfOthers> medians;
    medians.reserve(begin.size() - 1);
    for (std::size_t group = 0; group + 1 < begin.size(); ++group) {
        medians.emplace_back(std::span(sorted).subspan(begin[group], begin[group + 1] - begin[group]));
    }
    for (std::size_t column = 0; column < values.size(); ++column) {
        const double value = values[column];
        out[column] = std::isfinite(value) ? medians[place_of(column)].without(value) : kUnknown;
    }
}

void segment_medians(std::span<const double> values, std::span<const std::int64_t> groups, std::span<double> out) {
    if (groups.size() != values.size()) {
        throw std::invalid_argument("segment_medians: " + std::to_string(values.size()) + " values and " +
                                    std::to_string(groups.size()) + " groups; give a group for each value");
    }
    std::vector<std::size_t> begin(out.size() + 1, 0);
    for (const std::int64_t group : groups) {
        if (group < 0 || static_cast<std::size_t>(group) >= out.size()) {
            throw std::invalid_argument("segment_medians: " + std::to_string(group) + " is none of the " +
                                        std::to_string(out.size()) + " groups");
        }
        ++begin[static_cast<std::size_t>(group) + 1];
    }
    for (std::size_t group = 1; group < begin.size(); ++group) {
        begin[group] += begin[group - 1];
    }
    std::vector<double> sorted(values.size());
    std::vector<std::size_t> next(begin);
    for (std::size_t place = 0; place < values.size(); ++place) {
        sorted[next[static_cast<std::size_t>(groups[place])]++] = values[place];
    }
    const auto is_less = [](double a, double b) { return a < b || (std::isnan(b) && !std::isnan(a)); };
    for (std::size_t group = 0; group < out.size(); ++group) {
        const auto first = sorted.begin() + static_cast<std::ptrdiff_t>(begin[group]);
        const auto last = sorted.begin() + static_cast<std::ptrdiff_t>(begin[group + 1]);
        if (first == last) {
            out[group] = kUnknown;
            continue;
        }
        const auto middle = first + (last - first - 1) / 2;
        std::nth_element(first, middle, last, is_less);
        out[group] = *middle;
    }
}

void row_medians(std::span<const double> table, std::span<double> out) {
    const std::size_t columns = out.empty() ? 0 : table.size() / out.size();
    if (columns * out.size() != table.size()) {
        throw std::invalid_argument("row_medians: " + std::to_string(table.size()) + " numbers are no table of " +
                                    std::to_string(out.size()) + " rows");
    }
    std::vector<double> known;
    for (std::size_t row = 0; row < out.size(); ++row) {
        known.clear();
        for (const double value : table.subspan(row * columns, columns)) {
            if (!std::isnan(value)) {
                known.push_back(value);
            }
        }
        out[row] = median(known);
    }
}

}  // namespace megatronapp::detect
