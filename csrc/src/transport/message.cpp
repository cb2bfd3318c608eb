#include "megatronapp/transport/message.hpp"

#include "megatronapp/fork_count.hpp"

namespace megatronapp::transport {

void Message::release() noexcept {
    if (peer_ == nullptr || released_ || fork_count() != fork_) {
        return;
    }
    released_ = true;
    peer_->give_back(arrival_.slot);
}

}  // namespace megatronapp::transport
