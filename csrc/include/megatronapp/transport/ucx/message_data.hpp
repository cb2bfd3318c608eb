#pragma once

#include <cstddef>
#include <vector>

#include "megatronapp/transport/transfers.hpp"
#include "megatronapp/transport/ucx/api.hpp"

namespace megatronapp::transport::ucx {

/// The data of a message as UCX takes it: one piece of memory, or a list of pieces that follow each other. UCX reads
/// the list until the message is sent.
class MessageData {
  public:
    MessageData() = default;
    /// Says in `params` whether it is a list.
    MessageData(const SendRequest& request, RequestParams& params);

    [[nodiscard]] const void* buffer() const noexcept {
        return pieces_.empty() ? static_cast<const void*>(data_) : pieces_.data();
    }
    /// Bytes of the one piece, or pieces of the list.
    [[nodiscard]] std::size_t count() const noexcept { return pieces_.empty() ? bytes_ : pieces_.size(); }

  private:
    void fill_to(std::uint64_t offset);

    const std::byte* data_ = nullptr;
    std::size_t bytes_ = 0;  ///< up to the end of the last piece
    std::vector<IovEntry> pieces_;
};

}  // namespace megatronapp::transport::ucx
