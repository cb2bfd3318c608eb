#include "megatronapp/ring_reader.hpp"

#include <algorithm>
#include <array>
#include <cstring>

#include "megatronapp/error.hpp"

namespace megatronapp {
namespace {

[[noreturn]] void refuse(const std::string& path, const std::string& what) { throw RingError(path + ": " + what); }

/// The fixed part, only after every offset in it was found to lie in the file.
FixedHeader checked_header(const std::string& path, const MappedFile& file) {
    FixedHeader fixed{};
    std::memcpy(&fixed, file.data(), sizeof(fixed));
    if (fixed.magic != kMagic) {
        refuse(path, "not a ring of this version: wrong magic number");
    }
    if (fixed.header_bytes != sizeof(RingHeader) || fixed.record_bytes != kRecordBytes) {
        refuse(path, "not a ring of this version: sizes of header or record differ");
    }
    if (fixed.checksum != fixed.computed_checksum()) {
        refuse(path, "damaged ring: the checksum of its header is wrong");
    }
    if (fixed.capacity < 1 || fixed.capacity > kMaxCapacity || fixed.metadata_bytes > kMaxMetadataBytes) {
        refuse(path, "damaged ring: capacity " + std::to_string(fixed.capacity) + ", metadata of " +
                         std::to_string(fixed.metadata_bytes) + " bytes");
    }
    const Layout layout = Layout::of(fixed.capacity, fixed.metadata_bytes);
    if (fixed.metadata_offset != layout.metadata_offset || fixed.records_offset != layout.records_offset ||
        fixed.file_bytes != layout.file_bytes) {
        refuse(path, "damaged ring: its offsets contradict its capacity");
    }
    if (file.bytes() != layout.file_bytes) {
        refuse(path, "damaged ring: the file has " + std::to_string(file.bytes()) + " bytes, its header says " +
                         std::to_string(layout.file_bytes));
    }
    fixed.boot_id.back() = '\0';
    return fixed;
}

const RecordSlot* record_slots(const MappedFile& file, const FixedHeader& fixed) {
    return reinterpret_cast<const RecordSlot*>(file.data() + fixed.records_offset);
}

/// The newest span that was published in these slots, or none.
std::optional<OpenSpan> newest_span(const WordConsumer<2>& spans) {
    Item<2> item{};
    Copied copied{};
    std::uint64_t newest = 0;
    do {
        newest = spans.committed();
        if (newest == 0) {
            return std::nullopt;
        }
        copied = spans.copy(newest - 1, 1, &item);
    } while (copied.count == 0 && spans.committed() != newest);  // torn only by a producer that moved on
    const std::uint64_t word = item[0];
    if (copied.count == 0 || word >> 56U == 0) {
        return std::nullopt;
    }
    return OpenSpan{item[1], static_cast<std::uint32_t>(word), static_cast<std::uint16_t>(word >> 32U),
                    static_cast<std::uint8_t>(word >> 48U)};
}

}  // namespace

RingReader::RingReader(const std::string& path)
    : path_(path),
      file_(MappedFile::open(path, sizeof(RingHeader))),
      fixed_(checked_header(path, file_)),
      records_(header().records, record_slots(file_, fixed_), fixed_.capacity) {}

void RingReader::require_intact() const {
    if (!file_.intact()) {
        refuse(path_, "the file was cut short while it was open");
    }
}

std::uint64_t RingReader::available(std::uint64_t max_records) const {
    require_intact();
    const std::uint64_t end = records_.committed();
    if (end < next_) {
        refuse(path_, "damaged ring: its count went back from " + std::to_string(next_) + " to " + std::to_string(end));
    }
    return std::min({max_records, fixed_.capacity, end - next_});
}

Copied RingReader::read(Item<kRecordWords>* out, std::uint64_t room, std::uint64_t& lost) {
    require_intact();
    const Copied copied = records_.copy(next_, room, out);
    lost += copied.first - next_;
    next_ = copied.first + copied.count;
    return copied;
}

std::vector<ClockPair> RingReader::clock_pairs() const {
    const WordConsumer<2> pairs(header().clock_pairs, header().clock_slots.data(), kClockSlots);
    std::array<Item<2>, kClockPairs> items{};
    const std::uint64_t newest = pairs.committed();
    const Copied copied = pairs.copy(newest - std::min<std::uint64_t>(newest, kClockPairs), kClockPairs, items.data());
    std::vector<ClockPair> result;
    for (std::uint64_t i = 0; i < copied.count; ++i) {
        const Item<2>& item = items[copied.skipped + i];
        result.push_back({item[0], item[1]});
    }
    return result;
}

RingInfo RingReader::info() const {
    require_intact();
    const std::uint64_t head = records_.committed();
    return {
        .attempt = fixed_.attempt,
        .capacity = fixed_.capacity,
        .head = head,
        .overwritten = head > fixed_.capacity ? head - fixed_.capacity : 0,
        .closed = header().closed.load(std::memory_order_acquire) != 0,
        .boot_id = fixed_.boot_id.data(),
        .clock_id = fixed_.clock_id,
        .pid = fixed_.pid,
        .heartbeat_ns = header().heartbeat_ns.load(std::memory_order_relaxed),
        .open_span = newest_span({header().open_span, header().open_span_slots.data(), kOpenSpanSlots}),
        .device_span = newest_span({header().device_span, header().device_span_slots.data(), kOpenSpanSlots}),
        .clock_pairs = clock_pairs(),
        .metadata =
            std::string(reinterpret_cast<const char*>(file_.data()) + fixed_.metadata_offset, fixed_.metadata_bytes),
    };
}

}  // namespace megatronapp
