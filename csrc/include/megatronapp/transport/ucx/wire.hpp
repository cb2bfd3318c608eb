/// Headers of the active messages between ranks on different nodes. Pure functions of bytes: no UCX, no state.
///
/// A header is 12 words, little endian: magic and version, kind, sender and receiver, job, attempt, five words that the
/// kind gives a meaning, and two that make changes visible: a number and a check. What a header says is used only
/// after `decode` and the function of its kind have compared all of it with what the receiver knows.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "megatronapp/transport/shm/layout.hpp"

namespace megatronapp::transport::ucx {

inline constexpr std::uint64_t kWireMagic = 0x5843'5541;  // "AUCX"; the version is in the upper half of the word
inline constexpr std::uint64_t kWireVersion = 1;
inline constexpr std::size_t kBodyWords = 5;
inline constexpr std::size_t kHeaderWords = 12;
inline constexpr std::size_t kHeaderBytes = kHeaderWords * sizeof(std::uint64_t);

enum class Kind : std::uint8_t {
    kHello = 1,     ///< first news of a rank: its slots and their size
    kMessage = 2,   ///< data for a slot of the receiver
    kReturned = 3,  ///< a slot that the receiver of a message has released
    kWord = 4,      ///< a progress word
    kEntry = 5,     ///< an entry of the sender's log
    kRead = 6,      ///< how many entries of the receiver's log the sender has read
    kBeat = 7,      ///< sign of life; measures the round trip and the distance of the clocks
    kClosing = 8,   ///< the last news of a rank
};
inline constexpr std::uint64_t kLastKind = 8;

using HeaderBytes = std::array<std::byte, kHeaderBytes>;
using Body = std::array<std::uint64_t, kBodyWords>;

struct Header {
    Kind kind;
    std::uint32_t sender;
    std::uint32_t receiver;
    std::uint64_t job;  ///< hash of its name
    std::uint64_t attempt;
    std::uint64_t number;  ///< of this header among those from the sender to the receiver
    Body body;

    bool operator==(const Header&) const = default;
};

/// Why bytes are not a header for this rank.
enum class Rejection : std::uint8_t {
    kForeign,  ///< not of this transport, or of another job, attempt or receiver; any program can send that
    kVersion,  ///< of another version of this transport
    kDamaged,  ///< of this transport, with contents that no rank writes
};

struct Decoded {
    std::optional<Header> header;  ///< absent if rejected
    Rejection rejection = Rejection::kForeign;
    std::uint64_t version = kWireVersion;
};

/// What a receiver compares all headers with.
struct Recipient {
    std::uint32_t rank;
    std::uint64_t job;
    std::uint64_t attempt;
};

[[nodiscard]] HeaderBytes encode(const Header& header) noexcept;
[[nodiscard]] Decoded decode(std::span<const std::byte> bytes, const Recipient& recipient) noexcept;

struct Hello {
    std::uint64_t slots;  ///< for messages of the receiver of this header; 0 if none are exchanged
    std::uint64_t slot_bytes;
};

struct MessageNews {
    std::uint64_t key;
    std::uint64_t bytes;
    std::uint32_t slot;
    std::uint64_t start_ns;   ///< of the sender's clock
    std::uint64_t queued_ns;  ///< likewise
};

struct WordNews {
    std::uint32_t index;
    std::uint64_t value;
};

struct EntryNews {
    std::uint64_t number;  ///< of the entry in the log, from 0
    std::uint64_t value;
};

struct Beat {
    std::uint64_t sent_ns;  ///< of the sender's clock
    std::uint64_t echo_ns;  ///< `sent_ns` of the last beat that the sender got, 0 if none
    std::uint64_t held_ns;  ///< from then until this one was sent
    bool wants_reply;
};

struct Closing {
    std::uint64_t messages;  ///< that the sender has delivered in all
};

[[nodiscard]] Body body_of(const Hello& hello) noexcept;
[[nodiscard]] Body body_of(const MessageNews& news) noexcept;
[[nodiscard]] Body body_of_returned(std::uint32_t slot) noexcept;
[[nodiscard]] Body body_of(const WordNews& news) noexcept;
[[nodiscard]] Body body_of(const EntryNews& entry) noexcept;
[[nodiscard]] Body body_of_read(std::uint64_t entries) noexcept;
[[nodiscard]] Body body_of(const Beat& beat) noexcept;
[[nodiscard]] Body body_of(const Closing& closing) noexcept;

/// The meaning of a body, or what is wrong with it as the text of an error.
template <typename Value>
struct Parsed {
    std::optional<Value> value;
    std::string wrong = {};
};

[[nodiscard]] Parsed<Hello> parse_hello(const Body& body);
/// `length`: bytes of data that came with the header; slots and their size are those of this rank.
[[nodiscard]] Parsed<MessageNews> parse_message(const Body& body, std::uint64_t length, const Hello& own);
[[nodiscard]] Parsed<std::uint32_t> parse_returned(const Body& body, std::uint64_t slots);
[[nodiscard]] Parsed<WordNews> parse_word(const Body& body);
/// `read`: entries of this log that this rank has read; the sender is at most a full log ahead.
[[nodiscard]] Parsed<EntryNews> parse_entry(const Body& body, std::uint64_t read);
/// `before`: what the sender had read at its last such news; `appended`: entries of this rank's log.
[[nodiscard]] Parsed<std::uint64_t> parse_read(const Body& body, std::uint64_t before, std::uint64_t appended);
/// `now_ns`: of this rank's clock, which no echo is later than.
[[nodiscard]] Parsed<Beat> parse_beat(const Body& body, std::uint64_t now_ns);
[[nodiscard]] Parsed<Closing> parse_closing(const Body& body);

}  // namespace megatronapp::transport::ucx
