#include "megatronapp/transport/host/host_path.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <optional>
#include <string>
#include <thread>

#include "megatronapp/clock.hpp"
#include "ranks.hpp"

namespace megatronapp::transport::testing {
namespace {

constexpr std::uint64_t kSlots = 2;
constexpr std::uint64_t kSlotBytes = 4096;

/// Takes no lock, as that of a `Peer` does: nothing orders the copies of two threads but the path.
class NoSink final : public CopySink {
  public:
    void completed(const StartedSend& /*started*/, std::uint64_t /*start_ns*/,
                   std::uint64_t /*end_ns*/) noexcept override {}
    void failed(const StartedSend& /*started*/, const std::string& why) noexcept override { ADD_FAILURE() << why; }
};

/// Both ends of a path. Each rank maps both files, so that they are at two addresses of this process.
class HostPathTest : public TransportTest {
  protected:
    HostPathTest() {
        InboxFile inbox = make(1, 0);
        InboxFile other = make(0, 1);
        sender_.emplace(open(1, 0), std::move(other), identity(0, 1), 1);
        receiver_.emplace(open(0, 1), std::move(inbox), identity(1, 0), 0);
        for (const std::string& name : names()) {
            std::filesystem::remove(directory_ + "/" + name);
        }
    }

    [[nodiscard]] static Identity identity(std::uint64_t owner, std::uint64_t sender) {
        Identity inbox{.magic = kInboxMagic,
                       .version = kVersion,
                       .file_bytes = InboxLayout::of(kSlots, kSlotBytes).file_bytes,
                       .job = hash_of("job-1"),
                       .attempt = 3,
                       .owner = owner,
                       .sender = sender,
                       .slot_bytes = kSlotBytes,
                       .slots = kSlots,
                       .memory = static_cast<std::uint64_t>(SlotMemory::kHost),
                       .check = 0};
        inbox.check = inbox.computed_check();
        return inbox;
    }

    [[nodiscard]] std::string path(std::uint64_t owner) const { return directory_ + "/inbox" + std::to_string(owner); }

    [[nodiscard]] InboxFile make(std::uint64_t owner, std::uint64_t sender) const {
        InboxFile file = InboxFile::create(path(owner), identity(owner, sender));
        EXPECT_TRUE(file.file().publish());
        return file;
    }

    [[nodiscard]] InboxFile open(std::uint64_t owner, std::uint64_t sender) const {
        return InboxFile::open(path(owner), identity(owner, sender)).value();
    }

    void send(std::uint64_t key, const Bytes& bytes) {
        sender_->start({{key, key, MessageSource(bytes.data(), bytes.size()), bytes.size(), monotonic_ns()}, 0}, sink_);
    }

    /// Whether the next message of slot 0 has these bytes; it is returned.
    [[nodiscard]] bool receive(const Bytes& bytes) {
        std::optional<Arrival> arrival = receiver_->next_arrival();
        while (!arrival) {
            std::this_thread::yield();
            arrival = receiver_->next_arrival();
        }
        const bool equal = arrival->slot == 0 && arrival->bytes == bytes.size() &&
                           std::equal(bytes.begin(), bytes.end(), receiver_->slot_data(0));
        receiver_->give_back(0);
        return equal;
    }

    NoSink sink_;
    std::optional<HostPath> sender_;
    std::optional<HostPath> receiver_;
};

/// The thread sanitizer reports a race here if only words of the other mapping order the two copies.
TEST_F(HostPathTest, AReturnedSlotIsWrittenByAnotherThread) {
    const Bytes first = bytes_of(1, kSlotBytes);
    const Bytes second = bytes_of(2, kSlotBytes);
    std::thread copying([&] { send(1, first); });
    EXPECT_TRUE(receive(first));
    EXPECT_EQ(sender_->next_returned(), 0U);
    send(2, second);
    EXPECT_TRUE(receive(second));
    copying.join();
}

TEST_F(HostPathTest, MoreReturnedSlotsThanMessagesAreRefused) {
    const Bytes bytes = bytes_of(1, 100);
    send(1, bytes);
    EXPECT_TRUE(receive(bytes));
    EXPECT_EQ(sender_->next_returned(), 0U);
    receiver_->give_back(1);
    try {
        static_cast<void>(sender_->next_returned());
        FAIL() << "believed that 2 slots were returned after 1 message";
    } catch (const TransportCorruptError& error) {
        EXPECT_NE(std::string(error.what()).find("2 returned after 1 sent"), std::string::npos) << error.what();
    }
}

}  // namespace
}  // namespace megatronapp::transport::testing
