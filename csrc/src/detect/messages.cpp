#include "megatronapp/detect/messages.hpp"

#include <algorithm>
#include <cstring>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <string>
#include <utility>

#include "megatronapp/parallel.hpp"
#include "megatronapp/rank_records.hpp"
#include "megatronapp/record.hpp"

namespace megatronapp::detect {
namespace {

constexpr std::size_t kDurationAt = 8;
constexpr std::size_t kOrdinalAt = 16;
constexpr std::size_t kCommAt = 24;
constexpr std::size_t kKindAt = 28;
constexpr std::uint8_t kNoPart = 0xFF;

template <typename T>
T field_of(const std::byte* row, std::size_t offset) {
    T value{};
    std::memcpy(&value, row + offset, sizeof value);
    return value;
}

/// One row's part of a message.
struct Part {
    std::uint32_t ordinal;
    std::uint32_t row;
    std::uint32_t kind;
};

struct Claim {
    std::uint32_t pair;
    Part part;
};

using Places = std::vector<std::size_t>;

/// Sorts parts by ordinal, equal ones in their order: those of a pair are two runs in order, one of each rank.
void sort_by_ordinal(std::span<Part> parts) {
    const auto middle = std::ranges::is_sorted_until(parts, {}, &Part::ordinal);
    if (std::ranges::is_sorted(middle, parts.end(), {}, &Part::ordinal)) {
        std::ranges::inplace_merge(parts, middle, {}, &Part::ordinal);
    } else {
        std::ranges::stable_sort(parts, {}, &Part::ordinal);
    }
}

class Matcher {
  public:
    Matcher(const CommTable& comms, const std::array<std::uint8_t, kMessageParts>& kinds)
        : comms_(comms),
          ranks_(comms.slots == 0 ? 0 : comms.numbers.size() / comms.slots),
          pairs_(comms.pairs.size() / 2) {
        part_of_kind_.fill(kNoPart);
        for (std::size_t part = 0; part < kinds.size(); ++part) {
            part_of_kind_[kinds[part]] = static_cast<std::uint8_t>(part);
        }
    }

    [[nodiscard]] MatchedMessages match(std::span<const std::byte> rows) {
        sort_by_pair(rows);
        const std::size_t threads = parts_of(parts_.size());
        Places first(pairs_ + 1, 0);
        in_parts(pairs_, threads, [&](std::size_t, std::size_t begin, std::size_t end) {
            for (std::size_t pair = begin; pair < end; ++pair) {
                sort_by_ordinal(parts_of_pair(pair));
                first[pair + 1] = count_messages(parts_of_pair(pair));
            }
        });
        std::partial_sum(first.begin(), first.end(), first.begin());
        MatchedMessages found;
        for (auto* column : {&found.source, &found.destination, &found.ordinal}) {
            column->resize(first.back());
        }
        for (auto& column : found.parts) {
            column.resize(first.back());
        }
        in_parts(pairs_, threads, [&](std::size_t, std::size_t begin, std::size_t end) {
            for (std::size_t pair = begin; pair < end; ++pair) {
                write_messages(pair, first[pair], found);
            }
        });
        return found;
    }

  private:
    /// Sorts what rows say by pair: parts of number n from begin_[n] up to begin_[n + 1], in the order of the rows.
    void sort_by_pair(std::span<const std::byte> rows) {
        const std::size_t count = rows.size() / kRankRecordBytes;
        const std::size_t threads = parts_of(count);
        std::vector<std::vector<Claim>> claims(threads);
        std::vector<Places> next(threads, Places(pairs_, 0));
        in_parts(count, threads, [&](std::size_t part, std::size_t begin, std::size_t end) {
            claims[part].reserve(end - begin);
            for (std::size_t number = begin; number < end; ++number) {
                add_claim(&rows[number * kRankRecordBytes], number, claims[part], next[part]);
            }
        });
        begin_.assign(pairs_ + 1, 0);
        for (std::size_t pair = 0; pair < pairs_; ++pair) {
            std::size_t place = begin_[pair];
            for (Places& of_part : next) {
                place += std::exchange(of_part[pair], place);
            }
            begin_[pair + 1] = place;
        }
        parts_.resize(begin_.back());
        in_parts(count, threads, [&](std::size_t part, std::size_t, std::size_t) {
            for (const Claim& claim : claims[part]) {
                parts_[next[part][claim.pair]++] = claim.part;
            }
        });
    }

    void add_claim(const std::byte* row, std::size_t number, std::vector<Claim>& claims, Places& count) const {
        const std::uint8_t part = part_of_kind_[field_of<std::uint8_t>(row, kKindAt)];
        const std::int64_t pair = part == kNoPart ? -1 : pair_of(row);
        if (pair < 0) {
            return;
        }
        claims.push_back({.pair = static_cast<std::uint32_t>(pair),
                          .part = {.ordinal = field_of<std::uint32_t>(row, kOrdinalAt),
                                   .row = static_cast<std::uint32_t>(number),
                                   .kind = part}});
        ++count[static_cast<std::size_t>(pair)];
    }

    /// The number of a row's directed pair; -1 without.
    [[nodiscard]] std::int64_t pair_of(const std::byte* row) const {
        const auto rank = field_of<std::int32_t>(row, kRecordBytes);
        const std::size_t slot = field_of<std::uint16_t>(row, kCommAt);
        if (rank < 0 || static_cast<std::size_t>(rank) >= ranks_ || slot >= comms_.slots) {
            return -1;
        }
        const std::int64_t number = comms_.numbers[(static_cast<std::size_t>(rank) * comms_.slots) + slot];
        return number < 0 || comms_.pairs[2 * static_cast<std::size_t>(number)] < 0 ? -1 : number;
    }

    [[nodiscard]] std::span<Part> parts_of_pair(std::size_t pair) {
        return std::span(parts_).subspan(begin_[pair], begin_[pair + 1] - begin_[pair]);
    }

    /// The number of ordinals among sorted parts.
    [[nodiscard]] static std::size_t count_messages(std::span<const Part> parts) {
        std::size_t count = parts.empty() ? 0 : 1;
        for (std::size_t place = 1; place < parts.size(); ++place) {
            count += parts[place].ordinal == parts[place - 1].ordinal ? 0 : 1;
        }
        return count;
    }

    /// Writes the messages of a pair from a place on.
    void write_messages(std::size_t pair, std::size_t place, MatchedMessages& found) {
        const std::span<const Part> parts = parts_of_pair(pair);
        for (std::size_t number = 0; number < parts.size(); ++number) {
            const Part& part = parts[number];
            if (number == 0 || part.ordinal != parts[number - 1].ordinal) {
                place += number == 0 ? 0 : 1;
                found.source[place] = comms_.pairs[2 * pair];
                found.destination[place] = comms_.pairs[(2 * pair) + 1];
                found.ordinal[place] = part.ordinal;
                for (auto& rows : found.parts) {
                    rows[place] = -1;
                }
            }
            found.parts[part.kind][place] = part.row;
        }
    }

    const CommTable& comms_;
    std::size_t ranks_;
    std::size_t pairs_;
    std::array<std::uint8_t, 256> part_of_kind_{};
    Places begin_;
    std::vector<Part> parts_;
};

void check(std::span<const std::byte> rows, const CommTable& comms) {
    if (rows.size() % kRankRecordBytes != 0 || comms.pairs.size() % 2 != 0 ||
        (comms.slots != 0 && comms.numbers.size() % comms.slots != 0)) {
        throw std::invalid_argument("match_messages: " + std::to_string(rows.size()) + " bytes of rows, " +
                                    std::to_string(comms.numbers.size()) + " numbers in " +
                                    std::to_string(comms.slots) + " slots and " + std::to_string(comms.pairs.size()) +
                                    " ends of pairs do not fit");
    }
    if (rows.size() / kRankRecordBytes > std::numeric_limits<std::uint32_t>::max()) {
        throw std::invalid_argument("match_messages: " + std::to_string(rows.size()) + " bytes are too many rows");
    }
    const auto count = static_cast<std::int64_t>(comms.pairs.size() / 2);
    for (const std::int64_t number : comms.numbers) {
        if (number >= count) {
            throw std::invalid_argument("match_messages: communicator " + std::to_string(number) + " is none of the " +
                                        std::to_string(count));
        }
    }
}

class TransferReader {
  public:
    TransferReader(std::span<const std::byte> rows, std::span<const std::int64_t> clock_of)
        : rows_(rows), clock_of_(clock_of) {
        for (const std::int64_t clock : clock_of) {
            clocks_ = std::max(clocks_, clock + 1);
        }
    }

    /// Adds a message to the run that it continues, or begins another.
    void add(std::int64_t send, std::int64_t receive, Transfers& found) const {
        const std::byte* const posted = row_at(send);
        const std::byte* const received = row_at(receive);
        const std::int64_t way = (clock_at(posted) * clocks_) + clock_at(received);
        // Unsigned, as damaged records may overflow: what they say is wrong, but defined.
        const auto transfer_ns = static_cast<std::int64_t>(end_of(received) - start_of(posted));
        if (found.way.empty() || found.way.back() != way) {
            found.way.push_back(way);
            found.shortest_ns.push_back(transfer_ns);
        }
        found.shortest_ns.back() = std::min(found.shortest_ns.back(), transfer_ns);
    }

  private:
    [[nodiscard]] const std::byte* row_at(std::int64_t number) const {
        if (static_cast<std::size_t>(number) >= rows_.size() / kRankRecordBytes) {
            throw std::invalid_argument("shortest_transfers: " + std::to_string(number) + " is none of the " +
                                        std::to_string(rows_.size() / kRankRecordBytes) + " rows");
        }
        return &rows_[static_cast<std::size_t>(number) * kRankRecordBytes];
    }

    [[nodiscard]] std::int64_t clock_at(const std::byte* row) const {
        const auto rank = field_of<std::int32_t>(row, kRecordBytes);
        if (rank < 0 || static_cast<std::size_t>(rank) >= clock_of_.size()) {
            throw std::invalid_argument("shortest_transfers: rank " + std::to_string(rank) + " is none of the " +
                                        std::to_string(clock_of_.size()) + " with a clock");
        }
        return clock_of_[static_cast<std::size_t>(rank)];
    }

    static std::uint64_t start_of(const std::byte* row) { return field_of<std::uint64_t>(row, 0); }

    static std::uint64_t end_of(const std::byte* row) {
        return start_of(row) + (std::uint64_t{field_of<std::uint32_t>(row, kDurationAt)} * kDurationUnitNs);
    }

    std::span<const std::byte> rows_;
    std::span<const std::int64_t> clock_of_;
    std::int64_t clocks_ = 0;
};

}  // namespace

Transfers shortest_transfers(std::span<const std::byte> rows, std::span<const std::int64_t> send,
                             std::span<const std::int64_t> receive, std::span<const std::int64_t> clock_of) {
    if (send.size() != receive.size()) {
        throw std::invalid_argument("shortest_transfers: " + std::to_string(send.size()) + " sends and " +
                                    std::to_string(receive.size()) + " receives; give one of each per message");
    }
    const TransferReader reader(rows, clock_of);
    std::vector<Transfers> parts(parts_of(send.size()));
    in_parts(send.size(), parts.size(), [&](std::size_t part, std::size_t begin, std::size_t end) {
        for (std::size_t message = begin; message < end; ++message) {
            if (send[message] >= 0 && receive[message] >= 0) {
                reader.add(send[message], receive[message], parts[part]);
            }
        }
    });
    Transfers found = std::move(parts.front());
    for (const Transfers& own : std::span(parts).subspan(1)) {
        found.way.insert(found.way.end(), own.way.begin(), own.way.end());
        found.shortest_ns.insert(found.shortest_ns.end(), own.shortest_ns.begin(), own.shortest_ns.end());
    }
    return found;
}

MatchedMessages match_messages(std::span<const std::byte> rows, const CommTable& comms,
                               const std::array<std::uint8_t, kMessageParts>& kinds) {
    check(rows, comms);
    return Matcher(comms, kinds).match(rows);
}

}  // namespace megatronapp::detect
