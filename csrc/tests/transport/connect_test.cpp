#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fstream>
#include <future>

#include "megatronapp/transport/shm/layout.hpp"
#include "ranks.hpp"

namespace megatronapp::transport::testing {
namespace {

class ConnectTest : public TransportTest {
  protected:
    /// The text of a rank's TransportMismatchError; empty if it heard only that the other gave up.
    static std::string refusal(Endpoint& endpoint) {
        try {
            endpoint.connect();
        } catch (const TransportMismatchError& error) {
            return error.what();
        } catch (const PeerLostError& error) {
            EXPECT_NE(std::string(error.what()).find("gave up"), std::string::npos) << error.what();
            return {};
        }
        ADD_FAILURE() << "connected";
        return {};
    }

    void expect_refused(const Settings& second, const std::string& text) {
        const std::unique_ptr<Endpoint> first = prepared(settings(0), 2);
        const std::unique_ptr<Endpoint> other = prepared(second, 2);
        auto others = std::async(std::launch::async, [&] { return refusal(*other); });
        const std::string both = refusal(*first) + others.get();
        EXPECT_NE(both.find(text), std::string::npos) << both;
    }

    /// Names that a rank leaves that dies before its peers came.
    static void die_while_connecting(const Settings& given) {
        const pid_t child = ::fork();
        if (child == 0) {
            ::_exit(prepared(given, 2).release() == nullptr ? 1 : 0);
        }
        ASSERT_EQ(::waitpid(child, nullptr, 0), child);
    }
};

TEST_F(ConnectTest, RefusesOtherSlots) {
    Settings other = settings(1);
    other.slot_bytes = 4096;
    expect_refused(other, "a slot size of ");
    other = settings(1);
    other.slots = 5;
    expect_refused(other, "a number of slots of ");
}

TEST_F(ConnectTest, TimeoutNamesTheMissingPeer) {
    Settings impatient = settings(0);
    impatient.deadline_s = 0.05;
    const std::unique_ptr<Endpoint> alone = prepared(impatient, 2);
    try {
        alone->connect();
        FAIL() << "connected";
    } catch (const TransferTimeoutError& error) {
        EXPECT_EQ(error.timeout.peer, 1U);
        EXPECT_STREQ(error.timeout.direction, "connect");
        EXPECT_NE(std::string(error.what()).find("rank 1: not connected within 0.05 s"), std::string::npos);
    }
    EXPECT_EQ(names(), std::vector<std::string>());
}

TEST_F(ConnectTest, RefusesFilesOfAnotherVersion) {
    const Endpoints ranks = [&] {
        Endpoints made;
        made.push_back(prepared(settings(0), 2));
        made.push_back(prepared(settings(1), 2));
        return made;
    }();
    for (const std::string& name : names()) {
        std::fstream file(directory_ + "/" + name, std::ios::binary | std::ios::in | std::ios::out);
        file.seekp(offsetof(Identity, version));
        file.put(static_cast<char>(kVersion + 1));
    }
    try {
        ranks[0]->connect();
        FAIL() << "connected";
    } catch (const TransportMismatchError& error) {
        const std::string expected =
            "version " + std::to_string(kVersion + 1) + ", this rank has " + std::to_string(kVersion);
        EXPECT_NE(std::string(error.what()).find(expected), std::string::npos) << error.what();
    }
}

TEST_F(ConnectTest, RefusesASecondProcessOfTheSameRank) {
    const Endpoint first(settings(0));
    EXPECT_THROW(Endpoint{settings(0)}, TransportError);
}

TEST_F(ConnectTest, RefusesBadSettings) {
    for (const std::string& job : {std::string(), std::string("a/b"), std::string("a.b"), std::string(200, 'x')}) {
        Settings bad = settings(0);
        bad.job = job;
        EXPECT_THROW(Endpoint{bad}, TransportError) << job;
    }
    Settings bad = settings(0);
    bad.directory = directory_ + "/none";
    EXPECT_THROW(Endpoint{bad}, TransportError);
    bad = settings(0);
    bad.slots = 0;
    EXPECT_THROW(Endpoint{bad}, TransportError);
    bad = settings(0);
    bad.deadline_s = 0;
    EXPECT_THROW(Endpoint{bad}, TransportError);
}

TEST_F(ConnectTest, FullFileSystemIsAnErrorOfTheCreator) {
    Settings huge = settings(0);
    huge.slot_bytes = kMaxSlotBytes;  // 64 GiB for each of the slots
    huge.slots = kMaxSlots;
    Endpoint endpoint(huge);
    try {
        endpoint.add_peer(1, true);
        FAIL() << "made a file of 256 TiB";
    } catch (const TransportError& error) {
        EXPECT_NE(std::string(error.what()).find("no room for"), std::string::npos) << error.what();
    }
}

TEST_F(ConnectTest, NextAttemptRemovesWhatADeadOneLeft) {
    die_while_connecting(settings(0));
    std::ofstream(directory_ + "/megatronapp-job-1-a2.transportless") << "of something else";
    std::ofstream(directory_ + "/megatronapp-job-1-a4.transport.rank0.board") << "of a later attempt";
    std::ofstream(directory_ + "/megatronapp-job-12-a1.transport.rank0.board") << "of another job";
    EXPECT_EQ(names().size(), 5U);
    Settings next = settings(1);
    next.attempt = 4;
    { const Endpoint endpoint(next); }
    EXPECT_EQ(names().size(), 3U);
    for (const std::string& name : names()) {
        std::filesystem::remove(directory_ + "/" + name);
    }
}

TEST_F(ConnectTest, SameRankRemovesWhatItLeftInThisAttempt) {
    die_while_connecting(settings(0));
    EXPECT_EQ(names().size(), 2U);
    const Endpoints ranks = connected(2);
}

TEST_F(ConnectTest, SurvivorRemovesFilesOfAPeerThatDiedWhileConnecting) {
    die_while_connecting(settings(0));
    const std::unique_ptr<Endpoint> survivor = prepared(settings(1), 2);
    try {
        survivor->connect();
        FAIL() << "connected";
    } catch (const PeerLostError& error) {
        EXPECT_EQ(error.peer, 0U);
    }
    EXPECT_EQ(names(), std::vector<std::string>());
}

}  // namespace
}  // namespace megatronapp::transport::testing
