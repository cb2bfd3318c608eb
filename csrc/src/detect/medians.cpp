#include "megatronapp/detect/medians.hpp"

#include <array>
#include <cmath>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "megatronapp/parallel.hpp"

namespace megatronapp::detect {
namespace {

/// The lower of two middles; NaN is above all numbers, and without values.
double lower_median_of_all(std::span<double> values) {
    if (values.empty()) {
        return kUnknown;
    }
    const auto is_less = [](double a, double b) { return a < b || (std::isnan(b) && !std::isnan(a)); };
    const auto middle = values.begin() + static_cast<std::ptrdiff_t>((values.size() - 1) / 2);
    std::nth_element(values.begin(), middle, values.end(), is_less);
    return *middle;
}

/// Columns that are read together: as many as a line of the cache has.
constexpr std::size_t kColumnsAtOnce = 8;

/// The number of lines of a table along its other axis, of which it has `lines`.
std::size_t length_of(std::span<const double> table, std::size_t lines, const char* function, const char* name) {
    const std::size_t length = lines == 0 ? 0 : table.size() / lines;
    if (length * lines != table.size()) {
        throw std::invalid_argument(std::string(function) + ": " + std::to_string(table.size()) +
                                    " numbers are no table of " + std::to_string(lines) + " " + name);
    }
    return length;
}

}  // namespace

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
    const std::size_t threads = parts_of(values.size());
    std::vector<std::vector<std::size_t>> next(threads, std::vector<std::size_t>(out.size(), 0));
    in_parts(values.size(), threads, [&](std::size_t part, std::size_t begin, std::size_t end) {
        for (const std::int64_t group : groups.subspan(begin, end - begin)) {
            if (group < 0 || static_cast<std::size_t>(group) >= out.size()) {
                throw std::invalid_argument("segment_medians: " + std::to_string(group) + " is none of the " +
                                            std::to_string(out.size()) + " groups");
            }
            ++next[part][static_cast<std::size_t>(group)];
        }
    });
    std::vector<std::size_t> first(out.size() + 1, 0);
    for (std::size_t group = 0; group < out.size(); ++group) {
        std::size_t place = first[group];
        for (auto& of_part : next) {
            place += std::exchange(of_part[group], place);
        }
        first[group + 1] = place;
    }
    std::vector<double> sorted(values.size());
    in_parts(values.size(), threads, [&](std::size_t part, std::size_t begin, std::size_t end) {
        for (std::size_t place = begin; place < end; ++place) {
            sorted[next[part][static_cast<std::size_t>(groups[place])]++] = values[place];
        }
    });
    in_parts(out.size(), threads, [&](std::size_t, std::size_t begin, std::size_t end) {
        for (std::size_t group = begin; group < end; ++group) {
            out[group] = lower_median_of_all(std::span(sorted).subspan(first[group], first[group + 1] - first[group]));
        }
    });
}

void column_medians(std::span<const double> table, std::span<double> out) {
    const std::size_t columns = out.size();
    const std::size_t rows = length_of(table, columns, "column_medians", "columns");
    in_parts(columns, parts_of(table.size()), [&](std::size_t, std::size_t begin, std::size_t end) {
        std::array<std::vector<double>, kColumnsAtOnce> known;
        for (std::size_t first = begin; first < end; first += kColumnsAtOnce) {
            const std::size_t count = std::min(kColumnsAtOnce, end - first);
            std::ranges::for_each(known, [](auto& values) { values.clear(); });
            for (std::size_t row = 0; row < rows; ++row) {
                for (std::size_t place = 0; place < count; ++place) {
                    if (const double value = table[(row * columns) + first + place]; !std::isnan(value)) {
                        known[place].push_back(value);
                    }
                }
            }
            for (std::size_t place = 0; place < count; ++place) {
                out[first + place] = lower_median(known[place]);
            }
        }
    });
}

void row_medians(std::span<const double> table, std::span<double> out) {
    const std::size_t columns = length_of(table, out.size(), "row_medians", "rows");
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
