#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <csignal>
#include <random>

#include "megatronapp/clock.hpp"
#include "ranks.hpp"

namespace megatronapp::transport::testing {
namespace {

constexpr std::uint32_t kRanks = 3;
constexpr int kLostRankOne = 31;

/// Outlives all endpoints, which may still copy from it.
const Bytes& contents() {
    static const Bytes bytes = bytes_of(5, 30'000);
    return bytes;
}

/// Sends to and receives from all peers, step by step, until a peer fails; calls `after` with each step's number.
template <typename After>
void exchange_until_failure(Endpoint& endpoint, After after) {
    const std::uint32_t own = endpoint.settings().rank;
    const Bytes& bytes = contents();
    for (std::uint64_t step = 0;; ++step) {
        for (std::uint32_t peer = 0; peer < kRanks; ++peer) {
            if (peer != own) {
                endpoint.send(peer, step, bytes.data(), bytes.size());
            }
        }
        for (std::uint32_t peer = 0; peer < kRanks; ++peer) {
            if (peer != own && !holds(endpoint.receive(peer, step, kLongS), bytes)) {
                ::_exit(77);
            }
        }
        after(step);
    }
}

class Process {
  public:
    template <typename Function>
    explicit Process(Function function) : pid_(::fork()) {
        if (pid_ == 0) {
            ::_exit(function());
        }
    }
    Process(const Process&) = delete;
    Process& operator=(const Process&) = delete;
    Process(Process&&) = delete;
    Process& operator=(Process&&) = delete;
    ~Process() {
        if (pid_ > 0) {
            signal(SIGKILL);
            static_cast<void>(wait());
        }
    }

    void signal(int number) const { ::kill(pid_, number); }

    /// The exit code, or minus the signal that ended the process.
    int wait() {
        int status = 0;
        ::waitpid(std::exchange(pid_, -1), &status, 0);
        return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
    }

  private:
    pid_t pid_;
};

class Kill : public TransportTest, public ::testing::WithParamInterface<unsigned> {
  protected:
    /// What a rank does in a process of its own.
    [[nodiscard]] int run_rank(std::uint32_t rank) const {
        try {
            const std::unique_ptr<Endpoint> endpoint = prepared(settings(rank), kRanks);
            endpoint->connect();
            try {
                exchange_until_failure(*endpoint, [](std::uint64_t) {});
            } catch (const PeerLostError&) {
                static_cast<void>(endpoint->receive(1, std::uint64_t{1} << 60U, kLongS));
            }
        } catch (const PeerLostError& error) {
            return error.peer == 1 ? kLostRankOne : 1;
        } catch (const TransportError&) {
            return 2;
        }
        return 3;
    }

    void expect_lost(Endpoint& endpoint, std::uint32_t rank) {
        try {
            static_cast<void>(endpoint.receive(rank, std::uint64_t{1} << 60U, kLongS));
            FAIL() << "received from a dead rank";
        } catch (const PeerLostError& error) {
            EXPECT_EQ(error.peer, rank);
        }
        EXPECT_THROW(send(endpoint, rank, 0, {}), PeerLostError);
    }
};

TEST_P(Kill, SurvivorsLearnWhoDied) {
    std::mt19937_64 random(GetParam());
    const std::uint64_t kill_at = random() % 100;
    const std::uint64_t spins = random() % 50'000;
    Process one([this] { return run_rank(1); });
    Process two([this] { return run_rank(2); });
    const std::unique_ptr<Endpoint> endpoint = prepared(settings(0), kRanks);
    endpoint->connect();
    try {
        exchange_until_failure(*endpoint, [&](std::uint64_t step) {
            if (step == kill_at) {
                for (std::atomic<std::uint64_t> i = 0; i < spins; ++i) {
                }
                one.signal(SIGKILL);
            }
        });
    } catch (const PeerLostError&) {
        expect_lost(*endpoint, 1);
    }
    endpoint->close(false);  // rank 2 may wait for this one
    EXPECT_EQ(one.wait(), -SIGKILL);
    EXPECT_EQ(two.wait(), kLostRankOne);
}

TEST_P(Kill, NothingIsLeftOfADeathWhileConnecting) {
    std::mt19937_64 random(GetParam());
    Process one([this] { return run_rank(1); });
    const std::uint64_t until = monotonic_ns() + random() % 3'000'000;
    Settings impatient = settings(0);
    impatient.deadline_s = GetParam() % 2 == 0 ? kShortS : kLongS;
    {
        const std::unique_ptr<Endpoint> endpoint = prepared(impatient, 2);
        while (monotonic_ns() < until) {
        }
        const auto kill_and_wait = [&] {
            one.signal(SIGKILL);
            EXPECT_EQ(one.wait(), -SIGKILL);
        };
        if (GetParam() % 2 == 0) {
            kill_and_wait();
        }
        try {
            endpoint->connect();
            if (GetParam() % 2 == 1) {
                kill_and_wait();
            }
            // It had opened all that it needs of rank 0, and waited for rank 2, which never came.
            expect_lost(*endpoint, 1);
            const std::uint64_t give_up = monotonic_ns() + 60'000'000'000;
            while (!names().empty() && monotonic_ns() < give_up) {  // while this rank goes on
                std::this_thread::yield();
            }
            EXPECT_EQ(names(), std::vector<std::string>());
        } catch (const TransferTimeoutError& error) {
            EXPECT_STREQ(error.timeout.direction, "connect");
        } catch (const PeerLostError& error) {
            EXPECT_EQ(error.peer, 1U);
        }
    }
    EXPECT_EQ(names(), std::vector<std::string>());
}

TEST_P(Kill, StoppedRankIsATimeout) {
    std::mt19937_64 random(GetParam());
    const std::uint64_t stop_at = random() % 50;
    Process one([this] { return run_rank(1); });
    Process two([this] { return run_rank(2); });
    const std::unique_ptr<Endpoint> endpoint = prepared(settings(0), kRanks);
    endpoint->connect();
    const Bytes& bytes = contents();
    for (std::uint64_t step = 0; step < stop_at; ++step) {
        for (std::uint32_t peer = 1; peer < kRanks; ++peer) {
            send(*endpoint, peer, step, bytes);
            EXPECT_TRUE(holds(endpoint->receive(peer, step, kLongS), bytes));
        }
    }
    one.signal(SIGSTOP);
    try {
        static_cast<void>(endpoint->receive(1, std::uint64_t{1} << 60U, kShortS));
        ADD_FAILURE() << "received from a stopped rank";
    } catch (const TransferTimeoutError& error) {
        EXPECT_EQ(error.timeout.peer, 1U);
    }
}

INSTANTIATE_TEST_SUITE_P(Seeds, Kill, ::testing::Range(0U, full_tests() ? 50U : 5U));

class Fork : public TransportTest {};

TEST_F(Fork, ChildDoesNothing) {
    Endpoints ranks = connected(2);
    const Bytes bytes = bytes_of(1, 100);
    send(*ranks[0], 1, 1, bytes);
    Message message = ranks[1]->receive(0, 1, kLongS);
    Process child([&] {
        int refused = 0;
        for (const std::unique_ptr<Endpoint>& rank : ranks) {
            try {
                send(*rank, 1 - rank->settings().rank, 2, bytes);
            } catch (const TransportError&) {
                ++refused;
            }
            rank->close(true);
        }
        message.release();
        ranks.clear();
        return refused;
    });
    EXPECT_EQ(child.wait(), 2);
    EXPECT_THROW(send(*ranks[0], 1, 1, bytes), DuplicateKeyError);  // the child has released nothing
    message.release();
    send(*ranks[0], 1, 1, bytes);
    EXPECT_TRUE(holds(ranks[1]->receive(0, 1, kLongS), bytes));
}

TEST_F(Fork, ChildDoesNotHideTheDeathOfItsParent) {
    std::array<int, 2> grandchild{};
    ASSERT_EQ(::pipe(grandchild.data()), 0);
    Process one([&] {
        const std::unique_ptr<Endpoint> endpoint = prepared(settings(1), 2);
        endpoint->connect();
        const pid_t pid = ::fork();
        if (pid == 0) {
            ::pause();
        }
        static_cast<void>(::write(grandchild[1], &pid, sizeof(pid)));
        ::pause();
        return 0;
    });
    const std::unique_ptr<Endpoint> endpoint = prepared(settings(0), 2);
    endpoint->connect();
    pid_t pid = 0;
    ASSERT_EQ(::read(grandchild[0], &pid, sizeof(pid)), static_cast<ssize_t>(sizeof(pid)));
    one.signal(SIGKILL);
    EXPECT_THROW(static_cast<void>(endpoint->receive(1, 1, 5.0)), PeerLostError);
    ::kill(pid, SIGKILL);
    ::close(grandchild[0]);
    ::close(grandchild[1]);
}

}  // namespace
}  // namespace megatronapp::transport::testing
