#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>

#include "megatronapp/transport/peer.hpp"

namespace megatronapp::transport {

/// A received message: a view of its slot, with no copy. Releasing it, at the latest by its destruction, gives the
/// slot back to the sender, who then overwrites it. The memory stays mapped as long as the message exists, also when
/// the endpoint is closed. In a forked child a release does nothing.
///
/// A message that was taken before it is whole is for streams that wait for it.
class Message {
  public:
    Message(std::shared_ptr<Peer> peer, const Arrival& arrival, std::uint64_t made_at_fork)
        : peer_(std::move(peer)),
          arrival_(arrival),
          data_(peer_->slot_data(arrival.slot)),
          fork_(made_at_fork),
          later_(peer_->later_times(arrival)) {}
    Message(Message&& other) noexcept = default;
    Message& operator=(Message&& other) noexcept {
        std::swap(peer_, other.peer_);
        std::swap(arrival_, other.arrival_);
        std::swap(data_, other.data_);
        std::swap(fork_, other.fork_);
        std::swap(released_, other.released_);
        std::swap(later_, other.later_);
        return *this;
    }
    Message(const Message&) = delete;
    Message& operator=(const Message&) = delete;
    ~Message() { release(); }

    void release() noexcept { release(std::nullopt); }
    /// Releases it once all has ended that is enqueued on a stream.
    void release_after(DeviceStream stream) noexcept { release(stream); }

    /// Whether it is whole. Raises the failure of a peer because of which it will never be.
    [[nodiscard]] bool complete() const;
    /// Lets a stream wait until it is whole. Raises TransportError for a message in host memory.
    void wait(DeviceStream stream) const;
    /// True times of its copy; none while they are not known.
    [[nodiscard]] std::optional<CopyTimes> times() const;

    [[nodiscard]] bool released() const noexcept { return released_; }
    [[nodiscard]] bool on_device() const noexcept { return peer_->on_device(); }
    [[nodiscard]] std::byte* data() const noexcept { return data_; }
    [[nodiscard]] std::uint32_t peer() const noexcept { return peer_->rank(); }
    [[nodiscard]] std::uint64_t key() const noexcept { return arrival_.key; }
    [[nodiscard]] std::uint64_t bytes() const noexcept { return arrival_.bytes; }
    [[nodiscard]] std::uint64_t queued_ns() const noexcept { return arrival_.queued_ns; }
    [[nodiscard]] std::uint64_t start_ns() const noexcept { return arrival_.start_ns; }
    [[nodiscard]] std::uint64_t end_ns() const noexcept { return arrival_.end_ns; }

  private:
    void release(std::optional<DeviceStream> stream) noexcept;
    void require_held() const;

    std::shared_ptr<Peer> peer_;  // none after a move
    Arrival arrival_;
    std::byte* data_;
    std::uint64_t fork_;
    bool released_ = false;
    std::shared_ptr<LaterTimes> later_;  // none where the arrival has the times
};

}  // namespace megatronapp::transport
