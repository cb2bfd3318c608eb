#include "megatronapp/rank_records.hpp"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "megatronapp/record.hpp"

namespace megatronapp {
namespace {

using StartedRecord = std::pair<std::uint64_t, const std::byte*>;

std::uint64_t start_of(const std::byte* record) {
    std::uint64_t start_ns = 0;
    std::memcpy(&start_ns, record, sizeof start_ns);  // the first field; a frame's body may lie at any address
    return start_ns;
}

template <typename T>
T field_of(const std::byte* record, std::size_t offset) {
    T value{};
    std::memcpy(&value, record + offset, sizeof value);
    return value;
}

constexpr std::size_t kDurationAt = 8;
constexpr std::size_t kStepAt = 12;
constexpr std::size_t kAuxAt = 20;
constexpr std::size_t kKindAt = 28;
constexpr std::size_t kFlagsAt = 31;
constexpr unsigned kLastKindBit = 63;
constexpr double kSecondsPerNs = 1e-9;

double seconds_of(std::uint32_t units) {
    return static_cast<double>(std::uint64_t{units} * kDurationUnitNs) * kSecondsPerNs;
}

std::byte* write_row(std::byte* row, const std::byte* record, std::int32_t rank) {
    std::memcpy(row, record, kRecordBytes);
    std::memcpy(row + kRecordBytes, &rank, sizeof rank);
    return row + kRankRecordBytes;
}

void check_sizes(std::span<const RecordPart> parts, std::size_t rows_bytes) {
    std::size_t records = 0;
    for (const RecordPart& part : parts) {
        if (part.records.size() % kRecordBytes != 0) {
            throw std::invalid_argument("merge_by_rank: " + std::to_string(part.records.size()) + " bytes of rank " +
                                        std::to_string(part.rank) + " are not whole records of " +
                                        std::to_string(kRecordBytes) + " bytes");
        }
        records += part.records.size() / kRecordBytes;
    }
    if (rows_bytes != records * kRankRecordBytes) {
        throw std::invalid_argument("merge_by_rank: rows have " + std::to_string(rows_bytes) + " bytes; " +
                                    std::to_string(records) + " records take " +
                                    std::to_string(records * kRankRecordBytes));
    }
}

}  // namespace

void merge_by_rank(std::span<const RecordPart> parts, std::span<std::byte> rows) {
    check_sizes(parts, rows.size());
    std::vector<std::size_t> order(parts.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::ranges::stable_sort(order, {}, [&](std::size_t place) { return parts[place].rank; });
    std::vector<StartedRecord> of_rank;
    std::byte* row = rows.data();
    for (auto place = order.begin(); place != order.end();) {
        const std::int32_t rank = parts[*place].rank;
        of_rank.clear();
        for (; place != order.end() && parts[*place].rank == rank; ++place) {
            const std::span<const std::byte> records = parts[*place].records;
            for (std::size_t offset = 0; offset < records.size(); offset += kRecordBytes) {
                of_rank.emplace_back(start_of(&records[offset]), &records[offset]);
            }
        }
        // Spans are written at their end, so that records of one rank are almost in order, and not quite.
        std::ranges::stable_sort(of_rank, {}, &StartedRecord::first);
        for (const StartedRecord& record : of_rank) {
            row = write_row(row, record.second, rank);
        }
    }
}

FrameSummary summarize_frame(std::span<const std::byte> records) {
    if (records.empty() || records.size() % kRecordBytes != 0) {
        throw std::invalid_argument("summarize_frame: " + std::to_string(records.size()) +
                                    " bytes are not one or more whole records of " + std::to_string(kRecordBytes) +
                                    " bytes");
    }
    const auto first = field_of<std::uint32_t>(records.data(), kStepAt);
    FrameSummary found{first, first, 0};
    for (std::size_t offset = 0; offset < records.size(); offset += kRecordBytes) {
        const std::byte* record = &records[offset];
        const auto step = field_of<std::uint32_t>(record, kStepAt);
        found.least_step = std::min(found.least_step, step);
        found.greatest_step = std::max(found.greatest_step, step);
        const unsigned kind = field_of<std::uint8_t>(record, kKindAt);
        found.kinds |= std::uint64_t{1} << std::min(kind, kLastKindBit);
    }
    return found;
}

void sum_spans(std::span<const std::byte> rows, const SumColumns& columns, std::size_t world, std::span<double> sums) {
    const std::size_t count = world == 0 ? 0 : sums.size() / world;
    if (rows.size() % kRankRecordBytes != 0 || count * world != sums.size() || count > kMaxSumColumns) {
        throw std::invalid_argument("sum_spans: " + std::to_string(rows.size()) + " bytes of rows of " +
                                    std::to_string(kRankRecordBytes) + ", and " + std::to_string(sums.size()) +
                                    " sums of " + std::to_string(world) + " ranks, in at most " +
                                    std::to_string(kMaxSumColumns) + " columns");
    }
    std::ranges::fill(sums, 0.0);
    for (std::size_t offset = 0; offset < rows.size(); offset += kRankRecordBytes) {
        const std::byte* row = &rows[offset];
        const unsigned wanted = columns.of_kind[field_of<std::uint8_t>(row, kKindAt)];
        const auto rank = field_of<std::int32_t>(row, kRecordBytes);
        if (wanted == 0 || rank < 0 || static_cast<std::size_t>(rank) >= world) {
            continue;
        }
        const double wall_s = seconds_of(field_of<std::uint32_t>(row, kDurationAt));
        const bool waited = (field_of<std::uint8_t>(row, kFlagsAt) & columns.run_queue_flag) != 0;
        const double queue_s = waited ? seconds_of(field_of<std::uint32_t>(row, kAuxAt)) : 0.0;
        const double busy_s = std::max(wall_s - queue_s, 0.0);
        for (std::size_t column = 0; column < count; ++column) {
            const unsigned bit = 1U << column;
            if ((wanted & bit) != 0) {
                sums[column * world + static_cast<std::size_t>(rank)] += (columns.busy & bit) != 0 ? busy_s : wall_s;
            }
        }
    }
}

}  // namespace megatronapp
