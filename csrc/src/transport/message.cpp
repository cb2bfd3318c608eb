#include "megatronapp/transport/message.hpp"

#include "megatronapp/fork_count.hpp"
#include "megatronapp/transport/errors.hpp"

namespace megatronapp::transport {

void Message::release(std::optional<DeviceStream> stream) noexcept {
    if (peer_ == nullptr || released_ || fork_count() != fork_) {
        return;
    }
    released_ = true;
    peer_->give_back(arrival_.slot, stream);
}

bool Message::complete() const {
    require_held();
    return peer_->whole(arrival_.slot);
}

void Message::wait(DeviceStream stream) const {
    require_held();
    peer_->wait(arrival_.slot, stream);
}

std::optional<CopyTimes> Message::times() const {
    if (later_ == nullptr) {
        return CopyTimes{arrival_.start_ns, arrival_.end_ns};
    }
    return peer_->times(arrival_, *later_);
}

void Message::require_held() const {
    if (released_ || fork_count() != fork_) {
        throw TransportError("this message is released, or of another process; its slot is that of another one");
    }
}

}  // namespace megatronapp::transport
