#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

namespace megatronapp::transport {

/// A message in a slot of its receiver, with the true times of its copy on the monotonic clock.
struct Arrival {
    std::uint64_t key;
    std::uint64_t bytes;
    std::uint32_t slot;
    std::uint64_t start_ns;
    std::uint64_t end_ns;
};

/// How messages reach one peer and come from it; chosen per peer when ranks connect. A path moves bytes between the
/// caller's memory and numbered slots, and carries two streams of small news between the ranks: filled slots one way,
/// returned slots the other. Keys, queues, credits, deadlines and failures belong to `Peer`, for all paths alike.
///
/// A path whose copies end later than `copy` returns (a copy engine, a network card) announces when the copy is
/// complete, in the order of its own stream.
class Path {
  public:
    Path() = default;
    Path(const Path&) = delete;
    Path& operator=(const Path&) = delete;
    Path(Path&&) = delete;
    Path& operator=(Path&&) = delete;
    virtual ~Path() = default;

    [[nodiscard]] virtual const char* name() const noexcept = 0;
    [[nodiscard]] virtual std::uint64_t slots() const noexcept = 0;
    [[nodiscard]] virtual std::uint64_t slot_bytes() const noexcept = 0;

    // The sending half. `copy` is called by any number of threads at once, for different slots; the others by one.
    virtual void copy(std::uint32_t slot, const std::byte* data, std::uint64_t bytes) noexcept = 0;
    virtual void announce(const Arrival& arrival) noexcept = 0;
    /// A slot that the receiver has returned, if there is one. Raises TransportCorruptError.
    [[nodiscard]] virtual std::optional<std::uint32_t> next_returned() = 0;

    // The receiving half; one thread at a time.
    /// A filled slot, if there is one; slot and bytes are within bounds. Raises TransportCorruptError.
    [[nodiscard]] virtual std::optional<Arrival> next_arrival() = 0;
    [[nodiscard]] virtual std::byte* slot_data(std::uint32_t slot) const noexcept = 0;
    virtual void give_back(std::uint32_t slot) noexcept = 0;
};

}  // namespace megatronapp::transport
