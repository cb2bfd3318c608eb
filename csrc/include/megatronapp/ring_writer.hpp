#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "megatronapp/mapped_file.hpp"
#include "megatronapp/record.hpp"

namespace megatronapp {

/// What a producer is inside of.
struct OpenSpan {
    std::uint64_t start_ns;
    std::uint32_t step;
    std::uint16_t microbatch;
    std::uint8_t kind;

    bool operator==(const OpenSpan&) const = default;
};

/// The single producer of a ring file. One thread at a time; no call but the constructor blocks or allocates. Records
/// and the device's span may be written by another thread than spans of the host and heartbeats.
///
/// A forked child inherits the object and the mapping, and with them hooks that record. It would be a second producer
/// in the same slots, so that in a child every call does nothing.
class RingWriter {
  public:
    static constexpr std::size_t kMaxOpenSpans = 16;

    /// Makes the file with all its memory, so that a full file system is found here and not by SIGBUS in training.
    RingWriter(const std::string& path, std::uint64_t capacity, std::uint64_t attempt, std::string_view metadata);
    RingWriter(RingWriter&&) = delete;
    RingWriter& operator=(RingWriter&&) = delete;
    RingWriter(const RingWriter&) = delete;
    RingWriter& operator=(const RingWriter&) = delete;
    /// Leaves the file as it is: a writer that goes without close() looks like one that died.
    ~RingWriter() = default;

    void record(const Span& span) noexcept;

    /// Spans nest: closing the inner one shows the outer one again. Beyond kMaxOpenSpans they are only counted.
    void open_span(const OpenSpan& span) noexcept;
    void close_span() noexcept;

    /// Publishes the span that the device is inside of; none while the device has nothing to do or is not known.
    void show_device_span(const std::optional<OpenSpan>& span) noexcept;

    /// Stores the time of the last tick; record() does it too.
    void heartbeat() noexcept;
    void clock_pair() noexcept;

    /// Marks the ring as closed; nothing is recorded from then on. Removes the file if asked.
    void close(bool unlink);

    [[nodiscard]] bool closed() const noexcept { return closed_; }

  private:
    [[nodiscard]] bool in_forked_child() const noexcept;
    void show_open_span() noexcept;
    [[nodiscard]] RingHeader& header() const noexcept { return *reinterpret_cast<RingHeader*>(file_.data()); }

    std::string path_;
    std::uint64_t made_at_fork_;
    MappedFile file_;
    WordProducer<kRecordWords> records_;
    WordProducer<2> open_spans_;
    WordProducer<2> clock_pairs_;
    WordProducer<2> device_spans_;
    std::array<OpenSpan, kMaxOpenSpans> stack_{};
    std::size_t depth_ = 0;
    bool closed_ = false;
};

}  // namespace megatronapp
