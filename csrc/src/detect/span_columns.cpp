#include "megatronapp/detect/span_columns.hpp"

#include <algorithm>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>

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
std::vector<std::uint64_t> step_ends(std::span<const std::byte> rows, const SpanFormat& format) {
    std::vector<std::uint64_t> ends;
    for (std::size_t offset = 0; offset < rows.size(); offset += kRankRecordBytes) {
        const std::byte* row = &rows[offset];
        const std::int32_t rank = rank_of(row);
        if (kind_of(row) != format.step_kind || (flags_of(row) & format.saturated_flag) != 0 || rank < 0) {
            continue;
        }
        if (static_cast<std::size_t>(rank) >= ends.size()) {
            ends.resize(static_cast<std::size_t>(rank) + 1, std::numeric_limits<std::uint64_t>::max());
        }
        const std::uint64_t units = field_of<std::uint32_t>(row, kDurationAt);
        ends[static_cast<std::size_t>(rank)] = start_of(row) + (units * kDurationUnitNs);
    }
    return ends;
}

}  // namespace

StreamRows stream_rows(std::span<const std::byte> rows, const SpanFormat& format) {
    const std::size_t count = count_of(rows);
    const std::vector<std::uint64_t> ends = step_ends(rows, format);
    StreamRows found{.rows = {}, .in_order = true};
    found.rows.reserve(count);
    std::int32_t before_rank = std::numeric_limits<std::int32_t>::min();
    std::uint64_t before_start = 0;
    for (std::size_t number = 0; number < count; ++number) {
        const std::byte* row = &rows[number * kRankRecordBytes];
        if (format.is_left_out[kind_of(row)] != 0) {
            continue;
        }
        const std::int32_t rank = rank_of(row);
        const std::uint64_t start = start_of(row);
        const bool has_end = rank >= 0 && static_cast<std::size_t>(rank) < ends.size();
        if (has_end && start > ends[static_cast<std::size_t>(rank)]) {
            continue;
        }
        found.in_order = found.in_order && (rank > before_rank || (rank == before_rank && start >= before_start));
        before_rank = rank;
        before_start = start;
        found.rows.push_back(static_cast<std::int64_t>(number));
    }
    return found;
}

void write_columns(std::span<const std::byte> rows, std::int64_t origin_ns, const SpanFormat& format,
                   const SpanColumns& columns) {
    const std::size_t count = count_of(rows);
    for (const std::size_t size : {columns.start.size(), columns.end.size(), columns.duration.size(),
                                   columns.queue.size(), columns.rank.size(), columns.kind.size()}) {
        if (size != count) {
            throw std::invalid_argument("write_columns: a column has " + std::to_string(size) + " places for " +
                                        std::to_string(count) + " rows");
        }
    }
    double first = std::numeric_limits<double>::infinity();
    double last = -first;
    for (std::size_t number = 0; number < count; ++number) {
        const std::byte* row = &rows[number * kRankRecordBytes];
        const bool waited = (flags_of(row) & format.run_queue_flag) != 0;
        columns.rank[number] = rank_of(row);
        columns.kind[number] = kind_of(row);
        columns.duration[number] = static_cast<double>(field_of<std::uint32_t>(row, kDurationAt)) * kSecondsPerUnit;
        columns.queue[number] =
            waited ? static_cast<double>(field_of<std::uint32_t>(row, kAuxAt)) * kSecondsPerUnit : 0.0;
        const auto since_ns = static_cast<std::int64_t>(start_of(row) - static_cast<std::uint64_t>(origin_ns));
        columns.start[number] = static_cast<double>(since_ns) * kSecondsPerNs;
        columns.end[number] = columns.start[number] + columns.duration[number];
        first = std::min(first, columns.start[number]);
        last = std::max(last, columns.end[number]);
    }
    // Transfers that are posted together share their start: the later one begins where the earlier ended. Ranks are
    // laid out one after the other, as the plain form does, so that sums are rounded as there.
    double reached = -std::numeric_limits<double>::infinity();
    for (std::size_t number = 0; number < count; ++number) {
        const double far = (last - first + 1.0) * static_cast<double>(columns.rank[number]);
        const double end = columns.end[number];
        if (number > 0 && columns.rank[number] == columns.rank[number - 1]) {
            columns.start[number] = std::max(columns.start[number], reached - far);
            columns.end[number] = std::max(end, columns.start[number]);
        }
        reached = std::max(reached, end + far);
    }
}

void shift_starts(std::span<const std::byte> rows, const ClockShift& shift, std::span<std::byte> out) {
    const std::size_t count = count_of(rows);
    if (out.size() != rows.size() || shift.device_ns.size() != shift.offset_ns.size()) {
        throw std::invalid_argument("shift_starts: " + std::to_string(rows.size()) + " and " +
                                    std::to_string(out.size()) + " bytes of rows, " +
                                    std::to_string(shift.offset_ns.size()) + " and " +
                                    std::to_string(shift.device_ns.size()) + " offsets do not fit");
    }
    std::memcpy(out.data(), rows.data(), rows.size());
    for (std::size_t number = 0; number < count; ++number) {
        std::byte* row = &out[number * kRankRecordBytes];
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
}

}  // namespace megatronapp::detect
