#include "megatronapp/transport/cuda/cuda_path.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <random>

#include "cuda_double.hpp"
#include "megatronapp/clock.hpp"
#include "megatronapp/transport/shm/layout.hpp"
#include "ranks.hpp"

namespace megatronapp::transport::testing {
namespace {

constexpr cuda::Result kOutOfMemory = 2;

class CudaPathTest : public TransportTest, public ::testing::WithParamInterface<bool> {
  protected:
    CudaPathTest() : before_(taken()) {}

    void TearDown() override { EXPECT_EQ(taken(), before_); }

    [[nodiscard]] Settings on_device() const {
        Settings common = settings(0);
        common.device = 0;
        common.pinned = GetParam();
        common.driver = &driver_double();
        return common;
    }

    [[nodiscard]] Endpoints connected_devices() const { return connected(2, on_device()); }

    void send_after(const ComputeStream& stream, Endpoint& endpoint, std::uint64_t key, const Bytes& bytes) {
        const Bytes& kept = sent_.emplace_back(bytes);
        endpoint.send(1 - endpoint.settings().rank, key, kept.data(), kept.size(), stream.get());
    }

    /// The message once it is announced.
    [[nodiscard]] static Message await_posted(Endpoint& endpoint, std::uint64_t key) {
        while (true) {
            const std::uint32_t seen = endpoint.activity();
            if (std::optional<Message> message = endpoint.poll_posted(1 - endpoint.settings().rank, key)) {
                return std::move(*message);
            }
            endpoint.wait_activity(seen, kLongS);
        }
    }

  private:
    const Taken before_;
};

TEST_P(CudaPathTest, MessagesAreReceivedInAnyOrderOfKeys) {
    const Endpoints ranks = connected_devices();
    const ComputeStream stream;
    std::vector<Bytes> contents;
    for (std::uint64_t key = 0; key < 4; ++key) {
        contents.push_back(bytes_of(key, key * 20'000));  // of 0 bytes, too
        send(*ranks[0], 1, key, contents[key]);
        send_after(stream, *ranks[1], key, contents[key]);
    }
    Bytes received;
    for (std::uint64_t key = 4; key-- > 0;) {
        for (std::uint32_t rank = 0; rank < 2; ++rank) {
            Message message = ranks[rank]->receive(1 - rank, key, kLongS);
            EXPECT_TRUE(message.complete());
            message.wait(stream.get());
            stream.copy(received, message);
            stream.synchronize();
            EXPECT_EQ(received, contents[key]);
        }
    }
    EXPECT_FALSE(ranks[0]->poll_posted(1, 0));
    EXPECT_STREQ(ranks[0]->statistics(1).path, GetParam() ? "pinned host memory" : "CUDA IPC");
}

TEST_P(CudaPathTest, StreamWaitsForAMessageThatIsOnItsWay) {
    const Endpoints ranks = connected_devices();
    ComputeStream producing;
    const ComputeStream consuming;
    const Bytes bytes = bytes_of(1, 50'000);
    producing.close_gate();
    send_after(producing, *ranks[0], 7, bytes);
    Message message = await_posted(*ranks[1], 7);
    EXPECT_FALSE(message.complete());
    EXPECT_FALSE(message.times());
    EXPECT_FALSE(ranks[1]->poll(0, 7));  // it was taken
    message.wait(consuming.get());
    Bytes received;
    consuming.copy(received, message);
    message.release_after(consuming.get());
    EXPECT_TRUE(message.released());
    EXPECT_THROW(send(*ranks[0], 1, 7, bytes), DuplicateKeyError);
    producing.open();
    consuming.synchronize();
    EXPECT_EQ(received, bytes);
    while (ranks[0]->statistics(1).sent.transfers == 0) {  // its own thread still has to see the end of the copy
        std::this_thread::yield();
    }
    send(*ranks[0], 1, 7, bytes);  // the stream has returned the slot
    EXPECT_GT(ranks[1]->receive(0, 7, kLongS).end_ns(), 0U);
}

TEST_P(CudaPathTest, SlotsReturnInTheOrderOfTheReceiversStream) {
    const Endpoints ranks = connected_devices();
    ComputeStream consuming;
    std::vector<Bytes> contents;
    for (std::uint64_t key = 0; key < 6; ++key) {
        contents.push_back(bytes_of(key, 30'000));
        send(*ranks[0], 1, key, contents.back());
    }
    consuming.close_gate();
    std::vector<Bytes> received(6);
    for (std::uint64_t key = 0; key < 4; ++key) {
        Message message = ranks[1]->receive(0, key, kLongS);
        message.wait(consuming.get());
        consuming.copy(received[key], message);
        message.release_after(consuming.get());
    }
    EXPECT_THROW(static_cast<void>(ranks[1]->receive(0, 4, kShortS)), TransferTimeoutError);
    consuming.open();
    for (std::uint64_t key = 4; key < 6; ++key) {
        Message message = ranks[1]->receive(0, key, kLongS);
        message.wait(consuming.get());
        consuming.copy(received[key], message);
        message.release_after(consuming.get());
    }
    consuming.synchronize();
    EXPECT_EQ(received, contents);
}

TEST_P(CudaPathTest, TicketsAreCompletedWhenTheirCopiesHaveEnded) {
    const Endpoints ranks = connected_devices();
    ComputeStream producing;
    const Bytes bytes = bytes_of(1, 50'000);
    producing.close_gate();
    send_after(producing, *ranks[0], 1, bytes);
    std::vector<std::uint64_t> completed;
    EXPECT_THROW(static_cast<void>(ranks[1]->receive(0, 1, kShortS)), TransferTimeoutError);
    ranks[0]->take_completed(completed);
    EXPECT_TRUE(completed.empty());
    producing.open();
    const std::uint64_t before = monotonic_ns();
    const Message message = ranks[1]->receive(0, 1, kLongS);
    ranks[0]->close(true);
    ranks[0]->take_completed(completed);
    EXPECT_EQ(completed.size(), 1U);
    const std::uint64_t tolerance_ns = 50'000'000;  // of the origin of the clock of events, on a busy machine
    EXPECT_GE(message.start_ns() + tolerance_ns, before);
    EXPECT_GE(message.end_ns(), message.start_ns());
    EXPECT_LE(message.end_ns(), monotonic_ns());
}

TEST_P(CudaPathTest, WaitsOfStreamsEndWhenThePeerIsLost) {
    Endpoints ranks = connected_devices();
    ComputeStream producing;
    const ComputeStream consuming;
    const Bytes bytes = bytes_of(1, 1000);
    producing.close_gate();
    send_after(producing, *ranks[0], 1, bytes);
    send_after(producing, *ranks[0], 2, bytes);
    Message message = await_posted(*ranks[1], 1);
    message.wait(consuming.get());
    std::thread closing([&] { ranks[0]->close(false); });
    consuming.synchronize();
    EXPECT_THROW(static_cast<void>(message.complete()), PeerLostError);
    EXPECT_THROW(message.wait(consuming.get()), PeerLostError);
    EXPECT_THROW(static_cast<void>(ranks[1]->poll_posted(0, 2)), PeerLostError);
    producing.open();
    closing.join();
}

TEST_P(CudaPathTest, FullStreamDoesNotKeepTheWaitsForALostPeerFromEnding) {
    Endpoints ranks = connected_devices();
    ComputeStream producing;
    const ComputeStream consuming;
    const Bytes bytes = bytes_of(1, 1000);
    producing.close_gate();
    send_after(producing, *ranks[0], 1, bytes);
    Message message = await_posted(*ranks[1], 1);
    message.wait(consuming.get());
    Bytes received;
    std::thread filling([&] {
        for (int i = 0; i < 3000; ++i) {
            consuming.copy(received, message);
            ranks[1]->publish_after(consuming.get(), 0, 1);
        }
        message.release_after(consuming.get());
    });
    std::thread closing([&] { ranks[0]->close(false); });
    filling.join();
    consuming.synchronize();
    EXPECT_THROW(static_cast<void>(ranks[1]->poll(0, 1)), PeerLostError);
    producing.open();
    closing.join();
}

TEST_P(CudaPathTest, TimesOfEveryMessageStayKnownWhenItsSlotIsUsedAgain) {
    const Endpoints ranks = connected_devices();
    const ComputeStream stream;
    std::vector<Message> messages;
    for (std::uint64_t key = 0; key < 20; ++key) {  // five for each slot
        send_after(stream, *ranks[0], key, bytes_of(key, 5000));
        messages.push_back(await_posted(*ranks[1], key));
        messages.back().wait(stream.get());
        messages.back().release_after(stream.get());
    }
    ranks[0]->close(true);
    for (const Message& message : messages) {
        const std::optional<CopyTimes> times = message.times();
        ASSERT_TRUE(times) << "key " << message.key();
        EXPECT_LE(message.queued_ns(), times->start_ns);
        EXPECT_LE(times->start_ns, times->end_ns);
    }
    const PeerStatistics received = ranks[1]->statistics(0);
    EXPECT_EQ(received.received.transfers, 20U);
}

TEST_P(CudaPathTest, AnnouncedMessagesAreListedUntilTheyAreTaken) {
    const Endpoints ranks = connected_devices();
    ComputeStream producing;
    producing.close_gate();
    send_after(producing, *ranks[0], 1, bytes_of(1, 1000));
    while (ranks[1]->posted(0).empty()) {
        ranks[1]->wait_activity(ranks[1]->activity(), 0.01);
    }
    EXPECT_EQ(ranks[1]->posted(0), std::vector<std::uint64_t>{1});
    producing.open();
    producing.synchronize();
    ranks[0]->close(true);
    EXPECT_EQ(ranks[1]->posted(0), std::vector<std::uint64_t>{1});  // it has landed, and nobody has taken it
    EXPECT_TRUE(ranks[1]->receive(0, 1, kLongS).complete());
    EXPECT_THROW(while (ranks[1]->posted(0).empty()) ranks[1]->wait_activity(ranks[1]->activity(), 0.01),
                 PeerLostError);
}

TEST_P(CudaPathTest, WaitsOfStreamsEndWhenThisRankCloses) {
    Endpoints ranks = connected_devices();
    ComputeStream producing;
    const ComputeStream consuming;
    producing.close_gate();
    send_after(producing, *ranks[0], 1, bytes_of(1, 1000));
    Message message = await_posted(*ranks[1], 1);
    message.wait(consuming.get());
    ranks[1]->close(false);
    consuming.synchronize();
    message.release_after(consuming.get());
    producing.open();
}

TEST_P(CudaPathTest, FailureOfTheDeviceIsTheSendersError) {
    const Endpoints ranks = connected_devices();
    fail_next("cuMemcpyAsync", kOutOfMemory);
    send(*ranks[0], 1, 1, bytes_of(1, 1000));
    try {
        send(*ranks[0], 1, 2, {});
        FAIL() << "a failed copy was forgotten";
    } catch (const TransportError& error) {
        EXPECT_NE(std::string(error.what()).find("cuMemcpyAsync failed with CUDA_ERROR_OF_THE_DOUBLE (2)"),
                  std::string::npos)
            << error.what();
    }
    std::vector<std::uint64_t> completed;
    ranks[0]->take_completed(completed);
    EXPECT_EQ(completed.size(), 1U);
    EXPECT_THROW(ranks[0]->close(true), TransportError);
}

TEST_P(CudaPathTest, FailureOfABatchOfCopiesIsTheSendersError) {
    const Endpoints ranks = connected_devices();
    const Bytes bytes = bytes_of(1, 3000);
    fail_next("cuMemcpyBatchAsync", kOutOfMemory);
    const std::vector<MessagePart> parts{{bytes.data(), 0, 1000}, {bytes.data() + 1000, 1000, 2000}};
    const std::uint64_t ticket = ranks[0]->send_parts(1, 1, parts, bytes.size());
    std::vector<std::uint64_t> completed;
    while (completed.empty()) {
        std::this_thread::yield();
        ranks[0]->take_completed(completed);
    }
    EXPECT_EQ(completed, std::vector<std::uint64_t>{ticket});
    EXPECT_THROW(static_cast<void>(ranks[1]->receive(0, 1, kShortS)), TransferTimeoutError);
    EXPECT_THROW(send(*ranks[0], 1, 2, {}), TransportError);
    EXPECT_THROW(ranks[0]->close(true), TransportError);
}

TEST_P(CudaPathTest, MemoryOfAFailedMessageIsKeptUntilTheCopiesOfItsPartsHaveEnded) {
    Settings common = on_device();
    common.driver = &old_driver_double();
    const Endpoints ranks = connected(2, common);
    ComputeStream producing;
    const Bytes bytes = bytes_of(1, 3000);
    producing.close_gate();
    fail_next("cuMemcpyAsync", kOutOfMemory, 1);
    const std::vector<MessagePart> parts{{bytes.data(), 0, 1000}, {bytes.data() + 1000, 1000, 2000}};
    const std::uint64_t ticket = ranks[0]->send_parts(1, 1, parts, bytes.size(), producing.get());
    std::vector<std::uint64_t> completed;
    EXPECT_THROW(static_cast<void>(ranks[1]->receive(0, 1, kShortS)), TransferTimeoutError);
    ranks[0]->take_completed(completed);
    EXPECT_TRUE(completed.empty());
    producing.open();
    while (completed.empty()) {
        std::this_thread::yield();
        ranks[0]->take_completed(completed);
    }
    EXPECT_EQ(completed, std::vector<std::uint64_t>{ticket});
    EXPECT_THROW(send(*ranks[0], 1, 2, {}), TransportError);
    EXPECT_THROW(ranks[0]->close(true), TransportError);
}

TEST_P(CudaPathTest, ProgressIsPublishedInTheOrderOfAStream) {
    const Endpoints ranks = connected_devices();
    ComputeStream stream;
    stream.close_gate();
    ranks[0]->publish_after(stream.get(), 3, 17);
    EXPECT_EQ(ranks[1]->read(0, 3), 0U);
    stream.open();
    stream.synchronize();
    EXPECT_EQ(ranks[1]->read(0, 3), 17U);
    EXPECT_THROW(ranks[0]->publish_after(stream.get(), kProgressWords, 1), TransportError);
}

TEST_P(CudaPathTest, MessagesOutliveTheEndpointsOfBothSides) {
    Endpoints ranks = connected_devices();
    const ComputeStream stream;
    const Bytes bytes = bytes_of(3, 1000);
    send(*ranks[0], 1, 1, bytes);
    Message message = ranks[1]->receive(0, 1, kLongS);
    message.wait(stream.get());
    Bytes received;
    stream.copy(received, message);
    ranks.clear();
    stream.synchronize();
    EXPECT_EQ(received, bytes);
    message.release_after(stream.get());
}

TEST_P(CudaPathTest, RefusesADeviceThatDoesNotExist) {
    Settings missing = on_device();
    missing.device = 7;
    EXPECT_THROW(Endpoint{missing}, cuda::CudaError);
}

TEST_P(CudaPathTest, ARankWithoutMemoryForItsSlotsSaysSoAndItsPeerLearnsOfIt) {
    Endpoints ranks;
    for (std::uint32_t rank = 0; rank < 2; ++rank) {
        Settings given = on_device();
        given.rank = rank;
        ranks.push_back(prepared(given, 2));
    }
    fail_next("cuMemAlloc", kOutOfMemory);
    std::atomic<int> without_memory = 0;
    std::atomic<int> victims = 0;
    std::vector<std::thread> threads;
    for (const std::unique_ptr<Endpoint>& rank : ranks) {
        threads.emplace_back([&] {
            try {
                rank->connect();
            } catch (const cuda::CudaError& error) {
                without_memory += error.function == "cuMemAlloc" && error.code == kOutOfMemory ? 1 : 0;
            } catch (const PeerLostError&) {
                ++victims;
            }
        });
    }
    for (std::thread& thread : threads) {
        thread.join();
    }
    EXPECT_EQ(without_memory, 1);
    EXPECT_EQ(victims, 1);
}

TEST_P(CudaPathTest, HostMemoryHasNoStreams) {
    const Endpoints ranks = connected(2);
    const Bytes bytes = bytes_of(1, 10);
    EXPECT_THROW(ranks[0]->send(1, 1, bytes.data(), bytes.size(), DeviceStream{nullptr}), TransportError);
    send(*ranks[0], 1, 1, bytes);  // the key was not used up
    EXPECT_THROW(ranks[1]->receive(0, 1, kLongS).wait({nullptr}), TransportError);
    EXPECT_THROW(ranks[0]->publish_after({nullptr}, 0, 1), TransportError);
}

TEST_P(CudaPathTest, RandomHistoriesDeliverEveryMessageWhole) {
    std::mt19937_64 random(GetParam() ? 1 : 2);
    const Endpoints ranks = connected_devices();
    const ComputeStream producing;
    const ComputeStream consuming;
    for (std::uint64_t round = 0; round < 40; ++round) {
        std::vector<Bytes> contents;
        std::vector<std::uint64_t> keys;
        for (std::uint64_t i = 0; i < 1 + random() % 8; ++i) {
            contents.push_back(bytes_of(random(), random() % 65'536));
            keys.push_back(i);
            send_after(producing, *ranks[round % 2], 100 * round + i, contents.back());
        }
        std::vector<Bytes> received(contents.size());
        // Messages beyond the slots arrive once others are returned, so these are taken in order.
        std::shuffle(keys.begin(), keys.begin() + static_cast<long>(std::min<std::size_t>(4, keys.size())), random);
        for (const std::uint64_t key : keys) {
            Endpoint& receiver = *ranks[1 - round % 2];
            Message message = random() % 2 == 0
                                  ? await_posted(receiver, 100 * round + key)
                                  : receiver.receive(static_cast<std::uint32_t>(round % 2), 100 * round + key, kLongS);
            message.wait(consuming.get());
            consuming.copy(received[key], message);
            message.release_after(consuming.get());
        }
        consuming.synchronize();
        EXPECT_EQ(received, contents) << "round " << round;
    }
}

INSTANTIATE_TEST_SUITE_P(Slots, CudaPathTest, ::testing::Bool(),
                         [](const auto& tested) { return tested.param ? "Pinned" : "Device"; });

}  // namespace
}  // namespace megatronapp::transport::testing
