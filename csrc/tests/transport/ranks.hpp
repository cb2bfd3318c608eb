#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <deque>
#include <exception>
#include <filesystem>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "megatronapp/transport/endpoint.hpp"
#include "megatronapp/transport/errors.hpp"

namespace megatronapp::transport::testing {

inline constexpr double kLongS = 60.0;   // for what must happen
inline constexpr double kShortS = 0.25;  // for what must not

using Endpoints = std::vector<std::unique_ptr<Endpoint>>;
using Bytes = std::vector<std::byte>;

[[nodiscard]] inline bool full_tests() {
    return std::getenv("MEGATRONAPP_FULL") != nullptr;  // NOLINT(concurrency-mt-unsafe): before any thread
}

/// A directory of its own for each test, which must be empty at its end.
class TransportTest : public ::testing::Test {
  public:
    TransportTest(const TransportTest&) = delete;
    TransportTest& operator=(const TransportTest&) = delete;
    TransportTest(TransportTest&&) = delete;
    TransportTest& operator=(TransportTest&&) = delete;

  protected:
    TransportTest() {
        std::string name = (std::filesystem::temp_directory_path() / "transport.XXXXXX").string();
        directory_ = ::mkdtemp(name.data());
    }

    ~TransportTest() override {
        EXPECT_EQ(names(), std::vector<std::string>());
        std::filesystem::remove_all(directory_);
    }

    [[nodiscard]] std::vector<std::string> names() const {
        std::vector<std::string> found;
        for (const auto& entry : std::filesystem::directory_iterator(directory_)) {
            found.push_back(entry.path().filename().string());
        }
        return found;
    }

    [[nodiscard]] Settings settings(std::uint32_t rank) const {
        return {.directory = directory_,
                .job = "job-1",
                .attempt = 3,
                .rank = rank,
                .slot_bytes = 65536,
                .slots = 4,
                .deadline_s = kLongS,
                .threads = 1,
                .while_waiting = {}};
    }

    /// An endpoint that has added all other ranks below `ranks`.
    [[nodiscard]] static std::unique_ptr<Endpoint> prepared(const Settings& given, std::uint32_t ranks) {
        auto endpoint = std::make_unique<Endpoint>(given);
        for (std::uint32_t peer = 0; peer < ranks; ++peer) {
            if (peer != given.rank) {
                endpoint->add_peer(peer, true);
            }
        }
        return endpoint;
    }

    /// Connects all of them at once, as each waits for the others.
    static void connect(const Endpoints& endpoints) {
        std::vector<std::exception_ptr> failures(endpoints.size());
        std::vector<std::thread> threads;
        for (std::size_t i = 0; i < endpoints.size(); ++i) {
            threads.emplace_back([&endpoints, &failures, i] {
                try {
                    endpoints[i]->connect();
                } catch (...) {
                    failures[i] = std::current_exception();
                }
            });
        }
        for (std::thread& thread : threads) {
            thread.join();
        }
        for (const std::exception_ptr& failure : failures) {
            if (failure) {
                std::rethrow_exception(failure);
            }
        }
    }

    [[nodiscard]] static Endpoints connected(std::uint32_t ranks, Settings common) {
        Endpoints endpoints;
        for (std::uint32_t rank = 0; rank < ranks; ++rank) {
            common.rank = rank;
            endpoints.push_back(prepared(common, ranks));
        }
        connect(endpoints);
        return endpoints;
    }

    [[nodiscard]] Endpoints connected(std::uint32_t ranks) const { return connected(ranks, settings(0)); }

    /// Sends a copy of the bytes that outlives all endpoints of the test.
    void send(Endpoint& endpoint, std::uint32_t peer, std::uint64_t key, const Bytes& bytes) {
        const Bytes& kept = sent_.emplace_back(bytes);
        endpoint.send(peer, key, kept.data(), kept.size());
    }

    std::string directory_;
    std::deque<Bytes> sent_;
};

/// Bytes that follow from the seed, so that a mixture of two messages is recognised.
[[nodiscard]] inline Bytes bytes_of(std::uint64_t seed, std::size_t count) {
    Bytes bytes(count);
    for (std::size_t i = 0; i < count; ++i) {
        bytes[i] = static_cast<std::byte>((seed + 1) * 0x9E3779B97F4A7C15U >> (8 * (i % 8)) ^ i / 8);
    }
    return bytes;
}

[[nodiscard]] inline bool holds(const Message& message, const Bytes& bytes) {
    return message.bytes() == bytes.size() && std::equal(bytes.begin(), bytes.end(), message.data());
}

}  // namespace megatronapp::transport::testing
