#include "megatronapp/transport/host/streamed_copy.hpp"

#include <gtest/gtest.h>

#include <cstring>

#include "ranks.hpp"

namespace megatronapp::transport::testing {
namespace {

constexpr std::size_t kMargin = 64;

TEST(StreamedCopy, CopiesEveryByteAndNoOther) {
    const Bytes source = bytes_of(3, kStreamedBytes + 2 * kMargin);
    for (const std::uint64_t bytes : {std::uint64_t{0}, std::uint64_t{1}, kStreamedBytes - 1, kStreamedBytes,
                                      kStreamedBytes + 1, kStreamedBytes + 63}) {
        for (const std::size_t offset : {0U, 1U, 16U}) {
            Bytes target(kMargin + bytes + kMargin, std::byte{0xEE});
            streamed_copy(target.data() + offset, source.data() + 3 - offset % 2, bytes, bytes);
            EXPECT_EQ(std::memcmp(target.data() + offset, source.data() + 3 - offset % 2, bytes), 0);
            for (std::size_t i = 0; i < offset; ++i) {
                EXPECT_EQ(target[i], std::byte{0xEE}) << bytes << " bytes from " << offset;
            }
            for (std::size_t i = offset + bytes; i < target.size(); ++i) {
                EXPECT_EQ(target[i], std::byte{0xEE}) << bytes << " bytes from " << offset;
            }
        }
    }
}

class StreamedMessages : public TransportTest {};

TEST_F(StreamedMessages, ArriveUnchanged) {
    Settings common = settings(0);
    common.slot_bytes = kStreamedBytes + 100;
    const Endpoints ranks = connected(2, common);
    for (std::uint64_t key = 0; key < 6; ++key) {
        const Bytes bytes = bytes_of(key, kStreamedBytes + 20 * key);
        send(*ranks[0], 1, key, bytes);
        EXPECT_TRUE(holds(ranks[1]->receive(0, key, kLongS), bytes));
    }
}

}  // namespace
}  // namespace megatronapp::transport::testing
