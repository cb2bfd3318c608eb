#include "megatronapp/detect/span_columns.hpp"

#include <algorithm>
#include <cstring>
#include <functional>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>

#include "megatronapp/parallel.hpp"
#include "megatronapp/rank_records.hpp"
#include "megatronapp/record.hpp"

namespace megatronapp::detect {
namespace {

constexpr std::size_t kDurationAt = 8;
constexpr std::size_t kAuxAt = 20;
constexpr std::size_t kKindAt = 28;
constexpr std::size_t kFlagsAt = 31;
constexpr double kSecondsPerNs = 1e-9;
constexpr double kSecondsPerUnit = static_cast<double>(kDurationUnitNs) * kSecondsPerNs;

template <typename T>
T field_of(const std::byte* row, std::size_t offset) {
    T value{};
    std::memcpy(&value, row + offset, sizeof value);
    return value;
}

std::uint64_t start_of(const std::byte* row) { return field_of<std::uint64_t>(row, 0); }
std::uint8_t kind_of(const std::byte* row) { return field_of<std::uint8_t>(row, kKindAt); }
std::uint8_t flags_of(const std::byte* row) { return field_of<std::uint8_t>(row, kFlagsAt); }
std::int32_t rank_of(const std::byte* row) { return field_of<std::int32_t>(row, kRecordBytes); }

std::size_t count_of(std::span<const std::byte> rows) {
    if (rows.size() % kRankRecordBytes != 0) {
        throw std::invalid_argument(std::to_string(rows.size()) + " bytes are not whole rows of " +
                                    std::to_string(kRankRecordBytes));
    }
    return rows.size() / kRankRecordBytes;
}

/// The end of each rank's step; the end of time where its STEP record is missing or saturated.
using StepEnds = std::vector<std::uint64_t>;

constexpr std::uint64_t kNever = std::numeric_limits<std::uint64_t>::max();

struct RankEnd {
    std::size_t rank;
    std::uint64_t end_ns;
};

StepEnds step_ends(std::span<const std::byte> rows, const SpanFormat& format) {
    const std::size_t count = rows.size() / kRankRecordBytes;
    const std::size_t threads = parts_of(count);
    std::vector<std::vector<RankEnd>> found(threads);
    in_parts(count, threads, [&](std::size_t part, std::size_t begin, std::size_t end) {
        for (std::size_t number = begin; number < end; ++number) {
            const std::byte* row = &rows[number * kRankRecordBytes];
            const std::int32_t rank = rank_of(row);
            if (kind_of(row) != format.step_kind || (flags_of(row) & format.saturated_flag) != 0 || rank < 0) {
                continue;
            }
            const std::uint64_t units = field_of<std::uint32_t>(row, kDurationAt);
            found[part].push_back(
                {.rank = static_cast<std::size_t>(rank), .end_ns = start_of(row) + (units * kDurationUnitNs)});
        }
    });
    StepEnds ends;
    for (const auto& of_part : found) {
        for (const RankEnd& step : of_part) {
            if (step.rank >= ends.size()) {
                ends.resize(step.rank + 1, kNever);
            }
            ends[step.rank] = step.end_ns;
        }
    }
    return ends;
}

/// Rows of a part of a step that are entries of a stream.
struct PartRows {
    std::vector<std::int64_t> rows;
    bool in_order = true;
};

/// Whether a row may stand before the next one in a sorted step.
bool is_sorted(const std::byte* earlier, const std::byte* later) {
    return rank_of(earlier) < rank_of(later) ||
           (rank_of(earlier) == rank_of(later) && start_of(earlier) <= start_of(later));
}

PartRows part_rows(std::span<const std::byte> rows, std::size_t begin, std::size_t end, const StepEnds& ends,
                   const SpanFormat& format) {
    PartRows found;
    found.rows.reserve(end - begin);
    const std::byte* last = nullptr;
    for (std::size_t number = begin; number < end; ++number) {
        const std::byte* row = &rows[number * kRankRecordBytes];
        if (format.is_left_out[kind_of(row)] != 0) {
            continue;
        }
        const std::int32_t rank = rank_of(row);
        const bool has_end = rank >= 0 && static_cast<std::size_t>(rank) < ends.size();
        if (has_end && start_of(row) > ends[static_cast<std::size_t>(rank)]) {
            continue;
        }
        found.in_order = found.in_order && (last == nullptr || is_sorted(last, row));
        last = row;
        found.rows.push_back(static_cast<std::int64_t>(number));
    }
    return found;
}

/// The first row of the rank that is running at a row: where a part may begin that holds whole ranks.
std::size_t begin_of_rank(std::span<const std::byte> rows, std::size_t number) {
    const std::size_t count = rows.size() / kRankRecordBytes;
    while (number > 0 && number < count &&
           rank_of(&rows[number * kRankRecordBytes]) == rank_of(&rows[(number - 1) * kRankRecordBytes])) {
        --number;
    }
    return number;
}

void write_row(const std::byte* row, std::int64_t origin_ns, const SpanFormat& format, const SpanColumns& columns,
               std::size_t number) {
    const std::uint8_t flags = flags_of(row);
    const bool waited = (flags & format.run_queue_flag) != 0;
    columns.rank[number] = rank_of(row);
    columns.kind[number] = kind_of(row);
    columns.flags[number] = flags;
    columns.duration[number] = static_cast<double>(field_of<std::uint32_t>(row, kDurationAt)) * kSecondsPerUnit;
    columns.queue[number] = waited ? static_cast<double>(field_of<std::uint32_t>(row, kAuxAt)) * kSecondsPerUnit : 0.0;
    const auto since_ns = static_cast<std::int64_t>(start_of(row) - static_cast<std::uint64_t>(origin_ns));
    columns.start[number] = static_cast<double>(since_ns) * kSecondsPerNs;
    columns.end[number] = columns.start[number] + columns.duration[number];
}

/// Cuts spans so that no two of a rank overlap; `far`: what is added for each rank to lay ranks out one after another.
void cut_overlaps(std::size_t begin, std::size_t end, double apart, const SpanColumns& columns) {
    double reached = -std::numeric_limits<double>::infinity();
    for (std::size_t number = begin; number < end; ++number) {
        const double far = apart * static_cast<double>(columns.rank[number]);
        const double end_s = columns.end[number];
        if (number > begin && columns.rank[number] == columns.rank[number - 1]) {
            columns.start[number] = std::max(columns.start[number], reached - far);
            columns.end[number] = std::max(end_s, columns.start[number]);
        }
        reached = std::max(reached, end_s + far);
    }
}

void shift_start(std::byte* row, const ClockShift& shift) {
    const std::int32_t rank = rank_of(row);
    if (rank < 0 || static_cast<std::size_t>(rank) >= shift.offset_ns.size()) {
        throw std::invalid_argument("shift_starts: rank " + std::to_string(rank) + " is none of the " +
                                    std::to_string(shift.offset_ns.size()) + " with an offset");
    }
    std::int64_t offset = shift.offset_ns[static_cast<std::size_t>(rank)];
    if ((flags_of(row) & shift.device_flag) != 0 && shift.is_of_host[kind_of(row)] == 0) {
        offset += shift.device_ns[static_cast<std::size_t>(rank)];
    }
    const std::uint64_t start = start_of(row) - static_cast<std::uint64_t>(offset);
    std::memcpy(row, &start, sizeof start);
}

struct Extent {
    double first = std::numeric_limits<double>::infinity();
    double last = -std::numeric_limits<double>::infinity();
};

}  // namespace

RowSummary summarize_rows(std::span<const std::byte> rows, const RowColumns& columns) {
    const std::size_t count = count_of(rows);
    if (columns.kind.size() != count || columns.rank.size() != count) {
        throw std::invalid_argument("summarize_rows: columns of " + std::to_string(columns.kind.size()) + " and " +
                                    std::to_string(columns.rank.size()) + " places do not fit " +
                                    std::to_string(count) + " rows");
    }
    std::vector<RowSummary> parts(parts_of(count));
    in_parts(count, parts.size(), [&](std::size_t part, std::size_t begin, std::size_t end) {
        RowSummary own;
        for (std::size_t number = begin; number < end; ++number) {
            const std::byte* row = &rows[number * kRankRecordBytes];
            columns.kind[number] = kind_of(row);
            columns.rank[number] = rank_of(row);
            ++own.count[kind_of(row)];
            own.flags |= flags_of(row);
            own.greatest_rank = std::max(own.greatest_rank, rank_of(row));
            own.least_start = std::min(own.least_start, start_of(row));
        }
        parts[part] = own;
    });
    RowSummary whole;
    for (const RowSummary& own : parts) {
        std::ranges::transform(whole.count, own.count, whole.count.begin(), std::plus{});
        whole.flags |= own.flags;
        whole.greatest_rank = std::max(whole.greatest_rank, own.greatest_rank);
        whole.least_start = std::min(whole.least_start, own.least_start);
    }
    return whole;
}

StreamRows stream_rows(std::span<const std::byte> rows, const SpanFormat& format) {
    const std::size_t count = count_of(rows);
    const StepEnds ends = step_ends(rows, format);
    const std::size_t threads = parts_of(count);
    std::vector<PartRows> parts(threads);
    in_parts(count, threads, [&](std::size_t part, std::size_t begin, std::size_t end) {
        parts[part] = part_rows(rows, begin, end, ends, format);
    });
    StreamRows found{.rows = std::move(parts.front().rows), .in_order = parts.front().in_order};
    for (std::size_t part = 1; part < threads; ++part) {
        const auto& own = parts[part].rows;
        const auto row_at = [&](std::int64_t number) {
            return &rows[static_cast<std::size_t>(number) * kRankRecordBytes];
        };
        const bool follows =
            found.rows.empty() || own.empty() || is_sorted(row_at(found.rows.back()), row_at(own.front()));
        found.in_order = found.in_order && parts[part].in_order && follows;
        found.rows.insert(found.rows.end(), own.begin(), own.end());
    }
    return found;
}

void take_rows(std::span<const std::byte> rows, std::span<const std::int64_t> numbers, std::span<std::byte> out) {
    const std::size_t count = count_of(rows);
    if (out.size() != numbers.size() * kRankRecordBytes) {
        throw std::invalid_argument("take_rows: " + std::to_string(out.size()) + " bytes are no place for " +
                                    std::to_string(numbers.size()) + " rows of " + std::to_string(kRankRecordBytes));
    }
    in_parts(numbers.size(), parts_of(numbers.size()), [&](std::size_t, std::size_t begin, std::size_t end) {
        for (std::size_t place = begin; place < end; ++place) {
            const std::int64_t number = numbers[place];
            if (number < 0 || static_cast<std::size_t>(number) >= count) {
                throw std::invalid_argument("take_rows: " + std::to_string(number) + " is none of the " +
                                            std::to_string(count) + " rows");
            }
            std::memcpy(&out[place * kRankRecordBytes], &rows[static_cast<std::size_t>(number) * kRankRecordBytes],
                        kRankRecordBytes);
        }
    });
}

void write_columns(std::span<const std::byte> rows, std::int64_t origin_ns, const SpanFormat& format,
                   const SpanColumns& columns) {
    const std::size_t count = count_of(rows);
    for (const std::size_t size :
         {columns.start.size(), columns.end.size(), columns.duration.size(), columns.queue.size(), columns.rank.size(),
          columns.kind.size(), columns.flags.size()}) {
        if (size != count) {
            throw std::invalid_argument("write_columns: a column has " + std::to_string(size) + " places for " +
                                        std::to_string(count) + " rows");
        }
    }
    const std::size_t threads = parts_of(count);
    std::vector<Extent> extents(threads);
    in_parts(count, threads, [&](std::size_t part, std::size_t begin, std::size_t end) {
        Extent extent;
        for (std::size_t number = begin; number < end; ++number) {
            write_row(&rows[number * kRankRecordBytes], origin_ns, format, columns, number);
            extent.first = std::min(extent.first, columns.start[number]);
            extent.last = std::max(extent.last, columns.end[number]);
        }
        extents[part] = extent;
    });
    Extent whole;
    for (const Extent& extent : extents) {
        whole = {.first = std::min(whole.first, extent.first), .last = std::max(whole.last, extent.last)};
    }
    // Transfers that are posted together share their start: the later one begins where the earlier ended. Ranks are
    // laid out one after the other, as the plain form does, so that sums are rounded as there.
    in_parts(count, threads, [&](std::size_t, std::size_t begin, std::size_t end) {
        cut_overlaps(begin_of_rank(rows, begin), begin_of_rank(rows, end), whole.last - whole.first + 1.0, columns);
    });
}

void shift_starts(std::span<const std::byte> rows, const ClockShift& shift, std::span<std::byte> out) {
    const std::size_t count = count_of(rows);
    if (out.size() != rows.size() || shift.device_ns.size() != shift.offset_ns.size()) {
        throw std::invalid_argument("shift_starts: " + std::to_string(rows.size()) + " and " +
                                    std::to_string(out.size()) + " bytes of rows, " +
                                    std::to_string(shift.offset_ns.size()) + " and " +
                                    std::to_string(shift.device_ns.size()) + " offsets do not fit");
    }
    in_parts(count, parts_of(count), [&](std::size_t, std::size_t begin, std::size_t end) {
        std::memcpy(out.data() + (begin * kRankRecordBytes), rows.data() + (begin * kRankRecordBytes),
                    (end - begin) * kRankRecordBytes);
        for (std::size_t number = begin; number < end; ++number) {
            shift_start(&out[number * kRankRecordBytes], shift);
        }
    });
}

}  // namespace megatronapp::detect
