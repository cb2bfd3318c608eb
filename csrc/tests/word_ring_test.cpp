#include "megatronapp/word_ring.hpp"

#include <gtest/gtest.h>

#include <vector>

namespace megatronapp {
namespace {

class WordRing : public ::testing::TestWithParam<std::uint64_t> {
  protected:
    std::uint64_t capacity_ = GetParam();
    RingCounters counters_{};
    std::vector<Slot<2>> slots_ = std::vector<Slot<2>>(capacity_);
    WordProducer<2> producer_{counters_, slots_.data(), capacity_};
    WordConsumer<2> consumer_{counters_, slots_.data(), capacity_};

    void push(std::uint64_t count) {
        for (std::uint64_t i = 0; i < count; ++i) {
            producer_.push({i, ~i});
        }
    }
};

TEST_P(WordRing, IsEmptyAtFirst) {
    std::vector<Item<2>> out(capacity_);
    EXPECT_EQ(consumer_.copy(0, capacity_, out.data()).count, 0U);
}

TEST_P(WordRing, KeepsTheNewestInOrder) {
    for (const std::uint64_t pushed : {capacity_, capacity_ + 1, 3 * capacity_ + 1}) {
        counters_.claim = counters_.commit = 0;
        producer_ = WordProducer<2>(counters_, slots_.data(), capacity_);
        push(pushed);
        std::vector<Item<2>> out(capacity_);
        const Copied copied = consumer_.copy(0, capacity_, out.data());
        ASSERT_EQ(copied.count, capacity_);
        ASSERT_EQ(copied.first, pushed - capacity_);
        for (std::uint64_t i = 0; i < copied.count; ++i) {
            EXPECT_EQ(out[copied.skipped + i], (Item<2>{copied.first + i, ~(copied.first + i)}));
        }
    }
}

TEST_P(WordRing, GivesUpTheItemWhoseSlotIsBeingWritten) {
    push(2 * capacity_);
    counters_.claim = 2 * capacity_ + 1;  // as left by a producer that stopped before it committed
    std::vector<Item<2>> out(capacity_);
    const Copied copied = consumer_.copy(0, capacity_, out.data());
    EXPECT_EQ(copied.skipped, 1U);
    EXPECT_EQ(copied.first, capacity_ + 1);
    EXPECT_EQ(copied.count, capacity_ - 1);
}

TEST_P(WordRing, GivesUpAllWhenItWasLappedDuringTheCopy) {
    push(capacity_);
    counters_.claim = 9 * capacity_;
    std::vector<Item<2>> out(capacity_);
    EXPECT_EQ(consumer_.copy(0, capacity_, out.data()).count, 0U);
}

TEST_P(WordRing, CopiesNoMoreThanAsked) {
    push(capacity_);
    Item<2> out{};
    EXPECT_EQ(consumer_.copy(capacity_ - 1, 1, &out).count, 1U);
    EXPECT_EQ(out[0], capacity_ - 1);
    EXPECT_EQ(consumer_.copy(capacity_, 1, &out).count, 0U);
}

INSTANTIATE_TEST_SUITE_P(Capacities, WordRing, ::testing::Values(1, 2, 3, 8, 1000));

}  // namespace
}  // namespace megatronapp
