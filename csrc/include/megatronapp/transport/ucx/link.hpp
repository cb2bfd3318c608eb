#pragma once

#include <array>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "megatronapp/transport/host/host_buffer.hpp"
#include "megatronapp/transport/path.hpp"
#include "megatronapp/transport/shm/remote_board.hpp"
#include "megatronapp/transport/ucx/wire.hpp"

namespace megatronapp::transport::ucx {

/// What a rank has heard from one peer, until the threads of the application take it. The progress thread of the
/// worker enters news, each already parsed; any thread takes them. The first failure stays.
class Link {
  public:
    Link(std::uint32_t peer, const Hello& own);

    [[nodiscard]] std::uint32_t peer() const noexcept { return peer_; }
    [[nodiscard]] const Hello& own() const noexcept { return own_; }
    [[nodiscard]] std::byte* slot_data(std::uint32_t slot) const noexcept {
        return memory_.bytes().data() + slot * stride_;
    }
    [[nodiscard]] std::span<std::byte> memory() const noexcept { return memory_.bytes(); }

    // By the progress thread.

    /// Compares the peer's slots with those of this rank; records that they differ, once for all.
    void greeted(const Hello& peer);
    /// Reserves the slot of a message that comes; false, and a failure, if it is in use.
    [[nodiscard]] bool reserve(std::uint32_t slot);
    void landed(const Arrival& arrival);
    void returned(std::uint32_t slot);
    void word(const WordNews& news, std::uint64_t number);
    void entry(const EntryNews& news);
    void closing(const Closing& closing);
    void damaged(const std::string& what);
    void mismatched(const std::string& what);
    void lost(const std::string& how);
    /// Takes a round trip; whether connecting needed it. Later ones are no activity, which would keep a rank that waits
    /// for any message from its deadline.
    bool measured(std::uint64_t round_trip_ns);
    [[nodiscard]] bool failed() const;
    [[nodiscard]] std::uint64_t entries_read() const;

    // By any thread.

    [[nodiscard]] std::optional<std::uint32_t> next_returned();
    [[nodiscard]] std::optional<Arrival> next_arrival();
    void give_back(std::uint32_t slot) noexcept;
    [[nodiscard]] Life life() const;
    [[nodiscard]] std::string how_lost() const;
    [[nodiscard]] std::uint64_t word(std::uint32_t index) const;
    [[nodiscard]] std::optional<std::uint64_t> next_entry();

    /// Whether both sides have heard each other. Raises TransportMismatchError, TransportCorruptError or PeerLostError.
    [[nodiscard]] bool connected() const;
    /// Shortest of the round trips when ranks connected, 0 before.
    [[nodiscard]] std::uint64_t round_trip_ns() const;
    /// Whether more of them are to be measured.
    [[nodiscard]] bool round_trip_wanted() const;

    /// The progress thread uses the link no more.
    void end();
    /// Waits for that.
    void await_end();

  private:
    struct Word {
        std::uint64_t number = 0;  ///< of the header that brought the value, plus 1
        std::uint64_t value = 0;
    };

    void require_sound() const;

    std::uint32_t peer_;
    Hello own_;
    std::uint64_t stride_;
    HostBuffer memory_;  ///< for the messages of the peer

    mutable std::mutex mutex_;
    std::condition_variable changed_;
    bool greeted_ = false;
    bool ended_ = false;
    std::uint64_t round_trips_ = 0;
    std::uint64_t round_trip_ns_ = 0;
    std::optional<std::string> damage_;
    std::optional<std::string> mismatch_;
    std::optional<std::string> loss_;
    std::optional<std::uint64_t> closing_at_;
    std::uint64_t landed_ = 0;
    std::vector<bool> in_use_;
    std::deque<Arrival> arrivals_;
    std::deque<std::uint32_t> returned_;
    std::array<Word, kProgressWords> words_{};
    std::map<std::uint64_t, std::uint64_t> entries_;
    std::uint64_t entries_read_ = 0;
};

}  // namespace megatronapp::transport::ucx
