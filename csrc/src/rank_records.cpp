#include "megatronapp/rank_records.hpp"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace megatronapp {
namespace {

using StartedRecord = std::pair<std::uint64_t, const std::byte*>;

std::uint64_t start_of(const std::byte* record) {
    std::uint64_t start_ns = 0;
    std::memcpy(&start_ns, record, sizeof start_ns);  // the first field; a frame's body may lie at any address
    return start_ns;
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

}  // namespace megatronapp
