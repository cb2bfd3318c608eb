#include "megatronapp/transport/ucx/wire.hpp"

#include <algorithm>
#include <cstring>

namespace megatronapp::transport::ucx {
namespace {

using Words = std::array<std::uint64_t, kHeaderWords>;

constexpr std::size_t kBodyAt = 5;
constexpr std::size_t kNumberAt = kBodyAt + kBodyWords;
constexpr std::size_t kCheckAt = kNumberAt + 1;
static_assert(kCheckAt + 1 == kHeaderWords);

std::uint64_t check_of_words(const Words& words) noexcept {
    std::uint64_t hash = 0;
    for (std::size_t i = 0; i < kCheckAt; ++i) {
        hash = mix(hash, words[i]);
    }
    return hash;
}

/// Whether all words from `first` on are 0, as the sender leaves those without a meaning.
bool rest_is_zero(const Body& body, std::size_t first) noexcept {
    return std::all_of(body.begin() + static_cast<std::ptrdiff_t>(first), body.end(),
                       [](std::uint64_t word) { return word == 0; });
}

std::string excess(const char* what) { return std::string(what) + " with more words than it has a meaning for"; }

}  // namespace

HeaderBytes encode(const Header& header) noexcept {
    Words words{};
    words[0] = kWireMagic | kWireVersion << 32U;
    words[1] = static_cast<std::uint64_t>(header.kind);
    words[2] = std::uint64_t{header.sender} | std::uint64_t{header.receiver} << 32U;
    words[3] = header.job;
    words[4] = header.attempt;
    std::copy(header.body.begin(), header.body.end(), words.begin() + kBodyAt);
    words[kNumberAt] = header.number;
    words[kCheckAt] = check_of_words(words);
    HeaderBytes bytes{};
    std::memcpy(bytes.data(), words.data(), bytes.size());
    return bytes;
}

Decoded decode(std::span<const std::byte> bytes, const Recipient& recipient) noexcept {
    Words words{};
    if (bytes.size() != kHeaderBytes) {
        return {};
    }
    std::memcpy(words.data(), bytes.data(), kHeaderBytes);
    const std::uint64_t version = words[0] >> 32U;
    if ((words[0] & 0xFFFF'FFFFU) != kWireMagic) {
        return {};
    }
    if (version != kWireVersion) {
        return {std::nullopt, Rejection::kVersion, version};
    }
    if (words[kCheckAt] != check_of_words(words)) {
        return {std::nullopt, Rejection::kDamaged};
    }
    Header header{.kind = Kind::kHello,
                  .sender = static_cast<std::uint32_t>(words[2]),
                  .receiver = static_cast<std::uint32_t>(words[2] >> 32U),
                  .job = words[3],
                  .attempt = words[4],
                  .number = words[kNumberAt],
                  .body = {}};
    if (header.receiver != recipient.rank || header.job != recipient.job || header.attempt != recipient.attempt) {
        return {};
    }
    if (words[1] == 0 || words[1] > kLastKind) {
        return {std::nullopt, Rejection::kDamaged};
    }
    header.kind = static_cast<Kind>(words[1]);
    std::copy_n(words.begin() + kBodyAt, kBodyWords, header.body.begin());
    return {header};
}

Body body_of(const Hello& hello) noexcept { return {hello.slots, hello.slot_bytes}; }
Body body_of(const MessageNews& news) noexcept {
    return {news.key, news.bytes, news.slot, news.start_ns, news.queued_ns};
}
Body body_of_returned(std::uint32_t slot) noexcept { return {slot}; }
Body body_of(const WordNews& news) noexcept { return {news.index, news.value}; }
Body body_of(const EntryNews& entry) noexcept { return {entry.number, entry.value}; }
Body body_of_read(std::uint64_t entries) noexcept { return {entries}; }
Body body_of(const Beat& beat) noexcept {
    return {beat.sent_ns, beat.echo_ns, beat.held_ns, beat.wants_reply ? std::uint64_t{1} : 0};
}
Body body_of(const Closing& closing) noexcept { return {closing.messages}; }

Parsed<Hello> parse_hello(const Body& body) {
    const Hello hello{body[0], body[1]};
    if (!rest_is_zero(body, 2)) {
        return {{}, excess("a greeting")};
    }
    if (hello.slots > kMaxSlots || hello.slot_bytes > kMaxSlotBytes || (hello.slots == 0) != (hello.slot_bytes == 0)) {
        return {{},
                std::to_string(hello.slots) + " slots of " + std::to_string(hello.slot_bytes) +
                    " bytes, which no rank has"};
    }
    return {hello};
}

Parsed<MessageNews> parse_message(const Body& body, std::uint64_t length, const Hello& own) {
    const auto [key, bytes, slot, start_ns, queued_ns] = body;
    if (slot >= own.slots || bytes > own.slot_bytes || bytes != length) {
        return {{},
                "a message of " + std::to_string(bytes) + " bytes with " + std::to_string(length) +
                    " bytes of data for slot " + std::to_string(slot) + ", of " + std::to_string(own.slots) +
                    " slots of " + std::to_string(own.slot_bytes) + " bytes"};
    }
    return {MessageNews{key, bytes, static_cast<std::uint32_t>(slot), start_ns, queued_ns}};
}

Parsed<std::uint32_t> parse_returned(const Body& body, std::uint64_t slots) {
    if (!rest_is_zero(body, 1)) {
        return {{}, excess("a returned slot")};
    }
    if (body[0] >= slots) {
        return {{}, "the returned slot " + std::to_string(body[0]) + " of " + std::to_string(slots)};
    }
    return {static_cast<std::uint32_t>(body[0])};
}

Parsed<WordNews> parse_word(const Body& body) {
    if (!rest_is_zero(body, 2)) {
        return {{}, excess("a progress word")};
    }
    if (body[0] >= kProgressWords) {
        return {{}, "progress word " + std::to_string(body[0]) + " of " + std::to_string(kProgressWords)};
    }
    return {WordNews{static_cast<std::uint32_t>(body[0]), body[1]}};
}

Parsed<EntryNews> parse_entry(const Body& body, std::uint64_t read) {
    if (!rest_is_zero(body, 2)) {
        return {{}, excess("an entry of a log")};
    }
    if (body[0] < read || body[0] - read >= kLogEntries) {
        return {{}, "entry " + std::to_string(body[0]) + " of a log of which " + std::to_string(read) + " were read"};
    }
    return {EntryNews{body[0], body[1]}};
}

Parsed<std::uint64_t> parse_read(const Body& body, std::uint64_t before, std::uint64_t appended) {
    if (!rest_is_zero(body, 1)) {
        return {{}, excess("a place in a log")};
    }
    if (body[0] < before || body[0] > appended) {
        return {{},
                "the place " + std::to_string(body[0]) + " after " + std::to_string(before) + " in a log of " +
                    std::to_string(appended) + " entries"};
    }
    return {body[0]};
}

Parsed<Beat> parse_beat(const Body& body, std::uint64_t now_ns) {
    const auto [sent_ns, echo_ns, held_ns, wants_reply, unused] = body;
    if (unused != 0 || wants_reply > 1) {
        return {{}, excess("a sign of life")};
    }
    if (echo_ns > now_ns || held_ns > now_ns - echo_ns) {
        return {{}, "the echo of a sign of life that this rank has not sent yet"};
    }
    return {Beat{sent_ns, echo_ns, held_ns, wants_reply == 1}};
}

Parsed<Closing> parse_closing(const Body& body) {
    if (!rest_is_zero(body, 1)) {
        return {{}, excess("the end")};
    }
    return {Closing{body[0]}};
}

}  // namespace megatronapp::transport::ucx
