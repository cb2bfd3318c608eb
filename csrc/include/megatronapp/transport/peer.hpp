#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "megatronapp/transport/board.hpp"
#include "megatronapp/transport/key_table.hpp"
#include "megatronapp/transport/path.hpp"
#include "megatronapp/transport/transfers.hpp"

namespace megatronapp::transport {

/// All that this rank knows of another one: its path and board, queued sends, credits, keys in flight, arrived
/// messages, and how it failed. Safe for any number of threads; no call but `copy` takes longer than a microsecond.
///
/// The first failure stays: from then on every call raises it, except that messages which arrived before a peer died
/// or closed can still be taken.
class Peer {
  public:
    Peer(std::uint32_t own_rank, std::uint32_t rank, double deadline_s, std::unique_ptr<Path> path, PeerBoard board,
         Completions& completions);

    /// Queues a message. Raises DuplicateKeyError, TransportError for one that fits no slot, or the peer's failure.
    void post(const SendRequest& request);

    /// Gives the oldest queued message a slot; none if nothing is queued, no slot is free, or the message is larger.
    [[nodiscard]] std::optional<StartedSend> start_next(std::uint64_t most_bytes) noexcept;

    /// Copies the message and announces it.
    void copy(const StartedSend& started);

    /// Whether messages wait for a slot or are being copied.
    [[nodiscard]] bool sending() const;

    /// The message of this key, if it has arrived. Raises the peer's failure if it has not.
    [[nodiscard]] std::optional<Arrival> take(std::uint64_t key);
    [[nodiscard]] std::byte* slot_data(std::uint32_t slot) const noexcept { return path_->slot_data(slot); }
    void give_back(std::uint32_t slot) noexcept;

    /// The next entry of the log that this peer leads, if there is one. Raises the peer's failure if not.
    [[nodiscard]] std::optional<std::uint64_t> next_entry();
    [[nodiscard]] std::uint64_t word(std::uint32_t index) const { return board_.word(index); }
    void ring_activity() noexcept { ring(board_.layout().activity); }

    /// Examines whether the peer lives and takes messages in time; whether it failed by this.
    bool examine(std::uint64_t now_ns);

    /// Raises the peer's failure, if it has failed.
    void require_well() const;
    /// Raises the peer's failure if queued messages were given up because of it.
    void require_delivered() const;

    /// Ends all use of shared memory from this side.
    void close() noexcept;

    [[nodiscard]] PeerStatistics statistics() const;
    [[nodiscard]] std::uint32_t rank() const noexcept { return rank_; }

  private:
    enum class FailureKind : std::uint8_t { kLost, kTimeout, kCorrupt };
    struct Failure {
        FailureKind kind;
        std::string text;
        Timeout timeout;
    };
    enum class SlotState : std::uint8_t { kFree, kWaiting, kHeld };

    // All below need the lock.
    void fail(Failure failure);
    void require_well_locked() const;
    [[noreturn]] void raise_failure() const;
    void read_returned();
    void read_arrivals();
    [[nodiscard]] bool stalled(std::uint64_t now_ns) const noexcept;
    [[nodiscard]] std::string stalled_text() const;

    std::uint32_t own_rank_;
    std::uint32_t rank_;
    double deadline_s_;
    Completions* completions_;
    std::unique_ptr<Path> path_;
    PeerBoard board_;

    mutable std::mutex mutex_;
    std::optional<Failure> failure_;
    bool closed_ = false;
    TransferLog transfers_;

    RequestQueue queue_;
    std::uint32_t copying_ = 0;
    std::uint64_t undelivered_ = 0;
    std::uint64_t last_start_ns_ = 0;
    KeyTable keys_in_flight_;
    std::vector<std::uint32_t> free_slots_;              ///< of the peer, for sends
    std::vector<std::optional<std::uint64_t>> lent_to_;  ///< key of the message in each slot of the peer

    KeyTable arrived_;
    std::vector<Arrival> arrivals_;  ///< by slot
    std::vector<SlotState> slot_states_;
};

}  // namespace megatronapp::transport
