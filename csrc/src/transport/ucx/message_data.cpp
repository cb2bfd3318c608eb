#include "megatronapp/transport/ucx/message_data.hpp"

#include <algorithm>
#include <array>
#include <span>

namespace megatronapp::transport::ucx {
namespace {

constexpr std::array<std::byte, 4096> kFiller{};  // of what no part of a message covers

}  // namespace

MessageData::MessageData(const SendRequest& request, RequestParams& params) {
    const std::span<const MessagePart> parts = request.source.parts();
    if (request.bytes == 0 || (parts.size() == 1 && parts.front().bytes == request.bytes)) {
        data_ = request.bytes == 0 ? nullptr : parts.front().data;
        bytes_ = request.bytes;
        return;
    }
    for (const MessagePart& part : parts) {
        fill_to(part.offset);
        pieces_.push_back({part.data, part.bytes});
        bytes_ += part.bytes;
    }
    fill_to(request.bytes);
    params.attributes |= kOperationDatatype;
    params.datatype = kDatatypeIov;
}

void MessageData::fill_to(std::uint64_t offset) {
    while (bytes_ < offset) {
        pieces_.push_back({kFiller.data(), std::min<std::size_t>(kFiller.size(), offset - bytes_)});
        bytes_ += pieces_.back().length;
    }
}

}  // namespace megatronapp::transport::ucx
