#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

namespace megatronapp::transport {

/// Memory of a sender, and where it goes in a message.
struct MessagePart {
    const std::byte* data;
    std::uint64_t offset;  ///< of its first byte in the message
    std::uint64_t bytes;
};

/// The memory that a message is copied from, in the order of the message. Copies of this object share the list.
class MessageSource {
  public:
    MessageSource() = default;
    MessageSource(const std::byte* data, std::uint64_t bytes) noexcept : whole_{data, 0, bytes} {}

    /// A message of `bytes` bytes that is gathered from parts, given in any order; empty ones are dropped. Bytes of the
    /// message that no part covers arrive with any value. Raises TransportError if parts overlap or exceed the message.
    [[nodiscard]] static MessageSource gathered(std::vector<MessagePart> parts, std::uint64_t bytes);

    [[nodiscard]] std::span<const MessagePart> parts() const noexcept {
        if (parts_ != nullptr) {
            return *parts_;
        }
        return {&whole_, whole_.bytes == 0 ? 0U : 1U};
    }

  private:
    MessagePart whole_{};
    std::shared_ptr<const std::vector<MessagePart>> parts_;
};

/// Copies the parts to their places in a slot; a part that is in its place stays there.
void copy_parts(std::byte* slot, const MessageSource& source, std::uint64_t bytes) noexcept;

}  // namespace megatronapp::transport
