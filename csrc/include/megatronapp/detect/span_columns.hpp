/// Spans of the ranks of a step: which records are entries of a rank's stream, on which clocks, and as columns.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

namespace megatronapp::detect {

/// Numbers of the record's format that the caller gives.
struct SpanFormat {
    std::array<std::uint8_t, 256> is_left_out;  // kinds that are no entries of a stream
    std::uint8_t step_kind;
    std::uint8_t saturated_flag;
    std::uint8_t run_queue_flag;
};

/// What is asked of all records of a step. Columns have a place for each row.
struct RowColumns {
    std::span<std::uint8_t> kind;
    std::span<std::int32_t> rank;
};

struct RowSummary {
    std::array<std::int64_t, 256> count{};  // rows of each kind
    std::uint8_t flags = 0;                 // all that some row has
    std::int32_t greatest_rank = -1;
    std::uint64_t least_start = std::numeric_limits<std::uint64_t>::max();  // the end of time without rows
};

/// Writes columns of rows in any order, and sums them up. Throws std::invalid_argument where sizes do not fit.
RowSummary summarize_rows(std::span<const std::byte> rows, const RowColumns& columns);

/// Rows of records (with their ranks) that are entries of a stream, in their order: what begins after a rank's STEP has
/// ended belongs to no step.
struct StreamRows {
    std::vector<std::int64_t> rows;
    bool in_order;  // by rank, then start
};

/// Throws std::invalid_argument where `rows` are not whole ones, as the other functions do.
[[nodiscard]] StreamRows stream_rows(std::span<const std::byte> rows, const SpanFormat& format);

/// Copies rows by their numbers. Throws std::invalid_argument for a number of no row.
void take_rows(std::span<const std::byte> rows, std::span<const std::int64_t> numbers, std::span<std::byte> out);

/// Columns of spans, in seconds after an origin; `start` and `end` are cut so that no two spans of a rank overlap.
struct SpanColumns {
    std::span<double> start;
    std::span<double> end;
    std::span<double> duration;
    std::span<double> queue;  // run-queue delay, 0 where the span does not carry it
    std::span<std::int64_t> rank;
    std::span<std::uint8_t> kind;
    std::span<std::uint8_t> flags;
};

/// Writes the columns of spans that are sorted by rank, then start.
void write_columns(std::span<const std::byte> rows, std::int64_t origin_ns, const SpanFormat& format,
                   const SpanColumns& columns);

/// Which times are shifted: by the offset of the rank, and of records with the flag also by that of its device.
struct ClockShift {
    std::span<const std::int64_t> offset_ns;
    std::span<const std::int64_t> device_ns;
    std::uint8_t device_flag;
    std::array<std::uint8_t, 256> is_of_host;  // kinds whose times are never those of a device
};

/// Copies rows and takes the offsets off their starts. Throws std::invalid_argument also for ranks without an offset.
void shift_starts(std::span<const std::byte> rows, const ClockShift& shift, std::span<std::byte> out);

}  // namespace megatronapp::detect
