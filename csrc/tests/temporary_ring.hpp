#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "megatronapp/record.hpp"
#include "megatronapp/ring_reader.hpp"

namespace megatronapp::testing {

/// A path of its own for each test; whatever lies there is removed afterwards.
class RingTest : public ::testing::Test {
  public:
    RingTest(const RingTest&) = delete;
    RingTest& operator=(const RingTest&) = delete;
    RingTest(RingTest&&) = delete;
    RingTest& operator=(RingTest&&) = delete;

  protected:
    RingTest() {
        const auto* info = ::testing::UnitTest::GetInstance()->current_test_info();
        std::string name = std::string(info->test_suite_name()) + "." + info->name() + "." + std::to_string(::getpid());
        for (char& letter : name) {
            letter = letter == '/' ? '_' : letter;
        }
        path_ = (std::filesystem::temp_directory_path() / name).string();
    }

    ~RingTest() override { std::filesystem::remove_all(path_); }

    std::string path_;
};

/// A span whose every field follows from `i`, so that a mixture of two is recognised.
inline Span span_of(std::uint64_t i) {
    return {
        .start_ns = i,
        .duration_ns = (i % 1'000'003) * kDurationUnitNs,
        .step = static_cast<std::uint32_t>(i * 2654435761U),
        .ordinal = static_cast<std::uint32_t>(i ^ 0x5A5A5A5AU),
        .aux = static_cast<std::uint32_t>(i * 40503U),
        .comm = static_cast<std::uint16_t>(i),
        .microbatch = static_cast<std::uint16_t>(i * 7U),
        .kind = static_cast<std::uint8_t>(i),
        .chunk = static_cast<std::uint8_t>(i * 3U),
        .layer = static_cast<std::uint8_t>(i * 5U),
        .flags = static_cast<std::uint8_t>(i * 11U),
    };
}

inline bool is_whole(const Item<kRecordWords>& item) { return item == pack(span_of(item[0])); }

struct Batch {
    std::vector<Item<kRecordWords>> records;
    std::uint64_t lost = 0;
};

/// One read of at most `max` records.
inline Batch read_batch(RingReader& reader, std::uint64_t max) {
    Batch batch;
    batch.records.resize(reader.available(max));
    const Copied copied = reader.read(batch.records.data(), batch.records.size(), batch.lost);
    batch.records.resize(copied.skipped + copied.count);
    batch.records.erase(batch.records.begin(), batch.records.begin() + static_cast<std::ptrdiff_t>(copied.skipped));
    return batch;
}

}  // namespace megatronapp::testing
