#include "megatronapp/rank_records.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <random>
#include <stdexcept>
#include <tuple>
#include <vector>

#include "megatronapp/record.hpp"

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

void append(Bytes& records, const Span& span) {
    const Item<kRecordWords> words = pack(span);
    const auto* bytes = reinterpret_cast<const std::byte*>(words.data());
    records.insert(records.end(), bytes, bytes + kRecordBytes);
}

Span span_of(std::uint8_t kind, std::uint32_t step) {
    Span span{};
    span.kind = kind;
    span.step = step;
    return span;
}

Span span_of(std::uint8_t kind, std::uint64_t duration_ns, std::uint32_t aux, std::uint8_t flags) {
    Span span = span_of(kind, 0);
    span.duration_ns = duration_ns;
    span.aux = aux;
    span.flags = flags;
    return span;
}

TEST(SummarizeFrame, TellsStepsAndKinds) {
    Bytes records;
    append(records, span_of(3, 7));
    append(records, span_of(32, 5));
    append(records, span_of(200, 9));
    const FrameSummary found = summarize_frame(records);
    EXPECT_EQ(found.least_step, 5U);
    EXPECT_EQ(found.greatest_step, 9U);
    EXPECT_EQ(found.kinds, (std::uint64_t{1} << 3U) | (std::uint64_t{1} << 32U) | (std::uint64_t{1} << 63U));
    EXPECT_THROW((void)summarize_frame(std::span(records).first(33)), std::invalid_argument);
    EXPECT_THROW((void)summarize_frame({}), std::invalid_argument);
}

TEST(SumSpans, AddsUpByColumnAndRankWithoutTheRunQueue) {
    constexpr std::uint8_t kRunQueue = 8;
    Bytes own;
    append(own, span_of(3, 8'000, 250, kRunQueue));
    append(own, span_of(3, 8'000, 5'000, kRunQueue));
    append(own, span_of(4, 4'000, 250, 0));
    append(own, span_of(9, 16'000, 0, 0));
    Bytes rows(2 * own.size() / kRecordBytes * kRankRecordBytes);
    merge_by_rank(std::vector<RecordPart>{{1, own}, {7, own}}, rows);
    SumColumns columns{.of_kind = {}, .busy = 1, .run_queue_flag = kRunQueue};
    columns.of_kind[3] = 1;
    columns.of_kind[4] = 3;
    std::vector<double> sums(6, 5.0);
    sum_spans(rows, columns, 3, sums);
    EXPECT_EQ(sums[0], 0.0);
    EXPECT_DOUBLE_EQ(sums[1], 10e-6);
    EXPECT_DOUBLE_EQ(sums[4], 4e-6);
    EXPECT_EQ(sums[3] + sums[5], 0.0);
    EXPECT_THROW(sum_spans(rows, columns, 4, sums), std::invalid_argument);
    EXPECT_THROW(sum_spans(std::span(rows).first(35), columns, 3, sums), std::invalid_argument);
    std::vector<double> many(9);
    EXPECT_THROW(sum_spans(rows, columns, 1, many), std::invalid_argument);
}

}  // namespace
}  // namespace megatronapp
