/// How a ring file is laid out: header, metadata, records. All words are little endian.
#pragma once

#include <array>
#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>

#include "megatronapp/word_ring.hpp"

namespace megatronapp {

static_assert(std::endian::native == std::endian::little, "the file format is little endian");

inline constexpr std::uint64_t kMagic = 0x32474E4952415041;  // "APARING2"
inline constexpr std::uint64_t kRecordBytes = 32;
inline constexpr std::size_t kRecordWords = kRecordBytes / sizeof(std::uint64_t);
inline constexpr std::uint64_t kMaxCapacity = std::uint64_t{1} << 26;       // 2 GiB of records
inline constexpr std::uint64_t kMaxMetadataBytes = std::uint64_t{1} << 24;  // 16 MiB
inline constexpr std::size_t kClockPairs = 8;
inline constexpr std::size_t kClockSlots = 2 * kClockPairs;  // more than are shown, so that a writer tears none of them
inline constexpr std::size_t kOpenSpanSlots = 2;             // a writer killed in one leaves the other whole
inline constexpr std::size_t kCacheLine = 64;

using RecordSlot = Slot<kRecordWords>;

/// Written once before the file appears under its name; never changes.
struct FixedHeader {
    std::uint64_t magic;
    std::uint64_t header_bytes;
    std::uint64_t file_bytes;
    std::uint64_t record_bytes;
    std::uint64_t capacity;
    std::uint64_t metadata_offset;
    std::uint64_t metadata_bytes;
    std::uint64_t records_offset;
    std::uint64_t attempt;
    std::uint64_t clock_id;
    std::uint64_t pid;
    std::array<char, 40> boot_id;  // text of a UUID, ended by a zero
    std::uint64_t checksum;        // of all above

    /// FNV-1a (Fowler, Noll, Vo), 64 bits: tells accidental damage, not malice.
    [[nodiscard]] std::uint64_t computed_checksum() const noexcept {
        std::uint64_t hash = 0xCBF2'9CE4'8422'2325;
        const auto* bytes = reinterpret_cast<const unsigned char*>(this);
        for (std::size_t i = 0; i < offsetof(FixedHeader, checksum); ++i) {
            hash = (hash ^ bytes[i]) * 0x100'0000'01B3;
        }
        return hash;
    }
};

struct RingHeader {
    FixedHeader fixed;

    alignas(kCacheLine) RingCounters records;
    std::atomic<std::uint64_t> heartbeat_ns;
    std::atomic<std::uint64_t> closed;

    alignas(kCacheLine) RingCounters open_span;
    std::array<Slot<2>, kOpenSpanSlots> open_span_slots;

    alignas(kCacheLine) RingCounters clock_pairs;
    std::array<Slot<2>, kClockSlots> clock_slots;

    alignas(kCacheLine) RingCounters device_span;  // written by a thread of its own
    std::array<Slot<2>, kOpenSpanSlots> device_span_slots;
};

inline constexpr std::uint64_t kPageBytes = 4096;

/// Offsets that follow from what the creator asks for.
struct Layout {
    std::uint64_t metadata_offset;
    std::uint64_t records_offset;
    std::uint64_t file_bytes;

    static constexpr Layout of(std::uint64_t capacity, std::uint64_t metadata_bytes) noexcept {
        const std::uint64_t metadata_offset = sizeof(RingHeader);
        const std::uint64_t records_offset =
            (metadata_offset + metadata_bytes + kPageBytes - 1) / kPageBytes * kPageBytes;
        return {metadata_offset, records_offset, records_offset + capacity * kRecordBytes};
    }
};

}  // namespace megatronapp
