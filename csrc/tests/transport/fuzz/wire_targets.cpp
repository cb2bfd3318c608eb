#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <deque>
#include <exception>
#include <filesystem>
#include <fstream>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "fuzz.hpp"
#include "hostile_writer.hpp"
#include "megatronapp/transport/endpoint.hpp"
#include "megatronapp/transport/errors.hpp"

namespace megatronapp::transport::fuzzing {
namespace {

constexpr std::uint64_t kSlots = 4;
constexpr std::uint64_t kSlotBytes = 512;
constexpr double kDeadlineS = 0.3;  // of sends and of connecting
constexpr double kReceiveS = 0.01;
constexpr int kOperations = 200;
constexpr int kMostTimeouts = 5;
constexpr std::size_t kMostHeld = 2;

using Bytes = std::vector<std::byte>;

class TemporaryDirectory {
  public:
    TemporaryDirectory() {
        std::string name = (std::filesystem::temp_directory_path() / "fuzz.XXXXXX").string();
        require(::mkdtemp(name.data()) != nullptr, "cannot make a directory");
        path_ = name;
    }
    TemporaryDirectory(const TemporaryDirectory&) = delete;
    TemporaryDirectory& operator=(const TemporaryDirectory&) = delete;
    TemporaryDirectory(TemporaryDirectory&&) = delete;
    TemporaryDirectory& operator=(TemporaryDirectory&&) = delete;
    ~TemporaryDirectory() { std::filesystem::remove_all(path_); }

    [[nodiscard]] const std::string& path() const { return path_; }

    [[nodiscard]] std::vector<std::string> names() const {
        std::vector<std::string> found;
        for (const auto& entry : std::filesystem::directory_iterator(path_)) {
            found.push_back(entry.path().filename().string());
        }
        std::sort(found.begin(), found.end());
        return found;
    }

  private:
    std::string path_;
};

/// The bytes of a rank's message; they and their number follow from the key.
Bytes message_of(std::uint32_t sender, std::uint64_t key) {
    std::mt19937_64 random(2 * key + sender);
    Bytes bytes(random() % (kSlotBytes + 1));
    for (std::byte& byte : bytes) {
        byte = static_cast<std::byte>(random());
    }
    return bytes;
}

std::unique_ptr<Endpoint> prepared(const std::string& directory, std::uint32_t rank) {
    auto endpoint = std::make_unique<Endpoint>(Settings{.directory = directory,
                                                        .job = "fuzz",
                                                        .attempt = 0,
                                                        .rank = rank,
                                                        .slot_bytes = kSlotBytes,
                                                        .slots = kSlots,
                                                        .deadline_s = kDeadlineS,
                                                        .threads = 1,
                                                        .while_waiting = {}});
    endpoint->add_peer(1 - rank, true);
    return endpoint;
}

/// Calls a function of the rank for both ranks at once. Raises what one of them raised.
template <typename Function>
void on_both(Function function) {
    std::array<std::exception_ptr, 2> failures;
    const auto guarded = [&](std::uint32_t rank) {
        try {
            function(rank);
        } catch (...) {
            failures.at(rank) = std::current_exception();
        }
    };
    std::thread other([&] { guarded(1); });
    guarded(0);
    other.join();
    for (const std::exception_ptr& failure : failures) {
        if (failure) {
            std::rethrow_exception(failure);
        }
    }
}

/// What both ranks of a case do: random operations until they are done, or the peer has failed for good.
class Rank {
  public:
    Rank(Endpoint& endpoint, std::uint64_t seed, HostileWriter& writer)
        : endpoint_(endpoint), own_(endpoint.settings().rank), random_(seed), writer_(writer) {}

    /// `mutate_at`: operations before which this rank's own thread writes, so that the seed alone decides on the case.
    void run(const std::set<std::uint64_t>& mutate_at) {
        try {
            for (std::uint64_t i = 0; i < kOperations && timeouts_ < kMostTimeouts; ++i) {
                done_.store(i);
                if (mutate_at.contains(i)) {
                    writer_.mutate();
                }
                operate();
            }
        } catch (const TransportCorruptError&) {
        } catch (const PeerLostError&) {
        }
        held_.clear();
        done_.store(kOperations);
    }

    [[nodiscard]] std::uint64_t done() const { return done_.load(); }

  private:
    void operate() {
        try {
            switch (random_() % 8) {
                case 0:
                case 1:
                    send();
                    break;
                case 2:
                case 3:
                    accept(endpoint_.receive(peer(), next_received_, kReceiveS));
                    break;
                case 4:
                    poll();
                    break;
                case 5:
                    held_.clear();
                    break;
                case 6:
                    use_log();
                    break;
                default:
                    use_rest();
            }
        } catch (const TransferTimeoutError&) {
            ++timeouts_;
        } catch (const DuplicateKeyError&) {  // the return of an earlier slot was hidden
            ++timeouts_;
        }
    }

    [[nodiscard]] std::uint32_t peer() const { return 1 - own_; }

    void send() {
        const Bytes& bytes = sent_.emplace_back(message_of(own_, next_sent_));
        endpoint_.send(peer(), next_sent_++, bytes.data(), bytes.size());
    }

    void poll() {
        if (std::optional<Message> message = endpoint_.poll(peer(), next_received_ + random_() % 3)) {
            accept(std::move(*message));
        }
    }

    void accept(Message message) {
        require(message.bytes() <= kSlotBytes, "a message is larger than its slot");
        require(message.queued_ns() <= message.start_ns() && message.start_ns() <= message.end_ns(),
                "a copy ends before it begins");
        const Bytes found(message.data(), message.data() + message.bytes());
        require(!writer_.keeps_contents() || found == message_of(peer(), message.key()), "a message is damaged");
        received_.insert(message.key());
        while (received_.contains(next_received_)) {
            ++next_received_;
        }
        held_.push_back(std::move(message));
        if (held_.size() > kMostHeld) {
            held_.pop_front();
        }
    }

    void use_log() {
        if (own_ == 0) {
            endpoint_.append(entries_++, kReceiveS);
        } else if (const std::optional<std::uint64_t> entry = endpoint_.poll_entry(0)) {
            require(!writer_.keeps_contents() || *entry == entries_++, "an entry of the log is damaged");
        }
    }

    void use_rest() {
        endpoint_.publish(3, random_());
        static_cast<void>(endpoint_.read(peer(), 3));
        static_cast<void>(endpoint_.statistics(peer()));
        static_cast<void>(endpoint_.wait_activity(endpoint_.activity(), 0.001));
        endpoint_.take_completed(completed_);
    }

    Endpoint& endpoint_;
    std::uint32_t own_;
    std::mt19937_64 random_;
    HostileWriter& writer_;
    std::atomic<std::uint64_t> done_ = 0;
    std::deque<Bytes> sent_;  // outlives the endpoint, whose threads may still copy
    std::deque<Message> held_;
    std::set<std::uint64_t> received_;
    std::vector<std::uint64_t> completed_;
    std::uint64_t next_sent_ = 0;
    std::uint64_t next_received_ = 0;
    std::uint64_t entries_ = 0;
    int timeouts_ = 0;
};

void close(Endpoint& endpoint, bool drain) {
    try {
        endpoint.close(drain);
    } catch (const TransportError&) {  // what could not be delivered
    }
}

/// Replaces a file by one that no rank made.
void replace(const std::string& path, const std::string& other, std::mt19937_64& random) {
    std::filesystem::remove(path);
    switch (random() % 6) {
        case 0:
            break;
        case 1:
            std::filesystem::create_directory(path);
            break;
        case 2:
            std::filesystem::create_symlink(other, path);
            break;
        case 3:
            require(::mkfifo(path.c_str(), 0600) == 0, "cannot make a pipe");
            break;
        case 4:
            std::filesystem::copy_file(other, path);
            break;
        default: {
            std::ofstream file(path, std::ios::binary);
            for (std::uint64_t left = random() % 20'000; left > 0; --left) {
                file.put(static_cast<char>(random()));
            }
        }
    }
}

/// Changes or replaces a file of two ranks that have not connected yet.
void spoil(const TemporaryDirectory& directory, std::mt19937_64& random) {
    const std::vector<std::string> names = directory.names();
    const std::string path = directory.path() + "/" + names[random() % names.size()];
    const std::string other = directory.path() + "/" + names[random() % names.size()];
    if (path != other && random() % 3 == 0) {
        replace(path, other, random);
        return;
    }
    const testing::SharedWords words(path, sizeof(Identity) + 4 * kLine);
    require(words.valid(), "cannot map " + path);
    for (std::uint64_t left = 1 + random() % 3; left > 0; --left) {
        Word& word = words.word(random() % (random() % 2 == 0 ? sizeof(Identity) / sizeof(Word) : words.count()));
        word.store(random() % 2 == 0 ? word.load() ^ std::uint64_t{1} << random() % 64 : random() % 3);
    }
}

}  // namespace

void fuzz_transfers(std::uint64_t seed) {
    std::mt19937_64 random(seed);
    const TemporaryDirectory directory;
    std::array endpoints{prepared(directory.path(), 0), prepared(directory.path(), 1)};
    HostileWriter writer(directory.path(), directory.names(), kSlots, kSlotBytes, random());
    on_both([&](std::uint32_t rank) { endpoints.at(rank)->connect(); });
    endpoints[0]->lead({1});

    std::array<std::unique_ptr<Rank>, 2> ranks;
    for (std::uint32_t rank = 0; rank < 2; ++rank) {
        ranks.at(rank) = std::make_unique<Rank>(*endpoints.at(rank), random(), writer);
    }
    // Half of the cases write between operations of rank 0, the others at any moment.
    const bool between = random() % 2 == 0;
    std::set<std::uint64_t> places;
    for (std::uint64_t left = random() % 3 == 0 ? kOperations : 1 + random() % 4; left > 0; --left) {
        places.insert(random() % kOperations);
    }
    std::thread writing([&] {
        for (auto place = places.begin(); !between && place != places.end(); ++place) {
            while (ranks[0]->done() < *place) {
                std::this_thread::yield();
            }
            writer.mutate();
        }
    });
    std::exception_ptr failure;
    try {
        on_both([&](std::uint32_t rank) {
            ranks.at(rank)->run(rank == 0 && between ? places : std::set<std::uint64_t>());
        });
    } catch (...) {
        failure = std::current_exception();
    }
    writing.join();
    on_both([&](std::uint32_t rank) { close(*endpoints.at(rank), seed % 4 == 0); });
    for (std::unique_ptr<Endpoint>& endpoint : endpoints) {
        endpoint.reset();
    }
    if (failure) {
        std::rethrow_exception(failure);
    }
    require(directory.names().empty(), "names of files are left");
}

void fuzz_connecting(std::uint64_t seed) {
    std::mt19937_64 random(seed);
    const TemporaryDirectory directory;
    std::array endpoints{prepared(directory.path(), 0), prepared(directory.path(), 1)};
    spoil(directory, random);
    on_both([&](std::uint32_t rank) {
        Endpoint& endpoint = *endpoints.at(rank);
        try {
            endpoint.connect();
        } catch (const TransportError&) {
            return;
        }
        const Bytes bytes = message_of(rank, 0);
        try {
            endpoint.send(1 - rank, 0, bytes.data(), bytes.size());
            const Message message = endpoint.receive(1 - rank, 0, kDeadlineS);
            const Bytes found(message.data(), message.data() + message.bytes());
            require(found == message_of(1 - rank, 0), "a message is damaged");
        } catch (const TransportError&) {  // NOLINT(bugprone-empty-catch): any of its errors ends the case
        }
        close(endpoint, false);
    });
}

}  // namespace megatronapp::transport::fuzzing
