// Messages that are gathered from parts, over every path.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <random>

#include "cuda_double.hpp"
#include "megatronapp/transport/host/streamed_copy.hpp"
#include "ranks.hpp"

namespace megatronapp::transport::testing {
namespace {

/// A message and the parts that it is sent as.
struct Gathered {
    Bytes contents;
    std::vector<MessagePart> parts;
    std::vector<std::pair<std::uint64_t, std::uint64_t>> covered;  ///< offsets and ends
};

enum class PathKind : std::uint8_t { kHost, kDevice, kOldDriver, kPinned, kNetwork };

class GatherTest : public TransportTest, public ::testing::WithParamInterface<PathKind> {
  protected:
    void SetUp() override {
        Settings common = settings(0);
        common.slot_bytes = kSlotBytes;
        if (GetParam() == PathKind::kNetwork) {
            connect_network(common);
            return;
        }
        if (GetParam() != PathKind::kHost) {
            common.device = 0;
            common.pinned = GetParam() == PathKind::kPinned;
            common.driver = GetParam() == PathKind::kOldDriver ? &old_driver_double() : &driver_double();
        }
        ranks_ = connected(2, common);
    }

    void connect_network(Settings common) {
        const char* path = std::getenv("MEGATRONAPP_UCX_LIBRARY");  // NOLINT(concurrency-mt-unsafe): only read
        if (path == nullptr) {
            GTEST_SKIP() << "MEGATRONAPP_UCX_LIBRARY names no libucp.so.0 (install libucx-cu13)";
        }
        std::vector<std::vector<std::byte>> addresses;
        for (; common.rank < 2; ++common.rank) {
            ranks_.push_back(std::make_unique<Endpoint>(common));
            addresses.push_back(ranks_.back()->open_network(path, "lo"));
        }
        ranks_[0]->add_remote_peer(1, true, addresses[1]);
        ranks_[1]->add_remote_peer(0, true, addresses[0]);
        connect(ranks_);
    }

    /// What the receiver sees of a message, which is released.
    [[nodiscard]] Bytes received(std::uint64_t key) {
        Message message = ranks_[1]->receive(0, key, kLongS);
        Bytes bytes;
        if (message.on_device()) {
            message.wait(stream_.get());
            stream_.copy(bytes, message);
            stream_.synchronize();
        } else {
            bytes.assign(message.data(), message.data() + message.bytes());
        }
        return bytes;
    }

    /// Cuts a message at random places, leaves some of it out, and shuffles the rest; each part has memory of its own.
    [[nodiscard]] Gathered cut(std::size_t bytes, std::size_t most_parts) {
        Gathered message{.contents = bytes_of(random_(), bytes), .parts = {}, .covered = {}};
        std::vector<std::size_t> cuts{0, bytes};
        for (std::size_t i = random_() % most_parts; i > 0; --i) {
            cuts.push_back(random_() % (bytes + 1));  // equal ones make empty parts
        }
        std::sort(cuts.begin(), cuts.end());
        for (std::size_t i = 1; i < cuts.size(); ++i) {
            if (random_() % 4 == 0) {
                continue;
            }
            const auto begin = message.contents.begin() + static_cast<std::ptrdiff_t>(cuts[i - 1]);
            const auto end = message.contents.begin() + static_cast<std::ptrdiff_t>(cuts[i]);
            const Bytes& part = sent_.emplace_back(begin, end);
            message.parts.push_back({part.data(), cuts[i - 1], part.size()});
            message.covered.emplace_back(cuts[i - 1], cuts[i]);
        }
        std::shuffle(message.parts.begin(), message.parts.end(), random_);
        return message;
    }

    static void expect_covered(const Bytes& bytes, const Gathered& message) {
        ASSERT_EQ(bytes.size(), message.contents.size());
        for (const auto& [begin, end] : message.covered) {
            EXPECT_TRUE(std::equal(bytes.data() + begin, bytes.data() + end, message.contents.data() + begin))
                << begin << " to " << end << " of " << bytes.size();
        }
    }

    static constexpr std::uint64_t kSlotBytes = 200'000;

    std::mt19937_64 random_{static_cast<std::uint64_t>(GetParam())};
    ComputeStream stream_;
    Endpoints ranks_;
};

TEST_P(GatherTest, PartsInAnyOrderMakeTheMessage) {
    std::uint64_t key = 0;
    for (int round = 0; round < (full_tests() ? 500 : 60); ++round) {
        std::vector<Gathered> messages;
        for (std::uint64_t i = 0; i < 1 + random_() % 4; ++i) {
            const std::size_t bytes = random_() % 3 == 0 ? random_() % 300 : random_() % (kSlotBytes + 1);
            messages.push_back(cut(bytes, 40));
            ranks_[0]->send_parts(1, key + i, messages.back().parts, bytes);
        }
        for (std::uint64_t i = messages.size(); i-- > 0;) {
            expect_covered(received(key + i), messages[i]);
        }
        key += messages.size();
    }
    std::vector<std::uint64_t> completed;
    ranks_[0]->close(true);
    ranks_[0]->take_completed(completed);
    EXPECT_EQ(completed.size(), key);
}

TEST_P(GatherTest, OnePartIsAsASend) {
    const Bytes bytes = bytes_of(5, 100'000);
    ranks_[0]->send_parts(1, 7, {{bytes.data(), 0, bytes.size()}}, bytes.size());
    EXPECT_THROW(ranks_[0]->send_parts(1, 7, {}, 0), DuplicateKeyError);
    EXPECT_EQ(received(7), bytes);
    const PeerStatistics statistics = ranks_[1]->statistics(0);
    EXPECT_EQ(statistics.received.transfers, 1U);
    EXPECT_EQ(statistics.received.bytes, bytes.size());
    ranks_[0]->close(true);
}

TEST_P(GatherTest, NoPartsMakeAMessageOfItsSize) {
    ranks_[0]->send_parts(1, 1, {}, 0);
    ranks_[0]->send_parts(1, 2, {}, 10'000);
    EXPECT_EQ(received(1).size(), 0U);
    EXPECT_EQ(received(2).size(), 10'000U);
    ranks_[0]->close(true);
}

TEST_P(GatherTest, RefusesPartsThatOverlapOrExceedTheMessage) {
    const Bytes bytes = bytes_of(1, 100);
    const auto refused = [&](const std::vector<MessagePart>& parts, std::uint64_t size) {
        EXPECT_THROW(ranks_[0]->send_parts(1, 1, parts, size), TransportError) << size;
    };
    refused({{bytes.data(), 50, 50}, {bytes.data(), 0, 51}}, 100);
    refused({{bytes.data(), 0, 100}}, 99);
    refused({{bytes.data(), 101, 1}}, 100);
    refused({{bytes.data(), ~0ULL, 2}}, 100);
    refused({{bytes.data(), 0, 1}}, kSlotBytes + 1);
    ranks_[0]->send_parts(1, 1, {{bytes.data() + 40, 40, 60}, {bytes.data(), 0, 40}}, 100);  // the key was not used up
    EXPECT_EQ(received(1), bytes);
    ranks_[0]->close(true);
}

TEST_P(GatherTest, MessagesWithoutACreditWait) {
    std::deque<Gathered> messages;
    for (std::uint64_t key = 0; key < 12; ++key) {
        messages.push_back(cut(kSlotBytes, 10));
        ranks_[0]->send_parts(1, key, messages.back().parts, kSlotBytes);
    }
    for (std::uint64_t key = 0; key < 12; ++key) {
        expect_covered(received(key), messages[key]);
    }
    ranks_[0]->close(true);
}

std::string name_of(const ::testing::TestParamInfo<PathKind>& tested) {
    constexpr std::array<const char*, 5> kNames{"Host", "Device", "OldDriver", "Pinned", "Network"};
    return kNames.at(static_cast<std::size_t>(tested.param));
}

INSTANTIATE_TEST_SUITE_P(Paths, GatherTest,
                         ::testing::Values(PathKind::kHost, PathKind::kDevice, PathKind::kOldDriver, PathKind::kPinned,
                                           PathKind::kNetwork),
                         name_of);

class StreamedGather : public TransportTest {};

TEST_F(StreamedGather, SmallPartsOfALargeMessageArriveUnchanged) {
    Settings common = settings(0);
    common.slot_bytes = kStreamedBytes + 1000;
    const Endpoints ranks = connected(2, common);
    const Bytes bytes = bytes_of(9, common.slot_bytes);
    std::vector<MessagePart> parts;
    std::uint64_t length = 1;
    for (std::uint64_t offset = 0; offset < bytes.size(); offset += length) {
        length = std::min<std::uint64_t>(1 + 3 * offset / 2, bytes.size() - offset);  // also at odd addresses
        parts.push_back({bytes.data() + offset, offset, length});
    }
    ranks[0]->send_parts(1, 1, parts, bytes.size());
    EXPECT_TRUE(holds(ranks[1]->receive(0, 1, kLongS), bytes));
    ranks[0]->close(true);
}

}  // namespace
}  // namespace megatronapp::transport::testing
