#include <algorithm>
#include <array>
#include <cstddef>
#include <random>
#include <span>

#include "fuzz.hpp"
#include "megatronapp/transport/shm/layout.hpp"
#include "megatronapp/transport/ucx/clock_distance.hpp"
#include "megatronapp/transport/ucx/wire.hpp"

namespace megatronapp::transport::fuzzing {
namespace {

using namespace ucx;  // NOLINT(google-build-using-namespace): all names of the wire

constexpr int kHeaders = 200;
constexpr Recipient kSelf{.rank = 2, .job = 77, .attempt = 3};

/// A number near a bound of some type or of the wire, or any.
std::uint64_t number(std::mt19937_64& random) {
    const std::array<std::uint64_t, 10> edges{0,           1,           kMaxSlots,   kMaxSlotBytes,     kProgressWords,
                                              kLogEntries, 1ULL << 32U, 1ULL << 63U, ~std::uint64_t{0}, random()};
    const std::uint64_t drawn = random() % 3 == 0 ? random() % 16 : edges.at(random() % edges.size());
    return drawn + random() % 3 - 1;
}

/// A header with a right check, of this rank or of any.
Header any_header(std::mt19937_64& random) {
    Header header{.kind = static_cast<Kind>(random() % (kLastKind + 3)),
                  .sender = static_cast<std::uint32_t>(number(random)),
                  .receiver = random() % 8 == 0 ? static_cast<std::uint32_t>(number(random)) : kSelf.rank,
                  .job = random() % 8 == 0 ? number(random) : kSelf.job,
                  .attempt = random() % 8 == 0 ? number(random) : kSelf.attempt,
                  .number = number(random),
                  .body = {}};
    for (std::uint64_t& word : header.body) {
        word = random() % 2 == 0 ? 0 : number(random);
    }
    return header;
}

template <typename Value>
bool is_refused(const Parsed<Value>& parsed) {
    require(parsed.value.has_value() == parsed.wrong.empty(), "a body is neither a value nor an error, or both");
    return !parsed.value;
}

/// Parses a body as every kind, and compares what is accepted with the bounds that the receiver relies on.
void parse(const Body& body, std::mt19937_64& random) {
    const Hello own{random() % (kMaxSlots + 1), random() % 65536};
    const std::uint64_t length = random() % 2 == 0 ? body[1] : number(random);
    const std::uint64_t before = number(random);
    const std::uint64_t now_ns = number(random);
    const auto hello = parse_hello(body);
    require(is_refused(hello) || (hello.value->slots <= kMaxSlots && hello.value->slot_bytes <= kMaxSlotBytes),
            "slots beyond the limits are accepted");
    const auto message = parse_message(body, length, own);
    require(is_refused(message) || (message.value->slot < own.slots && message.value->bytes <= own.slot_bytes &&
                                    message.value->bytes == length),
            "a message that fits no slot is accepted");
    const auto returned = parse_returned(body, own.slots);
    require(is_refused(returned) || *returned.value < own.slots, "a slot that does not exist is accepted");
    const auto word = parse_word(body);
    require(is_refused(word) || word.value->index < kProgressWords, "a word that does not exist is accepted");
    const auto entry = parse_entry(body, before);
    require(is_refused(entry) || (entry.value->number >= before && entry.value->number - before < kLogEntries),
            "an entry outside the log is accepted");
    const std::uint64_t appended = number(random);
    const auto read = parse_read(body, before, appended);
    require(is_refused(read) || (*read.value >= before && *read.value <= appended), "a place outside the log is read");
    const auto beat = parse_beat(body, now_ns);
    require(is_refused(beat) || (beat.value->echo_ns <= now_ns && beat.value->held_ns <= now_ns - beat.value->echo_ns),
            "an echo of the future is accepted");
    static_cast<void>(is_refused(parse_closing(body)));
}

}  // namespace

void fuzz_network(std::uint64_t seed) {
    std::mt19937_64 random(seed);
    ClockDistance clock;
    for (int i = 0; i < kHeaders; ++i) {
        const Header header = any_header(random);
        HeaderBytes bytes = encode(header);
        const bool changed = random() % 4 == 0;
        for (std::uint64_t left = changed ? 1 + random() % 4 : 0; left > 0; --left) {
            bytes.at(random() % bytes.size()) ^= static_cast<std::byte>(1U << random() % 8);
        }
        const std::size_t length = random() % 8 == 0 ? random() % bytes.size() : bytes.size();
        const Decoded decoded = decode(std::span<const std::byte>(bytes).first(length), kSelf);
        require(!decoded.header || *decoded.header == header, "a changed header is accepted");
        const bool own = header.receiver == kSelf.rank && header.job == kSelf.job && header.attempt == kSelf.attempt;
        const auto kind = static_cast<std::uint64_t>(header.kind);
        const bool valid = own && kind >= 1 && kind <= kLastKind && length == bytes.size();
        require(changed || decoded.header.has_value() == valid, "a header is taken for another one");
        parse(header.body, random);
        const std::uint64_t now_ns = number(random);
        clock.measured(number(random), now_ns, number(random));
        require(clock.own_time(number(random), now_ns) <= now_ns, "a time of a peer is in the future");
    }
}

}  // namespace megatronapp::transport::fuzzing
