#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <barrier>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <stdexcept>
#include <thread>
#include <vector>

#include "megatronapp/detect/column_test.hpp"
#include "megatronapp/detect/levels.hpp"
#include "megatronapp/detect/medians.hpp"
#include "megatronapp/detect/messages.hpp"
#include "megatronapp/detect/span_columns.hpp"
#include "megatronapp/parallel.hpp"
#include "megatronapp/rank_records.hpp"

namespace megatronapp::detect {
namespace {

constexpr ColumnSettings kSettings{.window = 64, .min_history = 8, .least_window = 1, .independent_tests = 1e5};
constexpr ColumnLimits kLimits{.floor = 0.004,
                               .own = 0.012,
                               .peers = 0.012,
                               .cap = 0.56,
                               .peer_spread = 0.012,
                               .least_peer_spread = 0.004,
                               .largest_step = 1.0};

std::array<double, kWindows.size()> prior() {
    std::array<double, kWindows.size()> errors{};
    errors.fill(1.0);
    return errors;
}

/// Judges steps of columns without doubts, and returns which columns are over.
class Steps {
  public:
    explicit Steps(std::size_t columns) : test_(std::vector<std::int64_t>(columns, 0), kSettings, prior()) {}

    std::vector<std::uint8_t> over(const std::vector<double>& values) {
        const std::size_t columns = values.size();
        std::vector<double> deviation(columns);
        std::vector<double> change(columns);
        std::vector<double> distance(columns);
        test_.compare(values, kLimits, deviation, change, distance);
        const std::vector<double> doubt(columns);
        const std::vector<std::uint8_t> usual(columns, 1);
        std::vector<std::uint8_t> known(columns);
        std::vector<std::uint8_t> over(columns);
        std::vector<double> size(columns);
        std::vector<double> strength(columns);
        std::vector<std::uint8_t> by_history(columns);
        std::vector<std::uint8_t> calm(columns);
        test_.judge(
            change, distance, doubt, doubt, usual,
            {.known = known, .over = over, .size = size, .strength = strength, .by_history = by_history, .calm = calm});
        return over;
    }

  private:
    ColumnTest test_;
};

TEST(ColumnTest, NamesTheColumnThatBecomesSlowAndNoOther) {
    Steps steps(8);
    std::vector<double> values(8, 0.1);
    for (int step = 0; step < 40; ++step) {
        values[0] += step % 2 == 0 ? 0.001 : -0.001;
        EXPECT_EQ(steps.over(values), std::vector<std::uint8_t>(8, 0));
    }
    values[3] += 0.3;
    std::vector<std::uint8_t> over;
    for (int step = 0; step < 6; ++step) {
        over = steps.over(values);
    }
    EXPECT_EQ(over, (std::vector<std::uint8_t>{0, 0, 0, 1, 0, 0, 0, 0}));
}

TEST(ColumnTest, RefusesSizesThatDoNotFit) {
    ColumnTest test(std::vector<std::int64_t>(3, 0), kSettings, prior());
    std::vector<double> three(3);
    const std::vector<double> two(2);
    EXPECT_THROW(test.compare(two, kLimits, three, three, three), std::invalid_argument);
    EXPECT_THROW(test.grow(std::vector<std::int64_t>(2, 0)), std::invalid_argument);
}

TEST(Medians, AreThoseOfSortedValues) {
    std::vector<double> values{5.0, 1.0, 4.0, 2.0};
    EXPECT_EQ(lower_median(values), 2.0);
    EXPECT_EQ(median(values), 3.0);
    const std::vector<double> columns{5.0, 1.0, kUnknown, 4.0, 2.0};
    const std::vector<std::int64_t> groups{0, 0, 0, 0, -1};
    std::vector<double> others(columns.size());
    median_of_others(columns, groups, others);
    EXPECT_EQ(others[0], 1.0);
    EXPECT_EQ(others[1], 4.0);
    EXPECT_EQ(others[3], 1.0);
    EXPECT_NE(others[2], others[2]);
    EXPECT_NE(others[4], others[4]);
    EXPECT_THROW(median_of_others(columns, std::vector<std::int64_t>(2, 0), others), std::invalid_argument);
}

TEST(Medians, OfSegmentsAndRowsSkipWhatIsUnknown) {
    const std::vector<double> values{3.0, 1.0, kUnknown, 2.0};
    std::vector<double> of_segment(3);
    segment_medians(values, std::vector<std::int64_t>{0, 0, 2, 0}, of_segment);
    EXPECT_EQ(of_segment[0], 2.0);
    EXPECT_NE(of_segment[1], of_segment[1]);
    EXPECT_NE(of_segment[2], of_segment[2]);
    EXPECT_THROW(segment_medians(values, std::vector<std::int64_t>{0, 0, 3, 0}, of_segment), std::invalid_argument);
    std::vector<double> of_row(2);
    row_medians(values, of_row);
    EXPECT_EQ(of_row[0], 2.0);
    EXPECT_EQ(of_row[1], 2.0);
}

TEST(Levels, SortEdgesAndFindTheLongestPaths) {
    const std::vector<std::int64_t> source{2, 0, 1, 0};
    const std::vector<std::int64_t> target{3, 1, 2, 2};
    const LevelOrder sorted = sort_by_level(source, target, 4);
    EXPECT_EQ(sorted.reached, 4U);
    EXPECT_EQ(sorted.order, (std::vector<std::int64_t>{1, 2, 3, 0}));
    EXPECT_EQ(sorted.level_begin, (std::vector<std::int64_t>{0, 1, 3, 4}));
    std::vector<double> times(4, 0.0);
    const std::vector<double> weights{1.0, 2.0, 4.0, 8.0};
    longest_paths(std::vector<std::int64_t>{0, 1, 0, 2}, std::vector<std::int64_t>{1, 2, 2, 3}, weights, 1, times);
    EXPECT_EQ(times, (std::vector<double>{0.0, 1.0, 4.0, 12.0}));
    EXPECT_EQ(sort_by_level(std::vector<std::int64_t>{0, 1}, std::vector<std::int64_t>{1, 0}, 3).reached, 1U);
    EXPECT_THROW((void)sort_by_level(source, std::vector<std::int64_t>{1}, 4), std::invalid_argument);
}

TEST(Levels, GiveTheLatestTimeOfEachScenarioAsLongestPathsDo) {
    const std::vector<std::int64_t> source{0, 1, 0, 2};
    const std::vector<std::int64_t> target{1, 2, 2, 3};
    const std::vector<double> recorded{1.0, 2.0, 4.0, 8.0};
    const std::vector<double> ideal{0.5, 0.25, 0.1, 0.2};
    const std::vector<std::uint8_t> recorded_in{0b10101010, 0b11001100, 0b11110000, 0b10010110};
    const std::vector<double> initial{0.3, 0.0, 0.0, 0.0, 5.0};  // the last event has no edges
    for (std::size_t scenarios = 1; scenarios <= kScenariosAtOnce; ++scenarios) {
        std::vector<double> weights;
        std::vector<double> times;
        for (std::size_t edge = 0; edge < source.size(); ++edge) {
            for (std::size_t scenario = 0; scenario < scenarios; ++scenario) {
                weights.push_back(((recorded_in[edge] >> scenario) & 1U) != 0 ? recorded[edge] : ideal[edge]);
            }
        }
        for (const double time : initial) {
            times.insert(times.end(), scenarios, time);
        }
        longest_paths(source, target, weights, scenarios, times);
        std::vector<double> latest(scenarios, 0.0);
        for (std::size_t place = 0; place < times.size(); ++place) {
            latest[place % scenarios] = std::max(latest[place % scenarios], times[place]);
        }
        EXPECT_EQ(latest_times(source, target, recorded, ideal, recorded_in, initial, scenarios), latest);
    }
    EXPECT_EQ(latest_times({}, {}, {}, {}, {}, std::vector<double>{-3.0, -2.0}, 2), (std::vector<double>{-2.0, -2.0}));
}

TEST(Levels, RefuseScenariosThatDoNotFit) {
    const std::vector<std::int64_t> ends{0};
    const std::vector<std::int64_t> beyond{2};
    const std::vector<std::int64_t> negative{-1};
    const std::vector<double> weight{1.0};
    const std::vector<std::uint8_t> set{1};
    const std::vector<double> initial{0.0, 0.0};
    EXPECT_THROW((void)latest_times(ends, ends, weight, weight, set, initial, 0), std::invalid_argument);
    EXPECT_THROW((void)latest_times(ends, ends, weight, weight, set, initial, kScenariosAtOnce + 1),
                 std::invalid_argument);
    EXPECT_THROW((void)latest_times({}, {}, {}, {}, {}, {}, 1), std::invalid_argument);
    EXPECT_THROW((void)latest_times(ends, ends, {}, weight, set, initial, 1), std::invalid_argument);
    EXPECT_THROW((void)latest_times(ends, ends, weight, {}, set, initial, 1), std::invalid_argument);
    EXPECT_THROW((void)latest_times(ends, ends, weight, weight, {}, initial, 1), std::invalid_argument);
    EXPECT_THROW((void)latest_times(ends, {}, weight, weight, set, initial, 1), std::invalid_argument);
    EXPECT_THROW((void)latest_times(ends, beyond, weight, weight, set, initial, 1), std::invalid_argument);
    EXPECT_THROW((void)latest_times(negative, ends, weight, weight, set, initial, 1), std::invalid_argument);
}

void add_row(std::vector<std::byte>& rows, std::uint8_t kind, std::uint32_t ordinal, std::int32_t rank,
             std::uint64_t start_ns = 0, std::uint32_t units = 0) {
    std::array<std::byte, kRankRecordBytes> row{};
    std::memcpy(row.data(), &start_ns, sizeof start_ns);
    std::memcpy(row.data() + 8, &units, sizeof units);
    std::memcpy(row.data() + 16, &ordinal, sizeof ordinal);
    std::memcpy(row.data() + 28, &kind, sizeof kind);
    std::memcpy(row.data() + kRecordBytes, &rank, sizeof rank);
    rows.insert(rows.end(), row.begin(), row.end());
}

TEST(Messages, AreMatchedByPairAndOrdinal) {
    const std::array<std::uint8_t, kMessageParts> kinds{1, 2, 3, 4};
    const std::vector<std::int64_t> numbers{0, 0};  // slot 0 of both ranks
    const std::vector<std::int64_t> pairs{0, 1};
    std::vector<std::byte> rows;
    add_row(rows, 1, 7, 0);
    add_row(rows, 1, 5, 0);
    add_row(rows, 9, 5, 0);
    add_row(rows, 4, 5, 1);
    add_row(rows, 4, 5, 2);  // a rank without a table
    const CommTable comms{.numbers = numbers, .slots = 1, .pairs = pairs};
    const MatchedMessages found = match_messages(rows, comms, kinds);
    EXPECT_EQ(found.ordinal, (std::vector<std::int64_t>{5, 7}));
    EXPECT_EQ(found.destination, (std::vector<std::int64_t>{1, 1}));
    EXPECT_EQ(found.parts[0], (std::vector<std::int64_t>{1, 0}));
    EXPECT_EQ(found.parts[3], (std::vector<std::int64_t>{3, -1}));
    EXPECT_THROW((void)match_messages(std::span(rows).first(35), comms, kinds), std::invalid_argument);
    const std::vector<std::int64_t> unknown{0, 1};
    EXPECT_THROW((void)match_messages(rows, {.numbers = unknown, .slots = 1, .pairs = pairs}, kinds),
                 std::invalid_argument);
}

TEST(SpanColumns, AreOfTheStreamAndDoNotOverlap) {
    SpanFormat format{.is_left_out = {}, .step_kind = 1, .saturated_flag = 1, .run_queue_flag = 2};
    format.is_left_out[1] = 1;
    std::vector<std::byte> rows;
    add_row(rows, 1, 0, 0, 100, 10);  // the step ends at 180
    add_row(rows, 2, 0, 0, 100, 5);
    add_row(rows, 2, 0, 0, 120, 5);
    add_row(rows, 2, 0, 0, 181, 5);
    add_row(rows, 2, 0, 3, 50, 5);
    const StreamRows found = stream_rows(rows, format);
    EXPECT_EQ(found.rows, (std::vector<std::int64_t>{1, 2, 4}));
    EXPECT_TRUE(found.in_order);
    std::vector<std::byte> spans(rows.begin() + kRankRecordBytes, rows.begin() + 3 * kRankRecordBytes);
    std::vector<double> start(2);
    std::vector<double> end(2);
    std::vector<double> duration(2);
    std::vector<double> queue(2);
    std::vector<std::int64_t> rank(2);
    std::vector<std::uint8_t> kind(2);
    std::vector<std::uint8_t> flags(2);
    const SpanColumns columns{
        .start = start, .end = end, .duration = duration, .queue = queue, .rank = rank, .kind = kind, .flags = flags};
    write_columns(spans, 100, format, columns);
    EXPECT_DOUBLE_EQ(start[1], 40e-9);
    EXPECT_DOUBLE_EQ(end[1], 60e-9);
    EXPECT_THROW(write_columns(rows, 100, format, columns), std::invalid_argument);
    EXPECT_THROW((void)stream_rows(std::span(rows).first(35), format), std::invalid_argument);
}

/// Lets functions work in several threads for as long as it lives, however few items there are.
class Threads {
  public:
    explicit Threads(std::size_t count) { set_threads(count, 1); }
    Threads(const Threads&) = delete;
    Threads& operator=(const Threads&) = delete;
    Threads(Threads&&) = delete;
    Threads& operator=(Threads&&) = delete;
    ~Threads() { set_threads(1); }
};

TEST(Parallel, PartsCoverAllItemsOnceAndTheFirstFailureIsThrown) {
    EXPECT_EQ(parts_of(kLeastItems * 4), 1U);
    const Threads threads(3);
    EXPECT_EQ(parts_of(0), 1U);
    EXPECT_EQ(parts_of(2), 2U);
    EXPECT_EQ(parts_of(100), 3U);
    std::vector<int> seen(100, 0);
    in_parts(seen.size(), 3, [&](std::size_t part, std::size_t begin, std::size_t end) {
        for (std::size_t item = begin; item < end; ++item) {
            seen[item] += static_cast<int>(part) + 1;
        }
    });
    std::vector<int> expected(33, 1);
    expected.insert(expected.end(), 33, 2);
    expected.insert(expected.end(), 34, 3);
    EXPECT_EQ(seen, expected);
    std::vector<std::byte> rows;
    add_row(rows, 1, 0, 0);
    std::vector<std::byte> out(4 * kRankRecordBytes);
    try {
        take_rows(rows, std::vector<std::int64_t>{0, 0, 7, 9}, out);
        FAIL();
    } catch (const std::invalid_argument& error) {
        EXPECT_STREQ(error.what(), "take_rows: 7 is none of the 1 rows");
    }
    EXPECT_THROW(set_threads(0), std::invalid_argument);
}

TEST(Parallel, CallersShareTheThreadsThatAreAllowed) {
    const Threads threads(2);
    std::array<bool, 2> is_alone{};
    in_parts(2, 2, [&](std::size_t part, std::size_t, std::size_t) {
        const std::thread::id own = std::this_thread::get_id();
        std::array<std::thread::id, 3> used;
        in_parts(3, 3, [&](std::size_t inner, std::size_t, std::size_t) { used[inner] = std::this_thread::get_id(); });
        is_alone[part] = std::ranges::count(used, own) == 3;
    });
    EXPECT_TRUE(is_alone[0] && is_alone[1]);
    // Afterwards they are free again: two parts that wait for each other end.
    std::barrier both(2);
    in_parts(2, 2, [&](std::size_t, std::size_t, std::size_t) { both.arrive_and_wait(); });
}

TEST(Parallel, MessagesAndColumnsAreThoseOfAThread) {
    const std::array<std::uint8_t, kMessageParts> kinds{1, 2, 3, 4};
    const std::vector<std::int64_t> numbers{0, 1, 0, 1};  // slots 0 and 1 of both ranks
    const std::vector<std::int64_t> pairs{0, 1, 1, 0};
    const CommTable comms{.numbers = numbers, .slots = 2, .pairs = pairs};
    const SpanFormat format{.is_left_out = {}, .step_kind = 9, .saturated_flag = 1, .run_queue_flag = 2};
    std::vector<std::byte> rows;
    for (std::int32_t rank = 0; rank < 2; ++rank) {
        for (std::uint32_t number = 0; number < 40; ++number) {
            add_row(rows, static_cast<std::uint8_t>(1 + (number % 4)), (number * 7) % 11, rank,
                    std::uint64_t{10} * number, 3);
        }
    }
    const std::size_t count = rows.size() / kRankRecordBytes;
    const auto find = [&](std::vector<double>& start) {
        std::vector<double> end(count);
        std::vector<double> duration(count);
        std::vector<double> queue(count);
        std::vector<std::int64_t> rank(count);
        std::vector<std::uint8_t> kind(count);
        std::vector<std::uint8_t> flags(count);
        const SpanColumns columns{.start = start,
                                  .end = end,
                                  .duration = duration,
                                  .queue = queue,
                                  .rank = rank,
                                  .kind = kind,
                                  .flags = flags};
        write_columns(rows, 0, format, columns);
        return match_messages(rows, comms, kinds);
    };
    std::vector<double> start(count);
    const MatchedMessages plain = find(start);
    for (std::size_t number = 2; number < 7; ++number) {
        const Threads threads(number);
        std::vector<double> other_start(count);
        const MatchedMessages other = find(other_start);
        EXPECT_EQ(other_start, start);
        EXPECT_EQ(other.ordinal, plain.ordinal);
        EXPECT_EQ(other.source, plain.source);
        EXPECT_EQ(other.parts, plain.parts);
        EXPECT_EQ(stream_rows(rows, format).rows.size(), count);
    }
}

TEST(SpanColumns, MoveToOtherClocks) {
    std::vector<std::byte> rows;
    add_row(rows, 2, 0, 0, 100);
    std::vector<std::byte> shifted(rows.size());
    const std::vector<std::int64_t> offset{30};
    const std::vector<std::int64_t> none{0};
    shift_starts(rows, {.offset_ns = offset, .device_ns = none, .device_flag = 4, .is_of_host = {}}, shifted);
    std::uint64_t start_ns = 0;
    std::memcpy(&start_ns, shifted.data(), sizeof start_ns);
    EXPECT_EQ(start_ns, 70U);
    EXPECT_THROW(shift_starts(rows, {.offset_ns = {}, .device_ns = {}, .device_flag = 4, .is_of_host = {}}, shifted),
                 std::invalid_argument);
}

}  // namespace
}  // namespace megatronapp::detect
