/// Merging of the records that the ranks of a step have sent, for readers of whole steps.
#pragma once

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

}  // namespace megatronapp
