#include <gtest/gtest.h>

#include <atomic>
#include <thread>
#include <vector>

#include "megatronapp/ring_reader.hpp"
#include "megatronapp/ring_writer.hpp"
#include "temporary_ring.hpp"

namespace megatronapp::testing {
namespace {

constexpr std::uint64_t kRecords = 300'000;
constexpr int kReaders = 3;

struct Tally {
    std::uint64_t whole = 0;
    std::uint64_t torn = 0;
    std::uint64_t misplaced = 0;
    std::uint64_t lost = 0;
};

void count(RingReader& reader, Tally& tally) {
    const std::uint64_t before = reader.next_index();
    const Batch batch = read_batch(reader, 64);
    for (std::size_t i = 0; i < batch.records.size(); ++i) {
        const bool whole = is_whole(batch.records[i]);
        tally.whole += whole ? 1 : 0;
        tally.torn += whole ? 0 : 1;
        tally.misplaced += batch.records[i][0] != before + batch.lost + i ? 1 : 0;
    }
    tally.lost += batch.lost;
}

class Concurrency : public RingTest, public ::testing::WithParamInterface<std::uint64_t> {};

TEST_P(Concurrency, ReadersNeverSeeATornRecordAndMissNoneUncounted) {
    RingWriter writer(path_, GetParam(), 0, "");
    std::atomic<bool> ended = false;
    std::vector<Tally> tallies(kReaders);
    std::vector<std::thread> readers;
    readers.reserve(kReaders);
    for (Tally& tally : tallies) {
        readers.emplace_back([&] {
            RingReader reader(path_);
            while (!ended.load()) {
                count(reader, tally);
                std::this_thread::yield();
            }
            while (reader.next_index() < kRecords) {
                count(reader, tally);
            }
        });
    }
    for (std::uint64_t i = 0; i < kRecords; ++i) {
        writer.record(span_of(i));
    }
    ended = true;
    for (std::size_t i = 0; i < readers.size(); ++i) {
        readers[i].join();
        EXPECT_EQ(tallies[i].torn, 0U);
        EXPECT_EQ(tallies[i].misplaced, 0U);
        EXPECT_EQ(tallies[i].whole + tallies[i].lost, kRecords);
    }
}

INSTANTIATE_TEST_SUITE_P(Capacities, Concurrency, ::testing::Values(1, 2, 7, 64, 4096));

using Header = RingTest;

TEST_F(Header, OpenSpanAndClockPairsAreNeverMixtures) {
    RingWriter writer(path_, 1, 0, "");
    std::atomic<bool> ended = false;
    std::atomic<std::uint64_t> seen = 0;
    std::uint64_t mixed = 0;
    std::thread watcher([&] {
        const RingReader reader(path_);
        while (!ended.load()) {
            const RingInfo info = reader.info();
            if (info.open_span) {
                mixed += static_cast<std::uint32_t>(info.open_span->start_ns) != info.open_span->step ? 1 : 0;
                seen.fetch_add(1);
            }
            for (std::size_t i = 1; i < info.clock_pairs.size(); ++i) {
                mixed += info.clock_pairs[i].monotonic_ns < info.clock_pairs[i - 1].monotonic_ns ? 1 : 0;
            }
        }
    });
    std::uint64_t i = 0;
    while (i < 20'000 || seen.load() < 100) {
        writer.open_span({.start_ns = i, .step = static_cast<std::uint32_t>(i), .microbatch = 0, .kind = 1});
        writer.clock_pair();
        if (i % 2 == 1) {
            writer.close_span();
            writer.close_span();
        }
        ++i;
    }
    ended = true;
    watcher.join();
    EXPECT_EQ(mixed, 0U);
}

}  // namespace
}  // namespace megatronapp::testing
