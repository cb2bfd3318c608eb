#include "megatronapp/rank_records.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <random>
#include <stdexcept>
#include <tuple>
#include <vector>

namespace megatronapp {
namespace {

using Bytes = std::vector<std::byte>;

/// A record that starts then, with a number to know it by.
void append(Bytes& records, std::uint64_t start_ns, std::uint64_t number) {
    const std::array<std::uint64_t, kRecordWords> words{start_ns, number, 0, 0};
    const auto* bytes = reinterpret_cast<const std::byte*>(words.data());
    records.insert(records.end(), bytes, bytes + kRecordBytes);
}

struct Row {
    std::uint64_t start_ns;
    std::uint64_t number;
    std::int32_t rank;
    auto operator<=>(const Row&) const = default;
};

std::vector<Row> rows_of(const Bytes& bytes) {
    std::vector<Row> rows(bytes.size() / kRankRecordBytes);
    for (std::size_t i = 0; i < rows.size(); ++i) {
        const std::byte* row = &bytes[i * kRankRecordBytes];
        std::memcpy(&rows[i].start_ns, row, 8);
        std::memcpy(&rows[i].number, row + 8, 8);
        std::memcpy(&rows[i].rank, row + kRecordBytes, 4);
    }
    return rows;
}

TEST(MergeByRank, SortsByRankThenStartAndLeavesEqualOnesInOrder) {
    std::mt19937 random{7};  // NOLINT(cert-msc32-c,cert-msc51-cpp): the same cases in every run
    for (int round = 0; round < 200; ++round) {
        const std::size_t count = random() % 6;
        std::vector<Bytes> parts(count);
        std::vector<RecordPart> received;
        std::vector<Row> expected;
        std::uint64_t number = 0;
        for (Bytes& part : parts) {
            const auto rank = static_cast<std::int32_t>(random() % 3);
            for (auto left = random() % 40; left > 0; --left) {
                const std::uint64_t start_ns = random() % 20;
                append(part, start_ns, number);
                expected.push_back({start_ns, number++, rank});
            }
            received.push_back({rank, part});
        }
        std::ranges::stable_sort(expected, {}, [](const Row& row) { return std::tuple{row.rank, row.start_ns}; });
        Bytes out(expected.size() * kRankRecordBytes);
        merge_by_rank(received, out);
        EXPECT_EQ(rows_of(out), expected);
    }
}

TEST(MergeByRank, RefusesSizesThatDoNotFit) {
    Bytes records;
    append(records, 1, 1);
    Bytes rows(kRankRecordBytes);
    EXPECT_THROW(merge_by_rank(std::vector<RecordPart>{{0, std::span(records).first(31)}}, rows),
                 std::invalid_argument);
    EXPECT_THROW(merge_by_rank(std::vector<RecordPart>{{0, records}, {1, records}}, rows), std::invalid_argument);
}

}  // namespace
}  // namespace megatronapp
