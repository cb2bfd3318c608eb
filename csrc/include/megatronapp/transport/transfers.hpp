/// Values that describe messages on their way, and small containers of them.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "megatronapp/transport/message_source.hpp"
#include "megatronapp/transport/shm/bell.hpp"

namespace megatronapp::transport {

/// A stream of a device (CUstream); that of the default stream is null.
struct DeviceStream {
    void* handle;
};

/// A message that waits for a slot of its receiver.
struct SendRequest {
    std::uint64_t ticket;
    std::uint64_t key;
    MessageSource source;
    std::uint64_t bytes;
    std::uint64_t queued_ns;
    void* after = nullptr;  ///< what `Path::mark` returned: the copy begins after it; null: at once
};

/// A message that has a slot and is being copied into it.
struct StartedSend {
    SendRequest request;
    std::uint32_t slot;
    std::uint64_t start_ns = 0;  ///< when a copy to the request's source began, which is a part of the transfer
};

/// True times of a copy on the monotonic clock.
struct CopyTimes {
    std::uint64_t start_ns;
    std::uint64_t end_ns;
};

/// One ended transfer; times of the monotonic clock, those of the copy at the sender.
struct Transfer {
    std::uint64_t key;
    std::uint64_t bytes;
    std::uint64_t start_ns;
    std::uint64_t end_ns;
    bool sent;  ///< by this rank; otherwise received
};

struct Traffic {
    std::uint64_t transfers = 0;
    std::uint64_t bytes = 0;
    std::uint64_t copy_ns = 0;
};

inline constexpr std::size_t kLastTransfers = 256;

struct PeerStatistics {
    const char* path;
    Traffic sent;
    Traffic received;
    std::vector<Transfer> last;  ///< at most kLastTransfers, oldest first
};

/// Counts transfers and remembers the last ones.
class TransferLog {
  public:
    void add(const Transfer& transfer) noexcept {
        Traffic& traffic = transfer.sent ? sent_ : received_;
        ++traffic.transfers;
        traffic.bytes += transfer.bytes;
        traffic.copy_ns += transfer.end_ns - transfer.start_ns;
        last_[(sent_.transfers + received_.transfers - 1) % kLastTransfers] = transfer;
    }

    [[nodiscard]] PeerStatistics statistics(const char* path) const {
        PeerStatistics result{path, sent_, received_, {}};
        const std::uint64_t all = sent_.transfers + received_.transfers;
        for (std::uint64_t i = all > kLastTransfers ? all - kLastTransfers : 0; i < all; ++i) {
            result.last.push_back(last_[i % kLastTransfers]);
        }
        return result;
    }

  private:
    Traffic sent_;
    Traffic received_;
    std::array<Transfer, kLastTransfers> last_{};
};

/// First in, first out; allocates only when more requests wait than ever before.
class RequestQueue {
  public:
    [[nodiscard]] bool empty() const noexcept { return size_ == 0; }
    [[nodiscard]] const SendRequest& front() const noexcept { return places_[first_]; }

    void push(const SendRequest& request) {
        if (size_ == places_.size()) {
            grow();
        }
        places_[(first_ + size_) % places_.size()] = request;
        ++size_;
    }

    SendRequest pop() noexcept {
        SendRequest request = std::move(places_[first_]);
        first_ = (first_ + 1) % places_.size();
        --size_;
        return request;
    }

  private:
    void grow() {
        std::vector<SendRequest> larger(2 * places_.size());
        for (std::size_t i = 0; i < size_; ++i) {
            larger[i] = std::move(places_[(first_ + i) % places_.size()]);
        }
        places_ = std::move(larger);
        first_ = 0;
    }

    std::vector<SendRequest> places_ = std::vector<SendRequest>(64);
    std::size_t first_ = 0;
    std::size_t size_ = 0;
};

/// Tickets of sends whose memory the caller may use again.
class Completions {
  public:
    void add(std::uint64_t ticket) {
        {
            const std::lock_guard lock(mutex_);
            tickets_.push_back(ticket);
        }
        ring(added_);
    }

    /// Replaces the contents of `out`, whose memory is used for later tickets.
    void take(std::vector<std::uint64_t>& out) {
        out.clear();
        const std::lock_guard lock(mutex_);
        out.swap(tickets_);
    }

    /// Rung with every ticket.
    [[nodiscard]] Bell& added() noexcept { return added_; }

  private:
    std::mutex mutex_;
    std::vector<std::uint64_t> tickets_;
    Bell added_{};
};

}  // namespace megatronapp::transport
