/// Matching of the records that two ranks write about one message.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace megatronapp::detect {

/// Numbers of communicators, by rank and slot, and what they are.
struct CommTable {
    std::span<const std::int64_t> numbers;  // [rank][slot], -1 without a communicator
    std::size_t slots;
    std::span<const std::int64_t> pairs;  // [number][2]: source and destination of a directed pair, else -1
};

inline constexpr std::size_t kMessageParts = 4;

/// Messages sorted by number of the pair, then ordinal. `parts` are numbers of rows, -1 where missing.
struct MatchedMessages {
    std::vector<std::int64_t> source;
    std::vector<std::int64_t> destination;
    std::vector<std::int64_t> ordinal;
    std::array<std::vector<std::int64_t>, kMessageParts> parts;
};

/// Matches rows (records with their rank) of the `kinds` of the four parts of a message. Of several rows that claim the
/// same part the last one is taken. Throws std::invalid_argument where sizes do not fit.
[[nodiscard]] MatchedMessages match_messages(std::span<const std::byte> rows, const CommTable& comms,
                                             const std::array<std::uint8_t, kMessageParts>& kinds);

/// Messages that follow each other and go the same way, from one clock to another.
struct Transfers {
    std::vector<std::int64_t> way;          // clock of the sender * number of clocks + that of the receiver
    std::vector<std::int64_t> shortest_ns;  // from post to receipt, each by the clock of its rank
};

/// Returns the shortest transfer of each run of messages that go the same way; a way may have several runs. `send` and
/// `receive` are rows, -1 where missing; `clock_of` numbers the clock of each rank. Throws std::invalid_argument for a
/// row or a rank that is none.
[[nodiscard]] Transfers shortest_transfers(std::span<const std::byte> rows, std::span<const std::int64_t> send,
                                           std::span<const std::int64_t> receive,
                                           std::span<const std::int64_t> clock_of);

}  // namespace megatronapp::detect
