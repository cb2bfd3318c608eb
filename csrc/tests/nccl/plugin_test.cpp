#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <thread>
#include <vector>

#include "megatronapp/clock.hpp"
#include "megatronapp/nccl/profiler_interface.hpp"
#include "megatronapp/nccl/transfer_log.hpp"

// The plugin as NCCL and its reader see it.
extern "C" {
extern megatronapp::nccl::Profiler ncclProfiler_v4;  // NOLINT(readability-identifier-naming): NCCL's name
std::uint64_t megatronapp_nccl_take(megatronapp::nccl::Transfer* out, std::uint64_t capacity);
std::uint64_t megatronapp_nccl_dropped();
std::uint64_t megatronapp_nccl_in_flight();
bool megatronapp_nccl_communicator(std::uint64_t bytes, std::uint64_t* out);
}

namespace megatronapp::nccl {
namespace {

std::vector<Transfer> take(std::size_t most = 65536) {
    std::vector<Transfer> out(most);
    out.resize(megatronapp_nccl_take(out.data(), most));
    return out;
}

/// A communicator that makes the calls that NCCL makes.
class FakeNccl {
  public:
    FakeNccl(std::uint64_t hash, int ranks, int rank) {
        EXPECT_EQ(ncclProfiler_v4.init(&context_, &types_, nullptr, hash, 1, ranks, rank, nullptr), kSuccess);
        EXPECT_EQ(types_, kCollective | kPointToPoint | kKernelChannel);
    }
    FakeNccl(const FakeNccl&) = delete;
    FakeNccl& operator=(const FakeNccl&) = delete;
    FakeNccl(FakeNccl&&) = delete;
    FakeNccl& operator=(FakeNccl&&) = delete;
    ~FakeNccl() { EXPECT_EQ(ncclProfiler_v4.finalize(context_), kSuccess); }

    void* collective(const char* function, std::size_t count, const char* datatype, std::uint8_t channels) {
        EventDescription event{.type = kCollective, .parent = nullptr, .rank = 0, .collective = {}};
        event.collective.function = function;
        event.collective.count = count;
        event.collective.datatype = datatype;
        event.collective.channels = channels;
        return enqueued(event);
    }

    void* transfer(const char* function, int peer, std::size_t count) {
        EventDescription event{.type = kPointToPoint, .parent = nullptr, .rank = 0, .point_to_point = {}};
        event.point_to_point = {function, nullptr, "ncclBfloat16", count, peer, 0};  // as NCCL 2.28 does
        return enqueued(event);
    }

    void* begin_channel(void* operation, std::uint64_t start_ns) {
        EventDescription event{.type = kKernelChannel, .parent = operation, .rank = 0, .kernel_channel = {0, start_ns}};
        void* handle = nullptr;
        ncclProfiler_v4.start_event(context_, &handle, &event);
        return handle;
    }

    static void end_channel(void* channel, std::uint64_t end_ns) {
        StateArguments arguments{};
        arguments.kernel_channel.timer_ns = end_ns;
        ncclProfiler_v4.record_state(channel, kKernelChannelStop, &arguments);
        ncclProfiler_v4.stop_event(channel);
    }

  private:
    void* enqueued(EventDescription& event) {
        void* handle = nullptr;
        ncclProfiler_v4.start_event(context_, &handle, &event);
        ncclProfiler_v4.stop_event(handle);
        return handle;
    }

    void* context_ = nullptr;
    int types_ = 0;
};

TEST(NcclPlugin, LogsAnOperationOnceItsLastChannelHasEnded) {
    FakeNccl nccl(77, 4, 3);
    void* operation = nccl.collective("AllReduce", 1000, "ncclFloat32", 2);
    void* first = nccl.begin_channel(operation, 5200);
    void* second = nccl.begin_channel(operation, 5000);
    FakeNccl::end_channel(second, 9000);
    EXPECT_TRUE(take().empty());
    FakeNccl::end_channel(first, 8000);
    const std::vector<Transfer> found = take();
    ASSERT_EQ(found.size(), 1U);
    EXPECT_EQ(found[0].communicator, 77U);
    EXPECT_EQ(found[0].bytes, 4000U);
    EXPECT_EQ(found[0].device_start_ns, 5000U);
    EXPECT_EQ(found[0].device_end_ns, 9000U);
    EXPECT_GT(found[0].seen_ns, 0U);
    EXPECT_EQ(found[0].operation, Operation::kAllReduce);
    EXPECT_EQ(found[0].ranks, 4);
    EXPECT_EQ(found[0].rank, 3);
    EXPECT_EQ(found[0].peer, -1);
}

TEST(NcclPlugin, CountsSendsAndReceivesOfEachPeer) {
    FakeNccl nccl(78, 3, 0);
    for (const auto& [function, peer] :
         std::vector<std::pair<const char*, int>>{{"Send", 1}, {"Recv", 1}, {"Send", 2}, {"Send", 1}, {"Recv", 1}}) {
        void* operation = nccl.transfer(function, peer, 8);
        FakeNccl::end_channel(nccl.begin_channel(operation, 3), 4);
        FakeNccl::end_channel(nccl.begin_channel(operation, 1), 2);  // begins when the first one has ended
    }
    std::vector<Transfer> taken;
    const std::uint64_t deadline_ns = monotonic_ns() + 60'000'000'000;
    while (taken.size() < 5 && monotonic_ns() < deadline_ns) {
        for (const Transfer& each : take()) {
            taken.push_back(each);
        }
    }
    std::ranges::sort(taken, {}, &Transfer::seen_ns);
    std::vector<std::array<int, 3>> found;
    for (const Transfer& each : taken) {
        EXPECT_EQ(each.bytes, 16U);
        EXPECT_EQ(each.device_start_ns, 1U);
        EXPECT_EQ(each.device_end_ns, 4U);
        found.push_back({static_cast<int>(each.operation), each.peer, static_cast<int>(each.sequence)});
    }
    const int send = static_cast<int>(Operation::kSend);
    const int receive = static_cast<int>(Operation::kReceive);
    EXPECT_EQ(found, (std::vector<std::array<int, 3>>{
                         {send, 1, 0}, {receive, 1, 0}, {send, 2, 0}, {send, 1, 1}, {receive, 1, 1}}));
}

TEST(NcclPlugin, DropsAndCountsWhatHasNoRoom) {
    FakeNccl nccl(79, 2, 0);
    const std::uint64_t before = megatronapp_nccl_dropped();
    std::vector<void*> operations(8193);
    std::ranges::generate(operations, [&] { return nccl.collective("AllGather", 1, "ncclInt8", 1); });
    EXPECT_EQ(operations.back(), nullptr);
    EXPECT_EQ(megatronapp_nccl_dropped(), before + 1);
    EXPECT_EQ(nccl.begin_channel(nullptr, 1), nullptr);
    operations.pop_back();
    for (void* operation : operations) {
        FakeNccl::end_channel(nccl.begin_channel(operation, 1), 2);
    }
    EXPECT_EQ(take().size(), operations.size());
}

TEST(NcclPlugin, KnowsTheCommunicatorOfAnOperationBeforeItsKernelRuns) {
    FakeNccl first(80, 2, 0);
    FakeNccl second(81, 2, 0);
    std::uint64_t found = 0;
    EXPECT_FALSE(megatronapp_nccl_communicator(12340, &found));
    const std::array operations{first.collective("AllReduce", 3085, "ncclFloat32", 1),
                                second.collective("AllReduce", 3086, "ncclFloat32", 1)};
    EXPECT_TRUE(megatronapp_nccl_communicator(12340, &found));
    EXPECT_EQ(found, 80U);
    EXPECT_TRUE(megatronapp_nccl_communicator(12344, &found));
    EXPECT_EQ(found, 81U);
    EXPECT_EQ(megatronapp_nccl_in_flight(), 2U);
    for (void* operation : operations) {
        FakeNccl::end_channel(first.begin_channel(operation, 1), 2);
    }
    EXPECT_EQ(megatronapp_nccl_in_flight(), 0U);
    EXPECT_EQ(take().size(), 2U);
}

TEST(NcclPlugin, IgnoresTheEndOfAChannelWithoutItsBegin) {
    FakeNccl nccl(82, 2, 0);
    void* earlier = nccl.collective("AllReduce", 1, "ncclFloat32", 2);
    void* channel = nccl.begin_channel(earlier, 10);
    FakeNccl::end_channel(channel, 20);
    void* later = nccl.collective("AllReduce", 2, "ncclFloat32", 1);
    FakeNccl::end_channel(channel, 40);  // of the second operation, whose begin NCCL has missed
    EXPECT_TRUE(take().empty());
    FakeNccl::end_channel(nccl.begin_channel(earlier, 11), 21);
    const std::vector<Transfer> found = take();
    ASSERT_EQ(found.size(), 1U);
    EXPECT_EQ(found[0].bytes, 4U);
    EXPECT_EQ(found[0].device_start_ns, 10U);
    EXPECT_EQ(found[0].device_end_ns, 21U);
    EXPECT_EQ(megatronapp_nccl_in_flight(), 1U);
    FakeNccl::end_channel(nccl.begin_channel(later, 30), 40);
    EXPECT_EQ(take().size(), 1U);
}

class TransferLogTest : public testing::Test {
  protected:
    static constexpr std::uint64_t kNever = 3'600'000'000'000;

    std::vector<Transfer> take(const TransferLog::Patience& patience) {
        std::vector<Transfer> out(8);
        out.resize(log.take(out, patience));
        return out;
    }

    TransferLog::Pending* begin(std::uint32_t channels) {
        TransferLog::Pending* pending = log.begin(communicator, Operation::kOther, 8, -1, channels);
        if (pending != nullptr) {
            log.enqueued(*pending);
        }
        return pending;
    }

    void end(TransferLog::Channel* channel, std::uint64_t end_ns) {
        log.channel_ends_at(*channel, end_ns);
        log.end_channel(*channel);
    }

    TransferLog log{2, 8};
    Communicator communicator{
        .log = &log, .hash = 1, .ranks = 2, .rank = 0, .collectives = {}, .sent = {}, .received = {}};
};

TEST_F(TransferLogTest, FreesOperationsWhoseChannelsNeverBegin) {
    for (const std::uint32_t channels : {0U, 3U}) {  // as of a CUDA graph that captures them
        EXPECT_NE(begin(channels), nullptr);
    }
    EXPECT_EQ(begin(1), nullptr);
    EXPECT_EQ(log.dropped(), 1U);
    EXPECT_TRUE(take({.expire_ns = kNever}).empty());
    EXPECT_EQ(log.in_flight(), 2U);
    EXPECT_TRUE(take({.expire_ns = 0}).empty());
    EXPECT_EQ(log.in_flight(), 0U);
    EXPECT_EQ(log.dropped(), 3U);
    EXPECT_NE(begin(1), nullptr);
}

TEST_F(TransferLogTest, KeepsOperationsWithAnOpenChannel) {
    for (const std::uint32_t channels : {0U, 1U}) {  // as one that waits for its peer
        TransferLog::Pending* pending = begin(channels);
        TransferLog::Channel* channel = log.begin_channel(*pending, 5);
        EXPECT_TRUE(take({.quiet_ns = 0, .missing_ns = 0, .expire_ns = 0}).empty());
        end(channel, 9);
        EXPECT_EQ(take({.quiet_ns = 0}).size(), 1U);
    }
    EXPECT_EQ(log.dropped(), 0U);
}

TEST_F(TransferLogTest, FinishesAnOperationWithoutAChannelThatNcclHasMissed) {
    TransferLog::Pending* pending = begin(3);
    end(log.begin_channel(*pending, 7), 9);
    end(log.begin_channel(*pending, 5), 8);
    EXPECT_TRUE(take({.quiet_ns = 0, .missing_ns = kNever}).empty());
    const std::vector<Transfer> found = take({.quiet_ns = kNever, .missing_ns = 0});
    ASSERT_EQ(found.size(), 1U);
    EXPECT_EQ(found[0].device_start_ns, 5U);
    EXPECT_EQ(found[0].device_end_ns, 9U);
    EXPECT_EQ(log.begin_channel(*pending, 6), nullptr);
    EXPECT_EQ(log.dropped(), 0U);
}

TEST(NcclPlugin, LogsEveryOperationOfSeveralCommunicatorsAndThreads) {
    constexpr int kThreads = 4;
    constexpr int kOperations = 500;
    {
        std::vector<std::jthread> threads;
        threads.reserve(kThreads);
        for (int thread = 0; thread < kThreads; ++thread) {
            threads.emplace_back([thread] {
                FakeNccl nccl(100U + static_cast<std::uint64_t>(thread), 2, 0);
                for (int number = 0; number < kOperations; ++number) {
                    void* operation = nccl.collective("ReduceScatter", 2, "ncclFloat64", 2);
                    void* first = nccl.begin_channel(operation, 10);
                    void* second = nccl.begin_channel(operation, 11);
                    std::jthread other([&] { FakeNccl::end_channel(first, 20); });
                    FakeNccl::end_channel(second, 21);
                }
            });
        }
    }
    const std::vector<Transfer> found = take();
    EXPECT_EQ(found.size(), static_cast<std::size_t>(kThreads * kOperations));
    for (const Transfer& each : found) {
        EXPECT_EQ(each.device_start_ns, 10U);
        EXPECT_EQ(each.device_end_ns, 21U);
    }
}

}  // namespace
}  // namespace megatronapp::nccl
