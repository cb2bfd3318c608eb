#include "megatronapp/transport/message_source.hpp"

#include <algorithm>
#include <string>
#include <utility>

#include "megatronapp/transport/errors.hpp"
#include "megatronapp/transport/host/streamed_copy.hpp"

namespace megatronapp::transport {
namespace {

std::string text_of(const MessagePart& part) {
    return "the part of " + std::to_string(part.bytes) + " bytes at " + std::to_string(part.offset);
}

}  // namespace

MessageSource MessageSource::gathered(std::vector<MessagePart> parts, std::uint64_t bytes) {
    std::erase_if(parts, [](const MessagePart& part) { return part.bytes == 0; });
    std::sort(parts.begin(), parts.end(), [](const auto& one, const auto& other) { return one.offset < other.offset; });
    std::uint64_t end = 0;
    for (const MessagePart& part : parts) {
        if (part.offset > bytes || part.bytes > bytes - part.offset) {
            throw TransportError(text_of(part) + " exceeds its message of " + std::to_string(bytes) +
                                 " bytes; give the size of the whole message");
        }
        if (part.offset < end) {
            throw TransportError(text_of(part) + " begins before the end of the one before it, " + std::to_string(end) +
                                 "; give each byte of a message once");
        }
        end = part.offset + part.bytes;
    }
    MessageSource source;
    source.parts_ = std::make_shared<const std::vector<MessagePart>>(std::move(parts));
    return source;
}

void copy_parts(std::byte* slot, const MessageSource& source, std::uint64_t bytes) noexcept {
    for (const MessagePart& part : source.parts()) {
        if (part.data != slot + part.offset) {
            streamed_copy(slot + part.offset, part.data, part.bytes, bytes);
        }
    }
}

}  // namespace megatronapp::transport
