#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <map>
#include <random>

#include "ranks.hpp"

namespace megatronapp::transport::testing {
namespace {

constexpr std::uint64_t kSlots = 3;
constexpr std::size_t kSlotBytes = 20'000;  // over and under what a sender copies at once
constexpr std::uint64_t kKeys = 12;

/// What a directed pair of ranks should do. Messages get slots in the order of their sends, as slots are free.
class PairModel {
  public:
    struct Sent {
        std::uint64_t key;
        Bytes bytes;
        std::optional<Message> held;
    };

    [[nodiscard]] bool in_flight(std::uint64_t key) const { return find(key) != sent_.size(); }

    /// Whether a message of this key is in a slot and not received.
    [[nodiscard]] bool receivable(std::uint64_t key) const {
        const std::size_t at = find(key);
        return at < std::min<std::size_t>(sent_.size(), kSlots) && !sent_[at].held;
    }

    /// Those that are not released, in the order of their sends.
    [[nodiscard]] std::deque<Sent>& sent() { return sent_; }

    [[nodiscard]] Sent& at(std::uint64_t key) { return sent_[find(key)]; }

  private:
    [[nodiscard]] std::size_t find(std::uint64_t key) const {
        std::size_t at = 0;
        while (at < sent_.size() && sent_[at].key != key) {
            ++at;
        }
        return at;
    }

    std::deque<Sent> sent_;
};

class History : public TransportTest, public ::testing::WithParamInterface<unsigned> {
  protected:
    void begin(std::uint32_t count, std::uint32_t threads) {
        Settings common = settings(0);
        common.slots = kSlots;
        common.slot_bytes = kSlotBytes;
        common.threads = threads;
        ranks_ = connected(count, common);
        for (std::uint32_t sender = 0; sender < count; ++sender) {
            for (std::uint32_t receiver = 0; receiver < count; ++receiver) {
                if (sender != receiver) {
                    pairs_[{sender, receiver}] = {};
                }
            }
        }
    }

    void send_one(std::uint32_t sender, std::uint32_t receiver, std::uint64_t key) {
        PairModel& pair = pairs_.at({sender, receiver});
        Bytes bytes = bytes_of(random_(), random_() % 3 == 0 ? random_() % (kSlotBytes + 1) : random_() % 200);
        if (pair.in_flight(key)) {
            EXPECT_THROW(send(*ranks_[sender], receiver, key, bytes), DuplicateKeyError);
            return;
        }
        pair.sent().push_back({key, std::move(bytes), std::nullopt});
        send(*ranks_[sender], receiver, key, pair.sent().back().bytes);
    }

    void receive_one(std::uint32_t sender, std::uint32_t receiver, std::uint64_t key) {
        PairModel& pair = pairs_.at({sender, receiver});
        if (!pair.receivable(key)) {
            EXPECT_FALSE(ranks_[receiver]->poll(sender, key)) << "key " << key;
            return;
        }
        Message message = ranks_[receiver]->receive(sender, key, kLongS);
        EXPECT_TRUE(holds(message, pair.at(key).bytes)) << "key " << key;
        pair.at(key).held = std::move(message);
    }

    void release_one(PairModel& pair) {
        auto held = std::find_if(pair.sent().begin(), pair.sent().end(),
                                 [](const PairModel::Sent& entry) { return entry.held.has_value(); });
        if (held == pair.sent().end()) {
            return;
        }
        if (random_() % 2 == 0) {
            held->held->release();
        }
        pair.sent().erase(held);
    }

    /// Closes all ranks in turn while their peers take what is left.
    void close_all() {
        for (std::uint32_t sender = 0; sender < ranks_.size(); ++sender) {
            std::thread closing([&] { ranks_[sender]->close(true); });
            for (std::uint32_t receiver = sender + 1; receiver < ranks_.size(); ++receiver) {
                take_all(sender, receiver);
            }
            closing.join();
        }
    }

    void take_all(std::uint32_t sender, std::uint32_t receiver) {
        PairModel& pair = pairs_.at({sender, receiver});
        while (!pair.sent().empty()) {
            const std::uint64_t key = pair.sent().front().key;
            if (!pair.sent().front().held) {
                receive_one(sender, receiver, key);
            }
            pair.sent().pop_front();
        }
    }

    std::mt19937_64 random_{GetParam()};
    Endpoints ranks_;
    std::map<std::pair<std::uint32_t, std::uint32_t>, PairModel> pairs_;
};

TEST_P(History, AgreesWithTheModel) {
    const auto count = static_cast<std::uint32_t>(2 + GetParam() % 2);
    begin(count, 1 + GetParam() % 3);
    for (int step = 0; step < 400; ++step) {
        const auto sender = static_cast<std::uint32_t>(random_() % count);
        const auto receiver = static_cast<std::uint32_t>((sender + 1 + random_() % (count - 1)) % count);
        const std::uint64_t key = random_() % kKeys << 52U | random_() % 2;
        switch (random_() % 5) {
            case 0:
            case 1:
                send_one(sender, receiver, key);
                break;
            case 2:
            case 3:
                receive_one(sender, receiver, key);
                break;
            default:
                release_one(pairs_.at({sender, receiver}));
        }
        if (HasFailure()) {
            GTEST_FAIL() << "in step " << step;
        }
    }
    // Ranks close in turn, from the first: what is for a closed one has to be received before.
    for (std::uint32_t sender = 1; sender < count; ++sender) {
        for (std::uint32_t receiver = 0; receiver < sender; ++receiver) {
            take_all(sender, receiver);
        }
    }
    close_all();
}

INSTANTIATE_TEST_SUITE_P(Seeds, History, ::testing::Range(0U, full_tests() ? 300U : 30U));

}  // namespace
}  // namespace megatronapp::transport::testing
