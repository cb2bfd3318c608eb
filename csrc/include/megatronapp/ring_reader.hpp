#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "megatronapp/clock.hpp"
#include "megatronapp/mapped_file.hpp"
#include "megatronapp/ring_writer.hpp"

namespace megatronapp {

/// What a ring says about itself.
struct RingInfo {
    std::uint64_t attempt;
    std::uint64_t capacity;
    std::uint64_t head;         ///< records committed over the ring's life
    std::uint64_t overwritten;  ///< of those, how many the producer has replaced
    bool closed;
    std::string boot_id;
    std::uint64_t clock_id;
    std::uint64_t pid;
    std::uint64_t heartbeat_ns;
    std::optional<OpenSpan> open_span;
    std::optional<OpenSpan> device_span;  ///< where the device is, while it has work
    std::vector<ClockPair> clock_pairs;   ///< oldest first
    std::string metadata;
};

/// One reader of a ring file, with its own position; the producer may be alive, stopped or dead.
class RingReader {
  public:
    /// Raises RingError unless the file is a whole ring of this version.
    explicit RingReader(const std::string& path);

    /// Number of records that a read of at most `max_records` can bring now.
    [[nodiscard]] std::uint64_t available(std::uint64_t max_records) const;

    /// Copies the next whole records to `out`, which has room for `room`. `Copied::skipped` tells where they begin in
    /// it, and `lost` grows by those that were overwritten unread. Raises RingError if the file has shrunk.
    Copied read(Item<kRecordWords>* out, std::uint64_t room, std::uint64_t& lost);

    /// Index, in the ring's life, of the record that the next read would like to begin with.
    [[nodiscard]] std::uint64_t next_index() const noexcept { return next_; }

    [[nodiscard]] RingInfo info() const;

  private:
    void require_intact() const;
    [[nodiscard]] std::vector<ClockPair> clock_pairs() const;
    [[nodiscard]] const RingHeader& header() const noexcept {
        return *reinterpret_cast<const RingHeader*>(file_.data());
    }

    std::string path_;
    MappedFile file_;
    FixedHeader fixed_;
    WordConsumer<kRecordWords> records_;
    std::uint64_t next_ = 0;
};

}  // namespace megatronapp
