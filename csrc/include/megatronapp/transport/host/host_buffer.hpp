#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace megatronapp::transport {

/// Memory of this process alone, page-aligned and zero; its pages are taken at once.
class HostBuffer {
  public:
    /// Raises TransportError if there is not enough memory.
    explicit HostBuffer(std::uint64_t bytes);
    HostBuffer(const HostBuffer&) = delete;
    HostBuffer& operator=(const HostBuffer&) = delete;
    HostBuffer(HostBuffer&&) = delete;
    HostBuffer& operator=(HostBuffer&&) = delete;
    ~HostBuffer();

    [[nodiscard]] std::span<std::byte> bytes() const noexcept { return {data_, bytes_}; }

  private:
    std::uint64_t bytes_;
    std::byte* data_ = nullptr;
};

}  // namespace megatronapp::transport
