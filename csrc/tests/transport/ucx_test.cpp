#include <algorithm>
#include <array>
#include <cstdlib>
#include <random>

#include "ranks.hpp"

namespace megatronapp::transport::testing {
namespace {

Bytes contents(std::uint32_t sender, std::uint64_t key) { return bytes_of(key * 3 + sender, (key * 7919) % 65537); }

/// Sends three messages at a time to each of two peers and receives as many from each, in random order.
void exchange(Endpoint& endpoint, std::uint32_t rank, std::uint64_t batches) {
    std::mt19937_64 order(rank + 1);
    std::deque<Bytes> kept;
    const std::array<std::uint32_t, 2> peers{(rank + 1) % 3, (rank + 2) % 3};
    for (std::uint64_t first = 0; first < 3 * batches; first += 3) {
        std::array<std::uint64_t, 3> keys{first, first + 1, first + 2};
        for (const std::uint64_t key : keys) {
            const Bytes& bytes = kept.emplace_back(contents(rank, key));
            endpoint.send(peers[0], key, bytes.data(), bytes.size());
            endpoint.send(peers[1], key, bytes.data(), bytes.size());
        }
        std::shuffle(keys.begin(), keys.end(), order);
        for (const std::uint64_t key : keys) {
            EXPECT_TRUE(holds(endpoint.receive(peers[0], key, kLongS), contents(peers[0], key)));
            EXPECT_TRUE(holds(endpoint.receive(peers[1], key, kLongS), contents(peers[1], key)));
        }
    }
    endpoint.close(true);
}

/// Ranks of one process, as if on nodes of their own: UCX over TCP of the loopback device.
class UcxTest : public TransportTest {
  protected:
    void SetUp() override {
        const char* path = std::getenv("MEGATRONAPP_UCX_LIBRARY");  // NOLINT(concurrency-mt-unsafe): only read
        if (path == nullptr) {
            GTEST_SKIP() << "MEGATRONAPP_UCX_LIBRARY names no libucp.so.0 (install libucx-cu13)";
        }
        library_ = path;
    }

    [[nodiscard]] Endpoints made(std::uint32_t ranks, Settings common) const {
        Endpoints endpoints;
        std::vector<std::vector<std::byte>> addresses;
        for (std::uint32_t rank = 0; rank < ranks; ++rank) {
            common.rank = rank;
            endpoints.push_back(std::make_unique<Endpoint>(common));
            addresses.push_back(endpoints.back()->open_network(library_, "lo"));
        }
        for (std::uint32_t rank = 0; rank < ranks; ++rank) {
            for (std::uint32_t peer = 0; peer < ranks; ++peer) {
                if (peer != rank) {
                    endpoints[rank]->add_remote_peer(peer, true, addresses[peer]);
                }
            }
        }
        return endpoints;
    }

    [[nodiscard]] Endpoints network(std::uint32_t ranks, const Settings& common) const {
        Endpoints endpoints = made(ranks, common);
        connect(endpoints);
        return endpoints;
    }

    std::string library_;
};

TEST_F(UcxTest, MessagesOfAnySizeArriveInAnyOrderBothWays) {
    Settings common = settings(0);
    common.slot_bytes = 1U << 20U;
    common.slots = 8;
    const Endpoints ranks = network(2, common);
    const std::vector<std::size_t> sizes{0, 1, 4095, 8192, 8193, 65535, 65536, 1U << 20U};
    for (std::size_t i = 0; i < sizes.size(); ++i) {
        send(*ranks[0], 1, i, bytes_of(i, sizes[i]));
        send(*ranks[1], 0, i, bytes_of(i + 100, sizes[i]));
    }
    for (std::size_t i = sizes.size(); i-- > 0;) {
        EXPECT_TRUE(holds(ranks[1]->receive(0, i, kLongS), bytes_of(i, sizes[i])));
        EXPECT_TRUE(holds(ranks[0]->receive(1, i, kLongS), bytes_of(i + 100, sizes[i])));
    }
    const PeerStatistics statistics = ranks[0]->statistics(1);
    EXPECT_STREQ(statistics.path, "ucx");
    EXPECT_EQ(statistics.received.transfers, sizes.size());
    EXPECT_GT(ranks[0]->round_trip_ns(1).value(), 0U);
    ranks[0]->close(true);
    ranks[1]->close(true);
}

TEST_F(UcxTest, CreditsHoldBackASenderUntilMessagesAreReleased) {
    Settings common = settings(0);
    common.slots = 2;
    const Endpoints ranks = network(2, common);
    for (std::uint64_t key = 0; key < 64; ++key) {
        send(*ranks[0], 1, key, bytes_of(key, 65536));
    }
    for (std::uint64_t key = 0; key < 64; ++key) {
        const Message message = ranks[1]->receive(0, key, kLongS);
        EXPECT_TRUE(holds(message, bytes_of(key, 65536)));
        EXPECT_LE(message.queued_ns(), message.start_ns());
        EXPECT_LE(message.start_ns(), message.end_ns());
    }
    ranks[0]->close(true);
}

TEST_F(UcxTest, WordsAndEntriesOfALogArrive) {
    const Endpoints ranks = network(3, settings(0));
    ranks[0]->lead({1, 2});
    ranks[0]->publish(5, 41);
    ranks[0]->publish(5, 42);
    for (std::uint64_t value = 0; value < 3000; ++value) {
        ranks[0]->append(value, kLongS);
        EXPECT_EQ(ranks[1]->next_entry(0, kLongS), value);
        EXPECT_EQ(ranks[2]->next_entry(0, kLongS), value);
    }
    EXPECT_EQ(ranks[1]->read(0, 5), 42U);
    EXPECT_EQ(ranks[1]->read(0, 6), 0U);
    EXPECT_THROW(static_cast<void>(ranks[1]->read(0, 64)), TransportError);
}

TEST_F(UcxTest, SignsOfLifeAreNoActivity) {
    const Endpoints ranks = network(2, settings(0));
    std::uint32_t seen = ranks[0]->activity();
    while (ranks[0]->wait_activity(seen, kShortS)) {
        seen = ranks[0]->activity();
    }
    EXPECT_FALSE(ranks[0]->wait_activity(seen, 1.5));  // there is a sign of life in each second
}

TEST_F(UcxTest, AClosedPeerIsLostAndItsLastMessagesAreNot) {
    const Endpoints ranks = network(2, settings(0));
    send(*ranks[0], 1, 7, bytes_of(7, 65536));
    ranks[0]->close(true);
    EXPECT_TRUE(holds(ranks[1]->receive(0, 7, kLongS), bytes_of(7, 65536)));
    EXPECT_THROW(static_cast<void>(ranks[1]->receive(0, 8, kLongS)), PeerLostError);
}

TEST_F(UcxTest, RanksWithOtherSlotsDoNotConnect) {
    Endpoints ranks;
    Settings common = settings(0);
    ranks.push_back(std::make_unique<Endpoint>(common));
    common.rank = 1;
    common.slots = 5;
    ranks.push_back(std::make_unique<Endpoint>(common));
    const auto first = ranks[0]->open_network(library_, "lo");
    const auto second = ranks[1]->open_network(library_, "lo");
    ranks[0]->add_remote_peer(1, true, second);
    ranks[1]->add_remote_peer(0, true, first);
    EXPECT_THROW(connect(ranks), TransportMismatchError);
}

TEST_F(UcxTest, AnOtherAttemptIsNotHeard) {
    Endpoints ranks;
    Settings common = settings(0);
    common.deadline_s = kShortS;
    ranks.push_back(std::make_unique<Endpoint>(common));
    common.rank = 1;
    common.attempt = 9;
    ranks.push_back(std::make_unique<Endpoint>(common));
    const auto first = ranks[0]->open_network(library_, "lo");
    const auto second = ranks[1]->open_network(library_, "lo");
    ranks[0]->add_remote_peer(1, true, second);
    ranks[1]->add_remote_peer(0, true, first);
    EXPECT_THROW(connect(ranks), TransferTimeoutError);
}

TEST_F(UcxTest, ADeviceThatDoesNotExistIsRefused) {
    Endpoint endpoint(settings(0));
    EXPECT_THROW(static_cast<void>(endpoint.open_network(library_, "nosuch0")), TransportError);
    EXPECT_THROW(static_cast<void>(endpoint.open_network("/nonexistent/libucp.so.0", "")), TransportError);
}

TEST_F(UcxTest, AnyHistoryDeliversEachMessageOnce) {
    Settings common = settings(0);
    common.slots = 3;
    const Endpoints ranks = network(3, common);
    const std::uint64_t batches = full_tests() ? 1000 : 50;
    std::vector<std::thread> threads;
    for (std::uint32_t rank = 0; rank < 3; ++rank) {
        threads.emplace_back([&ranks, rank, batches] { exchange(*ranks[rank], rank, batches); });
    }
    for (std::thread& thread : threads) {
        thread.join();
    }
}

}  // namespace
}  // namespace megatronapp::transport::testing
