/// How the files of the transport are laid out. All words are little endian, all changing ones are atomic.
///
/// A board belongs to a rank: bells that peers ring, progress words, and the log of a leader. An inbox belongs to a
/// directed pair of ranks: the sender announces filled slots, the receiver returns those that it has released.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "megatronapp/transport/shm/bell.hpp"
#include "megatronapp/transport/shm/checked_ring.hpp"

namespace megatronapp::transport {

static_assert(std::endian::native == std::endian::little, "the file format is little endian");

inline constexpr std::uint64_t kBoardMagic = 0x3144'524F'4250'5041;  // "APPBORD1"
inline constexpr std::uint64_t kInboxMagic = 0x3158'4F42'4E49'5041;  // "APINBOX1"
inline constexpr std::uint64_t kVersion = 5;
inline constexpr std::size_t kLine = 64;
inline constexpr std::uint64_t kPage = 4096;
inline constexpr std::uint64_t kDeviceLine = 512;  // how devices align what they allocate
inline constexpr std::uint32_t kProgressWords = 64;
inline constexpr std::uint64_t kLogEntries = 1024;
inline constexpr std::size_t kMaxFollowers = 63;
inline constexpr std::uint64_t kMaxSlots = 4096;
inline constexpr std::uint64_t kMaxSlotBytes = std::uint64_t{1} << 36U;

/// Where the slots of an inbox are.
enum class SlotMemory : std::uint64_t {
    kHost,    ///< in the file; filled and read by processors
    kDevice,  ///< in memory of the receiver's device, filled by the sender's
    kPinned,  ///< in the file, filled by the sender's device; the receiver's copies them to memory of its own
};

/// What a file is; written before it has a name, never changed.
struct Identity {
    std::uint64_t magic;
    std::uint64_t version;
    std::uint64_t file_bytes;
    std::uint64_t job;  ///< hash of its name
    std::uint64_t attempt;
    std::uint64_t owner;   ///< the rank that made the file
    std::uint64_t sender;  ///< of an inbox; of a board the owner
    std::uint64_t slot_bytes;
    std::uint64_t slots;
    std::uint64_t memory;  ///< SlotMemory of an inbox; of a board that of the slots between this rank and its equals
    std::uint64_t check;   ///< of all above

    [[nodiscard]] std::uint64_t computed_check() const noexcept {
        std::uint64_t hash = 0;
        for (const std::uint64_t word :
             {magic, version, file_bytes, job, attempt, owner, sender, slot_bytes, slots, memory}) {
            hash = mix(hash, word);
        }
        return hash;
    }
};

[[nodiscard]] inline std::uint64_t hash_of(std::string_view text) noexcept {
    std::uint64_t hash = 0;
    for (const char letter : text) {
        hash = mix(hash, static_cast<unsigned char>(letter));
    }
    return hash;
}

inline constexpr std::uint64_t kOpenWord = 0x4E45'504F;    // "OPEN"
inline constexpr std::uint64_t kClosedWord = 0x4553'4F43;  // "COSE"

struct alignas(kLine) Follower {
    Word rank;    ///< plus 1; 0: no follower
    Word cursor;  ///< number of entries that it has read
};

using LogEntry = SharedEntry<1>;

struct BoardLayout {
    Identity identity;
    alignas(kLine) Word state;     ///< kOpenWord or kClosedWord
    Word gave_up;                  ///< plus 1: a peer that had opened the board and could not connect
    alignas(kLine) Bell activity;  ///< messages, entries of a log, attached peers
    alignas(kLine) Bell credits;   ///< returned slots; own sends
    alignas(kLine) std::array<Word, kProgressWords> words;
    alignas(kLine) Word log_count;
    std::array<Follower, kMaxFollowers> followers;
    alignas(kLine) std::array<LogEntry, kLogEntries> log;
};

/// Words of an announcement: key, bytes, slot, start and end of the copy in nanoseconds of the monotonic clock.
inline constexpr std::size_t kAnnouncementWords = 6;
using Announcement = SharedEntry<kAnnouncementWords>;
using ReturnedSlot = SharedEntry<1>;

/// Handle of the receiver's device memory, as the driver made it; written before the file has a name.
struct SlotHandle {
    std::array<std::uint64_t, 8> words;
    std::uint64_t check;  ///< of all words

    [[nodiscard]] std::uint64_t computed_check() const noexcept {
        std::uint64_t hash = 0;
        for (const std::uint64_t word : words) {
            hash = mix(hash, word);
        }
        return hash;
    }
};

/// Times of a copy.
struct SlotTimes {
    Word sequence;         ///< of the message, stored last
    SharedEntry<2> times;  ///< start and end
};

/// The state of a slot that devices fill and return. A sequence number counts the messages of the slot, from 1.
struct alignas(kLine) SlotFlags {
    std::atomic<std::uint32_t> arrived;   ///< sequence of the message that is whole, by the sender's device
    std::atomic<std::uint32_t> released;  ///< sequence of the message that is not needed any more, by the receiver's
    /// Of the messages with even and odd sequences, by the sender: those of a message stay until the receiver has seen
    /// the next one of the slot.
    std::array<SlotTimes, 2> times;
};

struct InboxHeader {
    Identity identity;
    SlotHandle handle;
    alignas(kLine) Word attached;   ///< 1 once the sender has opened inbox and board
    alignas(kLine) Word announced;  ///< by the sender
    alignas(kLine) Word returned;   ///< by the receiver
    alignas(kLine) Word detached;   ///< 1 once the sender's device does not use the receiver's memory any more
};

/// Offsets within an inbox, which follow from its slots.
struct InboxLayout {
    std::uint64_t announcements;
    std::uint64_t returned_slots;
    std::uint64_t flags;
    std::uint64_t data;
    std::uint64_t slot_stride;
    std::uint64_t file_bytes;

    static constexpr InboxLayout of(std::uint64_t slots, std::uint64_t slot_bytes,
                                    SlotMemory memory = SlotMemory::kHost) noexcept {
        const std::uint64_t announcements = round_up(sizeof(InboxHeader), kLine);
        const std::uint64_t returned = round_up(announcements + slots * sizeof(Announcement), kLine);
        const std::uint64_t flags = round_up(returned + slots * sizeof(ReturnedSlot), kLine);
        const std::uint64_t flagged = memory == SlotMemory::kHost ? 0 : slots;
        const std::uint64_t data = round_up(flags + flagged * sizeof(SlotFlags), kPage);
        const std::uint64_t stride = round_up(slot_bytes, memory == SlotMemory::kHost ? kLine : kDeviceLine);
        const std::uint64_t in_file = memory == SlotMemory::kDevice ? 0 : slots;
        return {announcements, returned, flags, data, stride, round_up(data + in_file * stride, kPage)};
    }

    static constexpr std::uint64_t round_up(std::uint64_t bytes, std::uint64_t unit) noexcept {
        return (bytes + unit - 1) / unit * unit;
    }
};

}  // namespace megatronapp::transport
