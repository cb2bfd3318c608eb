#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include "megatronapp/transport/peer.hpp"

namespace megatronapp::transport {

/// A received message: a view of its slot, with no copy. Releasing it, at the latest by its destruction, gives the
/// slot back to the sender, who then overwrites it. The memory stays mapped as long as the message exists, also when
/// the endpoint is closed. In a forked child a release does nothing.
class Message {
  public:
    Message(std::shared_ptr<Peer> peer, const Arrival& arrival, std::uint64_t made_at_fork) noexcept
        : peer_(std::move(peer)), arrival_(arrival), data_(peer_->slot_data(arrival.slot)), fork_(made_at_fork) {}
    Message(Message&& other) noexcept = default;
    Message& operator=(Message&& other) noexcept {
        std::swap(peer_, other.peer_);
        std::swap(arrival_, other.arrival_);
        std::swap(data_, other.data_);
        std::swap(fork_, other.fork_);
        std::swap(released_, other.released_);
        return *this;
    }
    Message(const Message&) = delete;
    Message& operator=(const Message&) = delete;
    ~Message() { release(); }

    void release() noexcept;

    [[nodiscard]] bool released() const noexcept { return released_; }
    [[nodiscard]] std::byte* data() const noexcept { return data_; }
    [[nodiscard]] std::uint64_t key() const noexcept { return arrival_.key; }
    [[nodiscard]] std::uint64_t bytes() const noexcept { return arrival_.bytes; }
    [[nodiscard]] std::uint64_t start_ns() const noexcept { return arrival_.start_ns; }
    [[nodiscard]] std::uint64_t end_ns() const noexcept { return arrival_.end_ns; }

  private:
    std::shared_ptr<Peer> peer_;  // none after a move
    Arrival arrival_;
    std::byte* data_;
    std::uint64_t fork_;
    bool released_ = false;
};

}  // namespace megatronapp::transport
