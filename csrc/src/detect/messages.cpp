#include "megatronapp/detect/messages.hpp"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "megatronapp/rank_records.hpp"

namespace megatronapp::detect {
namespace {

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
    std::uint32_t kind;
    std::int64_t row;
};

struct Claim {
    std::size_t pair;
    Part part;
};

class Matcher {
  public:
    Matcher(const CommTable& comms, const std::array<std::uint8_t, kMessageParts>& kinds)
        : comms_(comms), ranks_(comms.slots == 0 ? 0 : comms.numbers.size() / comms.slots) {
        part_of_kind_.fill(kNoPart);
        for (std::size_t part = 0; part < kinds.size(); ++part) {
            part_of_kind_[kinds[part]] = static_cast<std::uint8_t>(part);
        }
    }

    /// Parts of each pair, those of number n from begin[n] up to begin[n + 1], in the order of the rows.
    void sort_by_pair(std::span<const std::byte> rows) {
        const std::size_t count = comms_.pairs.size() / 2;
        begin.assign(count + 1, 0);
        std::vector<Claim> claims;
        for (std::size_t offset = 0; offset < rows.size(); offset += kRankRecordBytes) {
            const std::byte* row = &rows[offset];
            const std::uint8_t part = part_of_kind_[field_of<std::uint8_t>(row, kKindAt)];
            if (part == kNoPart) {
                continue;
            }
            const std::int64_t pair = pair_of(row);
            if (pair < 0) {
                continue;
            }
            claims.push_back({.pair = static_cast<std::size_t>(pair),
                              .part = {.ordinal = field_of<std::uint32_t>(row, kOrdinalAt),
                                       .kind = part,
                                       .row = static_cast<std::int64_t>(offset / kRankRecordBytes)}});
            ++begin[claims.back().pair + 1];
        }
        for (std::size_t number = 1; number < begin.size(); ++number) {
            begin[number] += begin[number - 1];
        }
        parts.resize(claims.size());
        std::vector<std::size_t> next(begin);
        for (const Claim& claim : claims) {
            parts[next[claim.pair]++] = claim.part;
        }
    }

    std::vector<std::size_t> begin;
    std::vector<Part> parts;

  private:
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

    const CommTable& comms_;
    std::size_t ranks_;
    std::array<std::uint8_t, 256> part_of_kind_{};
};

void check(std::span<const std::byte> rows, const CommTable& comms) {
    if (rows.size() % kRankRecordBytes != 0 || comms.pairs.size() % 2 != 0 ||
        (comms.slots != 0 && comms.numbers.size() % comms.slots != 0)) {
        throw std::invalid_argument("match_messages: " + std::to_string(rows.size()) + " bytes of rows, " +
                                    std::to_string(comms.numbers.size()) + " numbers in " +
                                    std::to_string(comms.slots) + " slots and " + std::to_string(comms.pairs.size()) +
                                    " ends of pairs do not fit");
    }
    const auto count = static_cast<std::int64_t>(comms.pairs.size() / 2);
    for (const std::int64_t number : comms.numbers) {
        if (number >= count) {
            throw std::invalid_argument("match_messages: communicator " + std::to_string(number) + " is none of the " +
                                        std::to_string(count));
        }
    }
}

}  // namespace

MatchedMessages match_messages(std::span<const std::byte> rows, const CommTable& comms,
                               const std::array<std::uint8_t, kMessageParts>& kinds) {
    check(rows, comms);
    Matcher matcher(comms, kinds);
    matcher.sort_by_pair(rows);
    MatchedMessages found;
    for (std::size_t pair = 0; pair + 1 < matcher.begin.size(); ++pair) {
        const auto own =
            std::span(matcher.parts).subspan(matcher.begin[pair], matcher.begin[pair + 1] - matcher.begin[pair]);
        std::ranges::stable_sort(own, {}, &Part::ordinal);
        for (std::size_t place = 0; place < own.size(); ++place) {
            if (place == 0 || own[place].ordinal != own[place - 1].ordinal) {
                found.source.push_back(comms.pairs[2 * pair]);
                found.destination.push_back(comms.pairs[(2 * pair) + 1]);
                found.ordinal.push_back(own[place].ordinal);
                for (auto& part : found.parts) {
                    part.push_back(-1);
                }
            }
            found.parts[own[place].kind].back() = own[place].row;
        }
    }
    return found;
}

}  // namespace megatronapp::detect
