#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "megatronapp/transport/path.hpp"

namespace megatronapp::transport {

/// A path whose slots are in memory of the host, where a device of this rank can copy into and out of them.
class HostSlots : public Path {
  public:
    /// Name of the path where this rank's end of it is a device.
    [[nodiscard]] virtual const char* staged_name() const noexcept = 0;
    /// The memory of received messages; page-aligned.
    [[nodiscard]] virtual std::span<std::byte> incoming() const noexcept = 0;
    /// The memory of the receiver's slots, page-aligned; empty where it is out of reach.
    [[nodiscard]] virtual std::span<std::byte> outgoing() const noexcept { return {}; }
    /// The receiver's slot in that memory. `start` does not copy what is there already.
    [[nodiscard]] virtual std::byte* outgoing_slot(std::uint32_t /*slot*/) const noexcept { return nullptr; }
};

}  // namespace megatronapp::transport
