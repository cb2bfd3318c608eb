/// Records that ranks have sent: what a frame of them holds, merging into whole steps, and sums over these.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "megatronapp/layout.hpp"

namespace megatronapp {

inline constexpr std::size_t kRankRecordBytes = kRecordBytes + sizeof(std::int32_t);

/// Whole records of a rank, in the order in which they were received.
struct RecordPart {
    std::int32_t rank;
    std::span<const std::byte> records;
};

/// Writes each record and its rank to `rows`, sorted by rank, then start; equal ones stay in the order of `parts`.
/// Throws std::invalid_argument where a part is not whole records or `rows` is not exactly as large as all of them.
void merge_by_rank(std::span<const RecordPart> parts, std::span<std::byte> rows);

/// What a reader must know of a frame before it takes it apart.
struct FrameSummary {
    std::uint32_t least_step;
    std::uint32_t greatest_step;
    std::uint64_t kinds;  // a bit for each kind that occurs; those from 63 on have the last one
};

/// Throws std::invalid_argument where `records` is empty or not whole records.
[[nodiscard]] FrameSummary summarize_frame(std::span<const std::byte> records);

inline constexpr std::size_t kMaxSumColumns = 8;

/// Which spans each column of sums adds up.
struct SumColumns {
    std::array<std::uint8_t, 256> of_kind;  // a bit for each column
    std::uint8_t busy;                      // columns from whose spans their run-queue delay is taken away
    std::uint8_t run_queue_flag;            // flag of records whose `aux` is that delay, in units of durations
};

/// Writes the seconds of each column and rank to `sums` [column][rank], from rows of `merge_by_rank`; ranks outside
/// [0, world) are left out. Throws std::invalid_argument where sizes do not fit.
void sum_spans(std::span<const std::byte> rows, const SumColumns& columns, std::size_t world, std::span<double> sums);

}  // namespace megatronapp
