#include <gtest/gtest.h>

#include <atomic>
#include <random>

#include "megatronapp/clock.hpp"
#include "megatronapp/transport/shm/layout.hpp"
#include "ranks.hpp"
#include "shared_words.hpp"

namespace megatronapp::transport::testing {
namespace {

constexpr std::uint64_t kSlots = 4;
constexpr std::uint64_t kSlotBytes = 512;

class Corruption : public TransportTest, public ::testing::WithParamInterface<unsigned> {
  protected:
    /// Two connected ranks, rank 0 the leader of a log; the areas are those of both boards and inboxes.
    void begin() {
        Settings common = settings(0);
        common.slots = kSlots;
        common.slot_bytes = kSlotBytes;
        for (std::uint32_t rank = 0; rank < 2; ++rank) {
            common.rank = rank;
            ranks_.push_back(prepared(common, 2));
        }
        for (const std::string& name : names()) {
            const bool board = name.ends_with("board");
            areas_.emplace_back(directory_ + "/" + name,
                                board ? sizeof(BoardLayout) : InboxLayout::of(kSlots, kSlotBytes).data);
            ASSERT_TRUE(areas_.back().valid());
        }
        ASSERT_EQ(areas_.size(), 4U);
        connect(ranks_);
        ranks_[0]->lead({1});
    }

    /// One message each way, one entry of the log and one progress word.
    void exchange(std::uint64_t key) {
        const Bytes bytes = bytes_of(key, kSlotBytes);
        for (std::uint32_t rank = 0; rank < 2; ++rank) {
            send(*ranks_[rank], 1 - rank, key, bytes);
        }
        for (std::uint32_t rank = 0; rank < 2; ++rank) {
            const Message message = ranks_[rank]->receive(1 - rank, key, 0.2);
            EXPECT_TRUE(holds(message, bytes));
        }
        ranks_[0]->append(key, 0.2);
        EXPECT_EQ(ranks_[1]->next_entry(0, 0.2), key);
        ranks_[0]->publish(1, key);
        static_cast<void>(ranks_[1]->read(0, 1));
    }

    /// Whether the ranks went on; nothing but a typed error ends them.
    bool survives(std::uint64_t first, std::uint64_t exchanges) {
        try {
            for (std::uint64_t key = first; key < first + exchanges; ++key) {
                exchange(key);
            }
        } catch (const TransportCorruptError&) {
            return false;
        } catch (const TransferTimeoutError&) {  // a count that was written back hides a message
            return false;
        } catch (const DuplicateKeyError&) {  // the return of an earlier slot was hidden
            return false;
        }
        return true;
    }

    void damage(std::mt19937_64& random) {
        const SharedWords& area = areas_[random() % areas_.size()];
        // Half of the damage goes to the counts and states, which are few.
        Word& word = area.word(random() % (random() % 2 == 0 ? 64 : area.count()));
        word.store(random() % 2 == 0 ? random() : random() % 8, std::memory_order_relaxed);
    }

    Endpoints ranks_;
    std::vector<SharedWords> areas_;
};

TEST_P(Corruption, RandomWordsEndInTypedErrors) {
    begin();
    std::mt19937_64 random(GetParam());
    std::atomic<bool> stop = false;
    std::thread damaging([&] {
        while (!stop.load()) {
            damage(random);
            std::this_thread::yield();
        }
    });
    static_cast<void>(survives(0, 300));
    stop.store(true);
    damaging.join();
    for (const std::unique_ptr<Endpoint>& rank : ranks_) {
        rank->close(false);
    }
}

INSTANTIATE_TEST_SUITE_P(Seeds, Corruption, ::testing::Range(0U, full_tests() ? 200U : 15U));

class Damage : public Corruption {};

TEST_F(Damage, OfAnAnnouncementIsRefused) {
    begin();
    ASSERT_TRUE(survives(0, 3));
    const Bytes bytes = bytes_of(9, 100);
    send(*ranks_[0], 1, 9, bytes);
    for (const SharedWords& area : areas_) {
        if (area.count() * sizeof(Word) == InboxLayout::of(kSlots, kSlotBytes).data) {
            // Entry 3 of each inbox; the one that nobody has written yet stays as it is.
            Word& word = area.word((sizeof(InboxHeader) + 3 * sizeof(Announcement)) / sizeof(Word) + 1);
            word.store(word.load() + 1);
        }
    }
    EXPECT_THROW(static_cast<void>(ranks_[1]->receive(0, 9, kLongS)), TransportCorruptError);
    EXPECT_THROW(static_cast<void>(ranks_[1]->poll(0, 9)), TransportCorruptError);
    EXPECT_THROW(send(*ranks_[1], 0, 10, bytes), TransportCorruptError);
}

TEST_F(Damage, OfACountIsRefused) {
    begin();
    for (const SharedWords& area : areas_) {
        if (area.count() * sizeof(Word) == InboxLayout::of(kSlots, kSlotBytes).data) {
            area.word(offsetof(InboxHeader, announced) / sizeof(Word)).store(1000);
        }
    }
    try {
        static_cast<void>(ranks_[1]->poll(0, 9));
        FAIL() << "believed a count of 1,000 messages in 4 slots";
    } catch (const TransportCorruptError& error) {
        EXPECT_NE(std::string(error.what()).find("1000 entries after 0, of 4 places"), std::string::npos)
            << error.what();
    }
}

TEST_F(Damage, OfTheTimesOfACopyIsRefused) {
    begin();
    // Entries with a right check: what a peer with a defect, or another program, writes.
    const std::uint64_t now_ns = monotonic_ns();
    std::vector<RingEntry<kAnnouncementWords>> refused{{9, 100, 0, now_ns, now_ns - 1, now_ns},
                                                       {9, 100, 0, now_ns, now_ns + 3'600'000'000'000, now_ns}};
    for (const SharedWords& area : areas_) {
        if (area.count() * sizeof(Word) != InboxLayout::of(kSlots, kSlotBytes).data) {
            continue;
        }
        auto& header = *reinterpret_cast<InboxHeader*>(area.data());
        auto* entries =
            reinterpret_cast<Announcement*>(area.data() + InboxLayout::of(kSlots, kSlotBytes).announcements);
        CheckedWriter<kAnnouncementWords>(&header.announced, entries, kSlots).push(refused.back());
        refused.pop_back();
    }
    for (std::uint32_t rank = 0; rank < 2; ++rank) {
        EXPECT_THROW(static_cast<void>(ranks_[rank]->poll(1 - rank, 9)), TransportCorruptError);
    }
}

TEST_F(Damage, OfABoardIsRefused) {
    begin();
    for (const SharedWords& area : areas_) {
        area.word(offsetof(BoardLayout, state) / sizeof(Word)).store(77);
    }
    // The state of a board is examined by each rank's own thread.
    EXPECT_THROW(static_cast<void>(ranks_[1]->receive(0, 9, kLongS)), TransportCorruptError);
}

TEST_F(Damage, OfACursorIsRefused) {
    begin();
    ASSERT_TRUE(survives(0, 3));
    for (const SharedWords& area : areas_) {
        if (area.count() * sizeof(Word) == sizeof(BoardLayout) / sizeof(Word) * sizeof(Word)) {
            area.word((offsetof(BoardLayout, followers) + offsetof(Follower, cursor)) / sizeof(Word)).store(1000);
        }
    }
    EXPECT_THROW(ranks_[0]->append(1, kLongS), TransportCorruptError);
}

}  // namespace
}  // namespace megatronapp::transport::testing
