#include "megatronapp/transport/ucx/wire.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <random>

#include "megatronapp/transport/ucx/clock_distance.hpp"

namespace megatronapp::transport::ucx {
namespace {

constexpr Recipient kSelf{.rank = 2, .job = 77, .attempt = 3};
constexpr Hello kSlots{4, 1024};

Header header_of(Kind kind, const Body& body) {
    return {.kind = kind, .sender = 1, .receiver = 2, .job = 77, .attempt = 3, .number = 9, .body = body};
}

TEST(Wire, AHeaderIsDecodedAsItWasEncoded) {
    for (std::uint64_t kind = 1; kind <= kLastKind; ++kind) {
        const Header header = header_of(static_cast<Kind>(kind), {1, 2, 3, 4, ~std::uint64_t{0}});
        EXPECT_EQ(decode(encode(header), kSelf).header, header);
    }
}

TEST(Wire, EveryChangedBitIsRejected) {
    const HeaderBytes good = encode(header_of(Kind::kMessage, {1, 2, 3, 4, 5}));
    for (std::size_t bit = 0; bit < 8 * good.size(); ++bit) {
        HeaderBytes bad = good;
        bad[bit / 8] ^= static_cast<std::byte>(1U << (bit % 8));
        EXPECT_FALSE(decode(bad, kSelf).header) << bit;
    }
    for (std::size_t length = 0; length < good.size(); ++length) {
        EXPECT_FALSE(decode({good.data(), length}, kSelf).header);
    }
}

TEST(Wire, RandomBytesAreForeign) {
    for (std::uint32_t seed = 0; seed < 1000; ++seed) {
        std::mt19937_64 random(seed);
        HeaderBytes bytes{};
        std::generate(bytes.begin(), bytes.end(), [&random] { return static_cast<std::byte>(random()); });
        const Decoded decoded = decode(bytes, kSelf);
        EXPECT_FALSE(decoded.header);
        EXPECT_EQ(decoded.rejection, Rejection::kForeign);
    }
}

TEST(Wire, OtherJobsAttemptsAndReceiversAreForeign) {
    const HeaderBytes bytes = encode(header_of(Kind::kBeat, {}));
    for (const Recipient& other : {Recipient{2, 78, 3}, Recipient{2, 77, 4}, Recipient{1, 77, 3}}) {
        const Decoded decoded = decode(bytes, other);
        EXPECT_FALSE(decoded.header);
        EXPECT_EQ(decoded.rejection, Rejection::kForeign);
    }
}

TEST(Wire, AnotherVersionIsNamed) {
    HeaderBytes bytes = encode(header_of(Kind::kBeat, {}));
    bytes[4] = std::byte{6};
    const Decoded decoded = decode(bytes, kSelf);
    EXPECT_EQ(decoded.rejection, Rejection::kVersion);
    EXPECT_EQ(decoded.version, 6U);
}

TEST(Wire, AKindThatDoesNotExistIsDamage) {
    for (const std::uint64_t kind : {std::uint64_t{0}, kLastKind + 1, std::uint64_t{255}}) {
        const Decoded decoded = decode(encode(header_of(static_cast<Kind>(kind), {})), kSelf);
        EXPECT_FALSE(decoded.header);
        EXPECT_EQ(decoded.rejection, Rejection::kDamaged);
    }
}

TEST(Wire, BodiesAreParsedWithinTheirBounds) {
    EXPECT_TRUE(parse_hello(body_of(Hello{kMaxSlots, kMaxSlotBytes})).value);
    EXPECT_TRUE(parse_hello(body_of(Hello{})).value);
    EXPECT_FALSE(parse_hello(body_of(Hello{kMaxSlots + 1, 1})).value);
    EXPECT_FALSE(parse_hello(body_of(Hello{1, kMaxSlotBytes + 1})).value);
    EXPECT_FALSE(parse_hello(body_of(Hello{0, 1})).value);
    EXPECT_FALSE(parse_hello({1, 1, 1}).value);

    const MessageNews message{.key = 8, .bytes = 1024, .slot = 3, .start_ns = 1, .queued_ns = 1};
    EXPECT_EQ(parse_message(body_of(message), 1024, kSlots).value->slot, 3U);
    EXPECT_FALSE(parse_message(body_of(message), 1023, kSlots).value);
    EXPECT_FALSE(parse_message({8, 1025, 3, 1, 1}, 1025, kSlots).value);
    EXPECT_FALSE(parse_message({8, 1024, 4, 1, 1}, 1024, kSlots).value);
    EXPECT_FALSE(parse_message({8, 0, std::uint64_t{1} << 32U, 1, 1}, 0, kSlots).value);
    EXPECT_FALSE(parse_message({8, 0, 0, 1, 1}, 0, Hello{}).value);

    EXPECT_TRUE(parse_returned(body_of_returned(3), 4).value);
    EXPECT_FALSE(parse_returned(body_of_returned(4), 4).value);
    EXPECT_FALSE(parse_returned({1, 1}, 4).value);
    EXPECT_TRUE(parse_word(body_of(WordNews{kProgressWords - 1, 5})).value);
    EXPECT_FALSE(parse_word(body_of(WordNews{kProgressWords, 5})).value);
    EXPECT_FALSE(parse_word({std::uint64_t{1} << 32U, 5}).value);
    EXPECT_TRUE(parse_entry(body_of(EntryNews{10 + kLogEntries - 1, 5}), 10).value);
    EXPECT_FALSE(parse_entry(body_of(EntryNews{10 + kLogEntries, 5}), 10).value);
    EXPECT_FALSE(parse_entry(body_of(EntryNews{9, 5}), 10).value);
    EXPECT_TRUE(parse_read(body_of_read(5), 5, 5).value);
    EXPECT_FALSE(parse_read(body_of_read(6), 5, 5).value);
    EXPECT_FALSE(parse_read(body_of_read(4), 5, 5).value);
    EXPECT_TRUE(parse_beat(body_of(Beat{~std::uint64_t{0}, 60, 40, true}), 100).value);
    EXPECT_FALSE(parse_beat(body_of(Beat{1, 60, 41, true}), 100).value);
    EXPECT_FALSE(parse_beat(body_of(Beat{1, 101, 0, true}), 100).value);
    EXPECT_FALSE(parse_beat({1, 60, 40, 2}, 100).value);
    EXPECT_EQ(parse_closing(body_of(Closing{12})).value->messages, 12U);
    EXPECT_FALSE(parse_closing({12, 0, 1}).value);
}

TEST(ClockDistance, IsWithinHalfARoundTripAndFollowsDrift) {
    ClockDistance clock;
    EXPECT_FALSE(clock.own_time(5, 10));
    clock.measured(1'000'040, 100, 100);  // sent 60 ago, taken to be 50 ago
    EXPECT_EQ(clock.own_time(1'000'040, 1000), 50U);
    clock.measured(1'000'130, 180, 20);  // a shorter round trip is better
    EXPECT_EQ(clock.own_time(1'000'130, 1000), 170U);
    clock.measured(2'000'000, 500, 400);  // a longer one is not
    EXPECT_EQ(clock.own_time(1'000'130, 1000), 170U);
    EXPECT_EQ(clock.own_time(1'000'130, 160), 160U);
    for (int i = 0; i < 64; ++i) {
        clock.measured(2'000'000, 500, 400);  // but the best estimate is not kept for ever
    }
    EXPECT_EQ(clock.own_time(2'000'000, 1000), 300U);
    clock.measured(10, 1'000'000, 20);  // a peer that booted later
    EXPECT_EQ(clock.own_time(10, 2'000'000), 999'990U);
}

}  // namespace
}  // namespace megatronapp::transport::ucx
