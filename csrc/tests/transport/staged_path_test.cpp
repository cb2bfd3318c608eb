// Ranks with a device and ranks without one, and devices whose ranks share no memory.
#include "megatronapp/transport/cuda/staged_path.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <random>

#include "cuda_double.hpp"
#include "megatronapp/clock.hpp"
#include "ranks.hpp"

namespace megatronapp::transport::testing {
namespace {

constexpr cuda::Result kFailed = 2;

enum class Pair : std::uint8_t { kHostAndDevice, kDeviceAndHost, kDevicesOverNetwork, kDeviceOverNetworkAndHost };

class StagedPathTest : public TransportTest, public ::testing::WithParamInterface<Pair> {
  protected:
    StagedPathTest() : before_(taken()) {}

    void SetUp() override { connect_ranks(); }

    void TearDown() override {
        ranks_.clear();
        EXPECT_EQ(taken(), before_);
    }

    [[nodiscard]] static bool is_network() {
        return GetParam() == Pair::kDevicesOverNetwork || GetParam() == Pair::kDeviceOverNetworkAndHost;
    }

    [[nodiscard]] static bool on_device(std::uint32_t rank) {
        return GetParam() == Pair::kDevicesOverNetwork || (GetParam() == Pair::kHostAndDevice ? rank == 1 : rank == 0);
    }

    [[nodiscard]] Settings settings_of(std::uint32_t rank) const {
        Settings given = settings(rank);
        if (on_device(rank)) {
            given.device = 0;
            given.driver = &driver_double();
        }
        return given;
    }

    void connect_ranks() {
        if (!is_network()) {
            for (std::uint32_t rank = 0; rank < 2; ++rank) {
                ranks_.push_back(prepared(settings_of(rank), 2));
            }
            connect(ranks_);
            return;
        }
        const char* path = std::getenv("MEGATRONAPP_UCX_LIBRARY");  // NOLINT(concurrency-mt-unsafe): only read
        if (path == nullptr) {
            GTEST_SKIP() << "MEGATRONAPP_UCX_LIBRARY names no libucp.so.0 (install libucx-cu13)";
        }
        std::vector<std::vector<std::byte>> addresses;
        for (std::uint32_t rank = 0; rank < 2; ++rank) {
            ranks_.push_back(std::make_unique<Endpoint>(settings_of(rank)));
            addresses.push_back(ranks_.back()->open_network(path, "lo"));
        }
        ranks_[0]->add_remote_peer(1, true, addresses[1]);
        ranks_[1]->add_remote_peer(0, true, addresses[0]);
        connect(ranks_);
    }

    /// Sends from the stream of a rank with a device, and from memory of one without.
    std::uint64_t send_from(std::uint32_t rank, std::uint64_t key, const Bytes& bytes) {
        const Bytes& kept = sent_.emplace_back(bytes);
        const auto stream = on_device(rank) ? std::optional(producing_.get()) : std::nullopt;
        return ranks_[rank]->send(1 - rank, key, kept.data(), kept.size(), stream);
    }

    /// What the stream of a rank reads of a message, which is returned in its order; whole after `synchronize`.
    void read(std::uint32_t rank, std::uint64_t key, Bytes& bytes) {
        Message message = ranks_[rank]->receive(1 - rank, key, kLongS);
        EXPECT_EQ(message.on_device(), on_device(rank));
        EXPECT_TRUE(message.complete());
        EXPECT_LE(message.queued_ns(), message.start_ns());
        EXPECT_LE(message.start_ns(), message.end_ns());
        EXPECT_LE(message.end_ns(), monotonic_ns());
        if (!on_device(rank)) {
            bytes.assign(message.data(), message.data() + message.bytes());
            return;
        }
        message.wait(consuming_.get());
        consuming_.copy(bytes, message);
        message.release_after(consuming_.get());
    }

    void close_all() {
        for (const std::unique_ptr<Endpoint>& rank : ranks_) {
            rank->close(true);
        }
    }

    ComputeStream producing_;
    ComputeStream consuming_;
    const Taken before_;  ///< after the streams of the test
    Endpoints ranks_;
};

TEST_P(StagedPathTest, MessagesArriveBothWaysInAnyOrder) {
    std::vector<Bytes> contents;
    for (std::uint64_t key = 0; key < 4; ++key) {
        contents.push_back(bytes_of(key, key * 21'000));  // of 0 bytes, too
        send_from(0, key, contents[key]);
        send_from(1, key, contents[key]);
    }
    std::array<std::vector<Bytes>, 2> received{std::vector<Bytes>(4), std::vector<Bytes>(4)};
    for (std::uint64_t key = 4; key-- > 0;) {
        read(0, key, received[0][key]);
        read(1, key, received[1][key]);
    }
    consuming_.synchronize();
    EXPECT_EQ(received[0], contents);
    EXPECT_EQ(received[1], contents);
    const std::string path = ranks_[0]->statistics(1).path;
    if (is_network()) {
        EXPECT_EQ(path, "ucx through pinned memory");
    } else {
        EXPECT_EQ(path, on_device(0) ? "pinned host memory" : "host memory");
    }
    close_all();
}

TEST_P(StagedPathTest, AMessageIsSentAfterTheWorkThatMakesIt) {
    const std::uint32_t sender = on_device(0) ? 0 : 1;
    const Bytes bytes = bytes_of(1, 50'000);
    producing_.close_gate();
    const std::uint64_t ticket = send_from(sender, 1, bytes);
    std::vector<std::uint64_t> completed;
    EXPECT_THROW(static_cast<void>(ranks_[1 - sender]->receive(sender, 1, kShortS)), TransferTimeoutError);
    EXPECT_TRUE(ranks_[1 - sender]->posted(sender).empty());
    ranks_[sender]->take_completed(completed);
    EXPECT_TRUE(completed.empty());
    producing_.open();
    Bytes received;
    read(1 - sender, 1, received);
    consuming_.synchronize();
    EXPECT_EQ(received, bytes);
    ranks_[sender]->close(true);
    ranks_[sender]->take_completed(completed);
    EXPECT_EQ(completed, std::vector<std::uint64_t>{ticket});
}

TEST_P(StagedPathTest, SlotsReturnInTheOrderOfTheReadersStream) {
    const std::uint32_t receiver = on_device(0) ? 0 : 1;
    std::vector<Bytes> contents;
    for (std::uint64_t key = 0; key < 6; ++key) {
        contents.push_back(bytes_of(key, 30'000));
        send_from(1 - receiver, key, contents.back());
    }
    consuming_.close_gate();
    std::vector<Bytes> received(6);
    for (std::uint64_t key = 0; key < 4; ++key) {
        read(receiver, key, received[key]);
    }
    EXPECT_THROW(static_cast<void>(ranks_[receiver]->receive(1 - receiver, 4, kShortS)), TransferTimeoutError);
    consuming_.open();
    for (std::uint64_t key = 4; key < 6; ++key) {
        read(receiver, key, received[key]);
    }
    consuming_.synchronize();
    EXPECT_EQ(received, contents);
    close_all();
}

TEST_P(StagedPathTest, RandomHistoriesDeliverEveryMessageWhole) {
    std::mt19937_64 random(static_cast<std::uint64_t>(GetParam()));
    for (std::uint64_t round = 0; round < (full_tests() ? 300U : 40U); ++round) {
        const auto sender = static_cast<std::uint32_t>(round % 2);
        std::vector<Bytes> contents;
        std::vector<std::uint64_t> keys;
        for (std::uint64_t i = 0; i < 1 + random() % 8; ++i) {
            contents.push_back(bytes_of(random(), random() % 65'536));
            keys.push_back(i);
            send_from(sender, 100 * round + i, contents.back());
        }
        // Messages beyond the slots arrive once others are returned, so these are taken in order.
        std::shuffle(keys.begin(), keys.begin() + static_cast<long>(std::min<std::size_t>(4, keys.size())), random);
        std::vector<Bytes> received(contents.size());
        for (const std::uint64_t key : keys) {
            read(1 - sender, 100 * round + key, received[key]);
        }
        consuming_.synchronize();
        EXPECT_EQ(received, contents) << "round " << round;
    }
    close_all();
}

TEST_P(StagedPathTest, FailureOfTheDeviceIsTheSendersError) {
    const std::uint32_t sender = on_device(0) ? 0 : 1;
    fail_next("cuMemcpyAsync", kFailed);
    send_from(sender, 1, bytes_of(1, 1000));
    EXPECT_THROW(send_from(sender, 2, {}), TransportError);
    std::vector<std::uint64_t> completed;
    ranks_[sender]->take_completed(completed);
    EXPECT_EQ(completed.size(), 1U);
    EXPECT_THROW(ranks_[sender]->close(true), TransportError);
}

TEST_P(StagedPathTest, AClosedPeerIsLostAndItsLastMessagesAreNot) {
    const std::uint32_t sender = on_device(0) ? 0 : 1;
    const Bytes bytes = bytes_of(3, 1000);
    send_from(sender, 1, bytes);
    ranks_[sender]->close(true);
    Bytes received;
    read(1 - sender, 1, received);
    consuming_.synchronize();
    EXPECT_EQ(received, bytes);
    EXPECT_THROW(static_cast<void>(ranks_[1 - sender]->receive(sender, 2, kLongS)), PeerLostError);
}

TEST_P(StagedPathTest, ARankThatClosesGivesUpWhatItsDeviceHasNotCopied) {
    const std::uint32_t sender = on_device(0) ? 0 : 1;
    producing_.close_gate();
    send_from(sender, 1, bytes_of(3, 1000));
    std::thread closing([&] { ranks_[sender]->close(false); });
    EXPECT_THROW(static_cast<void>(ranks_[1 - sender]->receive(sender, 1, kLongS)), PeerLostError);
    producing_.open();
    closing.join();
}

TEST_P(StagedPathTest, MessagesOutliveTheEndpointsOfBothSides) {
    const std::uint32_t receiver = on_device(0) ? 0 : 1;
    const Bytes bytes = bytes_of(3, 1000);
    send_from(1 - receiver, 1, bytes);
    Message message = ranks_[receiver]->receive(1 - receiver, 1, kLongS);
    message.wait(consuming_.get());
    Bytes received;
    consuming_.copy(received, message);
    ranks_.clear();
    consuming_.synchronize();
    EXPECT_EQ(received, bytes);
    message.release_after(consuming_.get());
}

std::string name_of_pair(const ::testing::TestParamInfo<Pair>& tested) {
    constexpr std::array<const char*, 4> kNames{"HostAndDevice", "DeviceAndHost", "DevicesOverNetwork",
                                                "DeviceOverNetworkAndHost"};
    return kNames.at(static_cast<std::size_t>(tested.param));
}

INSTANTIATE_TEST_SUITE_P(Pairs, StagedPathTest,
                         ::testing::Values(Pair::kHostAndDevice, Pair::kDeviceAndHost, Pair::kDevicesOverNetwork,
                                           Pair::kDeviceOverNetworkAndHost),
                         name_of_pair);

class MixedRanks : public TransportTest {
  protected:
    [[nodiscard]] Settings on_device(std::uint32_t rank) const {
        Settings given = settings(rank);
        given.device = static_cast<int>(rank % 2);
        given.driver = &driver_double();
        return given;
    }
};

TEST_F(MixedRanks, EachPairHasThePathThatItsTwoEndsCanUse) {
    Endpoints ranks;
    ranks.push_back(prepared(on_device(0), 3));
    ranks.push_back(prepared(on_device(1), 3));
    ranks.push_back(prepared(settings(2), 3));
    connect(ranks);
    EXPECT_STREQ(ranks[0]->statistics(1).path, "CUDA IPC");
    EXPECT_STREQ(ranks[1]->statistics(2).path, "pinned host memory");
    EXPECT_STREQ(ranks[2]->statistics(0).path, "host memory");
    const Bytes bytes = bytes_of(1, 50'000);
    for (std::uint32_t rank = 0; rank < 3; ++rank) {
        send(*ranks[rank], (rank + 1) % 3, 5, bytes);
    }
    const ComputeStream stream;
    for (std::uint32_t rank = 0; rank < 3; ++rank) {
        Message message = ranks[rank]->receive((rank + 2) % 3, 5, kLongS);
        Bytes received(message.bytes());
        if (message.on_device()) {
            message.wait(stream.get());
            stream.copy(received, message);
            stream.synchronize();
        } else {
            std::ranges::copy(std::span(message.data(), message.bytes()), received.begin());
        }
        EXPECT_EQ(received, bytes) << "rank " << rank;
    }
}

TEST_F(MixedRanks, PinnedSlotsAreASettingOfAllRanksWithDevices) {
    Settings other = on_device(1);
    other.pinned = true;
    Endpoints ranks;
    ranks.push_back(prepared(on_device(0), 2));
    ranks.push_back(prepared(other, 2));
    EXPECT_THROW(connect(ranks), TransportError);
}

}  // namespace
}  // namespace megatronapp::transport::testing
