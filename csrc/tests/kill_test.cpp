#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <random>

#include "megatronapp/ring_reader.hpp"
#include "megatronapp/ring_writer.hpp"
#include "temporary_ring.hpp"

namespace megatronapp::testing {
namespace {

constexpr std::uint64_t kCapacity = 512;

[[noreturn]] void produce_until_killed(const std::string& path, int ready) {
    RingWriter writer(path, kCapacity, 0, "");
    static_cast<void>(::write(ready, "r", 1));
    for (std::uint64_t i = 0;; ++i) {
        writer.record(span_of(i));
    }
}

class Killed : public RingTest, public ::testing::WithParamInterface<unsigned> {};

TEST_P(Killed, ProducerLeavesAllItsWholeRecords) {
    std::array<int, 2> ready{};
    ASSERT_EQ(::pipe(ready.data()), 0);
    const pid_t child = ::fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
        produce_until_killed(path_, ready[1]);
    }
    char letter = 0;
    ASSERT_EQ(::read(ready[0], &letter, 1), 1);
    RingReader live(path_);
    std::mt19937_64 random(GetParam());
    const std::uint64_t at_least = kCapacity + random() % 5000;
    while (live.info().head < at_least) {
    }
    ASSERT_EQ(::kill(child, SIGKILL), 0);
    ASSERT_EQ(::waitpid(child, nullptr, 0), child);
    ::close(ready[0]);
    ::close(ready[1]);

    RingReader reader(path_);
    const RingInfo info = reader.info();
    const Batch batch = read_batch(reader, kCapacity);
    EXPECT_FALSE(info.closed);
    EXPECT_GE(batch.records.size(), kCapacity - 1);  // the slot it died in may be torn
    EXPECT_EQ(batch.lost + batch.records.size(), info.head);
    for (std::size_t i = 0; i < batch.records.size(); ++i) {
        EXPECT_TRUE(is_whole(batch.records[i]));
        EXPECT_EQ(batch.records[i][0], batch.lost + i);
    }
}

INSTANTIATE_TEST_SUITE_P(Moments, Killed, ::testing::Range(0U, 20U));

}  // namespace
}  // namespace megatronapp::testing
