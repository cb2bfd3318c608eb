#include "megatronapp/transport/endpoint.hpp"

#include <gtest/gtest.h>

#include <atomic>
#include <map>
#include <set>
#include <stdexcept>

#include "megatronapp/clock.hpp"
#include "megatronapp/transport/shm/layout.hpp"
#include "ranks.hpp"

namespace megatronapp::transport::testing {
namespace {

class EndpointTest : public TransportTest {};

TEST_F(EndpointTest, MessagesAreReceivedInAnyOrderOfKeys) {
    const Endpoints ranks = connected(2);
    std::vector<Bytes> contents;
    for (std::uint64_t key = 0; key < 4; ++key) {
        contents.push_back(bytes_of(key, key * 20'000));  // of 0 bytes, too
    }
    for (std::uint64_t key = 0; key < 4; ++key) {
        send(*ranks[0], 1, key, contents[key]);
        send(*ranks[1], 0, key, contents[3 - key]);
    }
    for (std::uint64_t key = 4; key-- > 0;) {
        EXPECT_TRUE(holds(ranks[1]->receive(0, key, kLongS), contents[key]));
        EXPECT_TRUE(holds(ranks[0]->receive(1, key, kLongS), contents[3 - key]));
    }
    EXPECT_FALSE(ranks[1]->poll(0, 0));
}

TEST_F(EndpointTest, TakesAllThatHasArrivedOfTheNamedPeers) {
    const Endpoints ranks = connected(3);
    std::map<std::pair<std::uint32_t, std::uint64_t>, Bytes> expected;
    for (std::uint32_t sender = 1; sender < 3; ++sender) {
        for (std::uint64_t key = 0; key < 4; ++key) {
            const Bytes bytes = bytes_of(std::uint64_t{10} * sender + key, 100 * key);
            send(*ranks[sender], 0, key, bytes);
            expected[{sender, key}] = bytes;
        }
    }
    EXPECT_EQ(ranks[0]->receive(2, 3, kLongS).peer(), 2U);
    expected.erase({2, 3});
    EXPECT_EQ(ranks[0]->take_arrived({}).size(), 0U);
    const std::vector<Message> first = ranks[0]->take_arrived({1});
    EXPECT_EQ(first.size(), 4U);
    const std::vector<Message> others = ranks[0]->take_arrived({1, 2});
    EXPECT_EQ(others.size(), 3U);
    EXPECT_EQ(ranks[0]->take_arrived({1, 2}).size(), 0U);
    for (const std::vector<Message>* messages : {&first, &others}) {
        for (const Message& message : *messages) {
            EXPECT_TRUE(holds(message, expected.at({message.peer(), message.key()})));
            expected.erase({message.peer(), message.key()});
        }
    }
    EXPECT_TRUE(expected.empty());
    EXPECT_EQ(ranks[0]->statistics(1).received.transfers, 4U);
    EXPECT_FALSE(ranks[0]->poll(1, 0));
}

TEST_F(EndpointTest, TakesWhatAFailedPeerSentBeforeItsFailureIsRaised) {
    const Endpoints ranks = connected(3);
    send(*ranks[1], 0, 7, bytes_of(1, 100));
    ranks[1]->close(true);
    EXPECT_THROW(static_cast<void>(ranks[0]->receive(1, 8, kLongS)), PeerLostError);
    send(*ranks[2], 0, 9, bytes_of(2, 100));
    EXPECT_EQ(ranks[0]->take_arrived({1, 2}).size(), 2U);
    EXPECT_THROW(static_cast<void>(ranks[0]->take_arrived({1, 2})), PeerLostError);
    EXPECT_EQ(ranks[0]->take_arrived({2}).size(), 0U);
}

TEST_F(EndpointTest, NoFileHasANameOnceRanksAreConnected) {
    const Endpoints ranks = connected(3);
    EXPECT_EQ(names(), std::vector<std::string>());
}

TEST_F(EndpointTest, SendsWithoutCreditWaitInTheQueue) {
    const Endpoints ranks = connected(2);
    const Bytes small = bytes_of(1, 100);
    const Bytes large = bytes_of(2, 50'000);
    for (std::uint64_t key = 0; key < 10; ++key) {
        send(*ranks[0], 1, key, key % 2 == 0 ? small : large);
    }
    std::vector<Message> held;
    for (std::uint64_t key = 0; key < 4; ++key) {
        held.push_back(ranks[1]->receive(0, key, kLongS));
    }
    EXPECT_THROW(static_cast<void>(ranks[1]->receive(0, 4, kShortS)), TransferTimeoutError);
    for (std::uint64_t key = 4; key < 10; ++key) {
        held.erase(held.begin());
        held.push_back(ranks[1]->receive(0, key, kLongS));
        EXPECT_TRUE(holds(held.back(), key % 2 == 0 ? small : large));
    }
}

TEST_F(EndpointTest, TicketsAreCompletedOnceEach) {
    const Bytes bytes = bytes_of(1, 30'000);
    const Endpoints ranks = connected(2);
    std::set<std::uint64_t> expected;
    for (std::uint64_t key = 0; key < 20; ++key) {
        expected.insert(ranks[0]->send(1, key, bytes.data(), key % 3 == 0 ? 10 : bytes.size()));
    }
    for (std::uint64_t key = 0; key < 20; ++key) {
        static_cast<void>(ranks[1]->receive(0, key, kLongS));
    }
    ranks[0]->close(true);
    std::vector<std::uint64_t> completed;
    ranks[0]->take_completed(completed);
    EXPECT_EQ(completed.size(), expected.size());
    EXPECT_EQ(std::set(completed.begin(), completed.end()), expected);
}

TEST_F(EndpointTest, KeyIsFreeAgainOnceItsMessageIsReleased) {
    const Endpoints ranks = connected(2);
    const Bytes bytes = bytes_of(1, 10);
    send(*ranks[0], 1, 7, bytes);
    EXPECT_THROW(send(*ranks[0], 1, 7, bytes), DuplicateKeyError);
    Message message = ranks[1]->receive(0, 7, kLongS);
    EXPECT_THROW(send(*ranks[0], 1, 7, bytes), DuplicateKeyError);
    message.release();
    send(*ranks[0], 1, 7, bytes);
    EXPECT_TRUE(holds(ranks[1]->receive(0, 7, kLongS), bytes));
    send(*ranks[1], 0, 7, bytes);  // the other direction has keys of its own
    EXPECT_TRUE(holds(ranks[0]->receive(1, 7, kLongS), bytes));
}

/// The thread sanitizer reports a race here if such slots are returned without the lock of the peer.
TEST_F(EndpointTest, ThreadsReleaseMessagesOfAHostAfterAStream) {
    const Endpoints ranks = connected(2);
    const Bytes bytes = bytes_of(1, 100);
    std::vector<std::thread> releasing;
    for (std::uint64_t key = 0; key < 8; ++key) {
        send(*ranks[0], 1, key, bytes);
        Message message = ranks[1]->receive(0, key, kLongS);
        releasing.emplace_back([held = std::move(message)]() mutable { held.release_after(DeviceStream{nullptr}); });
    }
    for (std::thread& thread : releasing) {
        thread.join();
    }
    send(*ranks[0], 1, 0, bytes);
    EXPECT_TRUE(holds(ranks[1]->receive(0, 0, kLongS), bytes));
}

TEST_F(EndpointTest, RefusesWhatCannotWork) {
    const Endpoints ranks = connected(2);
    const Bytes bytes = bytes_of(1, 65537);
    EXPECT_THROW(send(*ranks[0], 1, 1, bytes), TransportError);
    EXPECT_THROW(send(*ranks[0], 5, 1, {}), TransportError);
    EXPECT_THROW(ranks[0]->publish(kProgressWords, 1), TransportError);
    EXPECT_THROW(ranks[0]->add_peer(5, true), TransportError);
    EXPECT_THROW(ranks[0]->connect(), TransportError);
    EXPECT_THROW(ranks[0]->append(1, kShortS), TransportError);
    ranks[0]->close(true);
    EXPECT_THROW(send(*ranks[0], 1, 1, {}), TransportError);
    EXPECT_THROW(static_cast<void>(ranks[0]->poll(1, 1)), TransportError);
    ranks[0]->close(true);
}

TEST_F(EndpointTest, TimeoutNamesPeerKeyDirectionAndSeconds) {
    const Endpoints ranks = connected(2);
    try {
        static_cast<void>(ranks[0]->receive(1, 0xABC, 0.01));
        FAIL() << "received a message that was not sent";
    } catch (const TransferTimeoutError& error) {
        EXPECT_EQ(error.timeout.peer, 1U);
        EXPECT_EQ(error.timeout.key, 0xABC);
        EXPECT_STREQ(error.timeout.direction, "receive");
        EXPECT_EQ(error.timeout.seconds, 0.01);
        EXPECT_NE(std::string(error.what()).find("rank 1, key 0xabc: nothing within 0.01 s"), std::string::npos);
    }
}

TEST_F(EndpointTest, SendThatGetsNoSlotWithinTheDeadlineFailsThePeer) {
    Settings impatient = settings(0);
    impatient.deadline_s = 2.0;  // also the deadline to connect, with sanitizers and on a busy machine
    Endpoints ranks;
    ranks.push_back(prepared(impatient, 2));
    ranks.push_back(prepared(settings(1), 2));
    connect(ranks);
    const Bytes bytes = bytes_of(1, 10);
    for (std::uint64_t key = 0; key < 6; ++key) {
        send(*ranks[0], 1, key, bytes);
    }
    try {
        static_cast<void>(ranks[0]->receive(1, 1, kLongS));
        FAIL() << "received a message that was not sent";
    } catch (const TransferTimeoutError& error) {
        EXPECT_STREQ(error.timeout.direction, "send");
        EXPECT_EQ(error.timeout.key, 4U);
    }
    EXPECT_THROW(send(*ranks[0], 1, 9, bytes), TransferTimeoutError);
    std::vector<std::uint64_t> completed;
    ranks[0]->take_completed(completed);
    EXPECT_EQ(completed.size(), 6U);
    EXPECT_THROW(ranks[0]->close(true), TransferTimeoutError);
}

TEST_F(EndpointTest, MessagesOutliveTheEndpointsOfBothSides) {
    Endpoints ranks = connected(2);
    const Bytes bytes = bytes_of(3, 1000);
    send(*ranks[0], 1, 1, bytes);
    Message message = ranks[1]->receive(0, 1, kLongS);
    ranks.clear();
    EXPECT_TRUE(holds(message, bytes));
    message.release();
    EXPECT_TRUE(message.released());
}

TEST_F(EndpointTest, MessagesSentBeforeACloseArrive) {
    const Endpoints ranks = connected(2);
    std::vector<Bytes> contents;
    for (std::uint64_t key = 0; key < 4; ++key) {
        contents.push_back(bytes_of(key, 60'000));
        send(*ranks[0], 1, key, contents.back());
    }
    ranks[0]->close(true);
    EXPECT_THROW(static_cast<void>(ranks[1]->receive(0, 9, kLongS)), PeerLostError);
    for (std::uint64_t key = 0; key < 4; ++key) {
        EXPECT_TRUE(holds(ranks[1]->receive(0, key, kLongS), contents[key]));
    }
    EXPECT_THROW(static_cast<void>(ranks[1]->poll(0, 0)), PeerLostError);
    ranks[1]->close(true);  // with nothing left to send, a closed peer is no failure
}

TEST_F(EndpointTest, StatisticsHaveTheTrueTimesOfTransfers) {
    const Endpoints ranks = connected(2);
    const Bytes bytes = bytes_of(1, 40'000);
    const std::uint64_t before = monotonic_ns();
    constexpr std::uint64_t kCount = kLastTransfers + 10;
    for (std::uint64_t key = 0; key < kCount; ++key) {
        send(*ranks[0], 1, key, bytes);
        const Message message = ranks[1]->receive(0, key, kLongS);
        EXPECT_GE(message.queued_ns(), before);
        EXPECT_LE(message.queued_ns(), message.start_ns());
        EXPECT_LE(message.start_ns(), message.end_ns());
    }
    ranks[0]->close(true);
    const PeerStatistics received = ranks[1]->statistics(0);
    EXPECT_EQ(received.sent.transfers, 0U);
    EXPECT_EQ(received.received.transfers, kCount);
    EXPECT_EQ(received.received.bytes, kCount * 40'000);
    ASSERT_EQ(received.last.size(), kLastTransfers);
    std::uint64_t copy_ns = 0;
    for (std::size_t i = 0; i < kLastTransfers; ++i) {
        const Transfer& transfer = received.last[i];
        EXPECT_EQ(transfer.key, i + 10);
        EXPECT_GE(transfer.start_ns, before);
        EXPECT_GE(transfer.end_ns, transfer.start_ns);
        EXPECT_LE(transfer.end_ns, monotonic_ns());
        copy_ns += transfer.end_ns - transfer.start_ns;
    }
    EXPECT_GE(received.received.copy_ns, copy_ns);
}

TEST_F(EndpointTest, ActivityChangesWithAMessage) {
    const Endpoints ranks = connected(2);
    const std::uint32_t seen = ranks[1]->activity();
    EXPECT_FALSE(ranks[1]->wait_activity(seen, 0.01));
    const Bytes bytes = bytes_of(1, 30'000);
    send(*ranks[0], 1, 5, bytes);
    EXPECT_TRUE(ranks[1]->wait_activity(seen, kLongS));
    EXPECT_TRUE(ranks[1]->poll(0, 5));
}

TEST_F(EndpointTest, ApplicationCanEndItsWaits) {
    Settings common = settings(0);
    std::atomic<bool> signalled = false;
    common.while_waiting = [&] {
        if (signalled) {
            throw std::domain_error("a signal");
        }
    };
    const Endpoints ranks = connected(2, common);
    signalled = true;
    ranks[0]->lead({1});
    EXPECT_THROW(static_cast<void>(ranks[0]->receive(1, 1, kLongS)), std::domain_error);
    EXPECT_THROW(static_cast<void>(ranks[1]->next_entry(0, kLongS)), std::domain_error);
    EXPECT_THROW(ranks[0]->wait_activity(ranks[0]->activity(), kLongS), std::domain_error);
    for (std::uint64_t i = 0; i < kLogEntries; ++i) {
        ranks[0]->append(i, kLongS);  // does not wait
    }
    EXPECT_THROW(ranks[0]->append(0, kLongS), std::domain_error);
    const std::unique_ptr<Endpoint> alone = [&] {
        common.rank = 5;
        return prepared(common, 2);
    }();
    EXPECT_THROW(alone->connect(), std::domain_error);
}

TEST_F(EndpointTest, ProgressWordsHoldTheLastValue) {
    const Endpoints ranks = connected(3);
    EXPECT_EQ(ranks[1]->read(0, 5), 0U);
    for (std::uint64_t value = 1; value < 100; ++value) {
        ranks[0]->publish(5, value << 40U);
    }
    EXPECT_EQ(ranks[1]->read(0, 5), std::uint64_t{99} << 40U);
    EXPECT_EQ(ranks[2]->read(0, 5), std::uint64_t{99} << 40U);
    EXPECT_EQ(ranks[1]->read(0, 4), 0U);
}

TEST_F(EndpointTest, BoardsAloneCarryProgress) {
    Endpoints ranks;
    for (std::uint32_t rank = 0; rank < 2; ++rank) {
        ranks.push_back(std::make_unique<Endpoint>(settings(rank)));
        ranks.back()->add_peer(1 - rank, false);
    }
    connect(ranks);
    ranks[0]->publish(0, 42);
    EXPECT_EQ(ranks[1]->read(0, 0), 42U);
    EXPECT_THROW(send(*ranks[0], 1, 1, {}), TransportError);
    EXPECT_FALSE(ranks[0]->poll(1, 1));
}

class LogTest : public TransportTest {};

TEST_F(LogTest, FollowersReadEveryEntryInOrder) {
    const Endpoints ranks = connected(3);
    constexpr std::uint64_t kCount = 5000;  // several times round the log, with the leader waiting for its followers
    std::vector<std::thread> followers;
    std::array<std::uint64_t, 3> wrong{};
    for (std::uint32_t rank = 1; rank < 3; ++rank) {
        followers.emplace_back([&, rank] {
            for (std::uint64_t i = 0; i < kCount; ++i) {
                wrong[rank] += ranks[rank]->next_entry(0, kLongS) == i * i ? 0U : 1U;
            }
        });
    }
    ranks[0]->lead({1, 2});
    for (std::uint64_t i = 0; i < kCount; ++i) {
        ranks[0]->append(i * i, kLongS);
    }
    for (std::thread& follower : followers) {
        follower.join();
    }
    EXPECT_EQ(wrong, (std::array<std::uint64_t, 3>{}));
    EXPECT_FALSE(ranks[1]->poll_entry(0));
}

TEST_F(LogTest, LeaderWaitsForTheSlowestFollower) {
    const Endpoints ranks = connected(3);
    ranks[0]->lead({1, 2});
    for (std::uint64_t i = 0; i < kLogEntries; ++i) {
        ranks[0]->append(i, kLongS);
        EXPECT_EQ(ranks[1]->next_entry(0, kLongS), i);
    }
    try {
        ranks[0]->append(0, 0.01);
        FAIL() << "an entry that a follower has not read was overwritten";
    } catch (const TransferTimeoutError& error) {
        EXPECT_EQ(error.timeout.peer, 2U);
        EXPECT_FALSE(error.timeout.key);
    }
    EXPECT_EQ(ranks[2]->next_entry(0, kLongS), 0U);
    ranks[0]->append(kLogEntries, kLongS);
    EXPECT_THROW(static_cast<void>(ranks[2]->next_entry(1, 0.01)), TransferTimeoutError);  // rank 1 leads nothing
}

TEST_F(LogTest, LeaderIsWokenOnlyWhileItsLogIsNearlyFull) {
    const Endpoints ranks = connected(2);
    ranks[0]->lead({1});
    for (std::uint64_t i = 0; i < kLogEntries; ++i) {
        ranks[0]->append(i, kLongS);
    }
    const std::uint32_t full = ranks[0]->activity();
    for (std::uint64_t i = 0; i < kLogEntries / 2; ++i) {
        EXPECT_EQ(ranks[1]->next_entry(0, kLongS), i);
    }
    const std::uint32_t half = ranks[0]->activity();
    EXPECT_EQ(half - full, kLogEntries / 2);
    for (std::uint64_t i = kLogEntries / 2; i < kLogEntries; ++i) {
        EXPECT_EQ(ranks[1]->next_entry(0, kLongS), i);
    }
    EXPECT_EQ(ranks[0]->activity(), half);
}

TEST_F(LogTest, FollowerReadsWhatALeaderLeftAndThenItsEnd) {
    const Endpoints ranks = connected(2);
    ranks[0]->lead({1});
    ranks[0]->append(17, kLongS);
    ranks[0]->close(true);
    EXPECT_EQ(ranks[1]->next_entry(0, kLongS), 17U);
    EXPECT_THROW(static_cast<void>(ranks[1]->next_entry(0, kLongS)), PeerLostError);
}

}  // namespace
}  // namespace megatronapp::transport::testing
