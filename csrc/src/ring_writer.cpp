#include "megatronapp/ring_writer.hpp"

#include <unistd.h>

#include <cstring>
#include <ctime>
#include <new>

#include "megatronapp/clock.hpp"
#include "megatronapp/error.hpp"
#include "megatronapp/fork_count.hpp"

namespace megatronapp {
namespace {

constexpr std::uint64_t kOpenBit = std::uint64_t{1} << 56U;

void require(bool condition, const std::string& path, const std::string& what) {
    if (!condition) {
        throw RingError(path + ": " + what);
    }
}

void write_fixed(std::byte* data, const Layout& layout, std::uint64_t capacity, std::uint64_t attempt,
                 std::string_view metadata) {
    auto* header = new (data) RingHeader{};
    header->fixed = FixedHeader{
        .magic = kMagic,
        .header_bytes = sizeof(RingHeader),
        .file_bytes = layout.file_bytes,
        .record_bytes = kRecordBytes,
        .capacity = capacity,
        .metadata_offset = layout.metadata_offset,
        .metadata_bytes = metadata.size(),
        .records_offset = layout.records_offset,
        .attempt = attempt,
        .clock_id = CLOCK_MONOTONIC,
        .pid = static_cast<std::uint64_t>(::getpid()),
        .boot_id = {},
        .checksum = 0,
    };
    const std::string boot = boot_id();
    boot.copy(header->fixed.boot_id.data(), header->fixed.boot_id.size() - 1);
    header->fixed.checksum = header->fixed.computed_checksum();
    std::memcpy(data + layout.metadata_offset, metadata.data(), metadata.size());
}

MappedFile create_file(const std::string& path, std::uint64_t capacity, std::uint64_t attempt,
                       std::string_view metadata) {
    require(capacity >= 1 && capacity <= kMaxCapacity, path,
            "a ring holds 1 to " + std::to_string(kMaxCapacity) + " records, not " + std::to_string(capacity));
    require(metadata.size() <= kMaxMetadataBytes, path,
            "metadata of " + std::to_string(metadata.size()) + " bytes, at most " + std::to_string(kMaxMetadataBytes));
    const Layout layout = Layout::of(capacity, metadata.size());
    MappedFile file = MappedFile::create(path, layout.file_bytes);
    write_fixed(file.data(), layout, capacity, attempt, metadata);
    return file;
}

Item<2> packed(const OpenSpan& span) noexcept {
    return {kOpenBit | span.step | std::uint64_t{span.microbatch} << 32U | std::uint64_t{span.kind} << 48U,
            span.start_ns};
}

RecordSlot* record_slots(const MappedFile& file) {
    const auto* header = reinterpret_cast<const RingHeader*>(file.data());
    return reinterpret_cast<RecordSlot*>(file.data() + header->fixed.records_offset);
}

}  // namespace

RingWriter::RingWriter(const std::string& path, std::uint64_t capacity, std::uint64_t attempt,
                       std::string_view metadata)
    : path_(path),
      made_at_fork_(fork_count()),
      file_(create_file(path, capacity, attempt, metadata)),
      records_(header().records, record_slots(file_), capacity),
      open_spans_(header().open_span, header().open_span_slots.data(), kOpenSpanSlots),
      clock_pairs_(header().clock_pairs, header().clock_slots.data(), kClockSlots),
      device_spans_(header().device_span, header().device_span_slots.data(), kOpenSpanSlots) {
    heartbeat();
    clock_pair();
    file_.publish();
}

bool RingWriter::in_forked_child() const noexcept { return fork_count() != made_at_fork_; }

void RingWriter::record(const Span& span) noexcept {
    if (closed_ || in_forked_child()) {
        return;
    }
    records_.push(pack(span));
    heartbeat();
}

void RingWriter::open_span(const OpenSpan& span) noexcept {
    if (depth_ < kMaxOpenSpans) {
        stack_[depth_] = span;
    }
    ++depth_;
    show_open_span();
}

void RingWriter::close_span() noexcept {
    if (depth_ > 0) {
        --depth_;
        show_open_span();
    }
}

void RingWriter::show_open_span() noexcept {
    if (in_forked_child()) {
        return;
    }
    if (depth_ == 0) {
        open_spans_.push({0, 0});
        return;
    }
    open_spans_.push(packed(stack_[depth_ <= kMaxOpenSpans ? depth_ - 1 : kMaxOpenSpans - 1]));
}

void RingWriter::show_device_span(const std::optional<OpenSpan>& span) noexcept {
    if (!in_forked_child()) {
        device_spans_.push(span ? packed(*span) : Item<2>{0, 0});
    }
}

void RingWriter::heartbeat() noexcept {
    if (!in_forked_child()) {
        header().heartbeat_ns.store(coarse_monotonic_ns(), std::memory_order_relaxed);
    }
}

void RingWriter::clock_pair() noexcept {
    if (in_forked_child()) {
        return;
    }
    const ClockPair pair = read_clock_pair();
    clock_pairs_.push({pair.monotonic_ns, pair.realtime_ns});
}

void RingWriter::close(bool unlink) {
    if (in_forked_child()) {
        return;
    }
    closed_ = true;
    header().closed.store(1, std::memory_order_release);
    if (unlink) {
        ::unlink(path_.c_str());
    }
}

}  // namespace megatronapp
