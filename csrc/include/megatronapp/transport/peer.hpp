#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "megatronapp/transport/key_table.hpp"
#include "megatronapp/transport/path.hpp"
#include "megatronapp/transport/shm/remote_board.hpp"
#include "megatronapp/transport/transfers.hpp"

namespace megatronapp::transport {

/// All that this rank knows of another one: its path and board, queued sends, credits, keys in flight, arrived
/// messages, and how it failed. Safe for any number of threads; no call but `copy` and those that end it takes longer
/// than a microsecond.
///
/// The first failure stays: from then on every call raises it, except that messages which arrived before a peer died
/// or closed can still be taken.
class Peer final : public CopySink {
  public:
    Peer(std::uint32_t own_rank, std::uint32_t rank, double deadline_s, std::unique_ptr<Path> path,
         std::unique_ptr<RemoteBoard> board, Completions& completions);
    Peer(const Peer&) = delete;
    Peer& operator=(const Peer&) = delete;
    Peer(Peer&&) = delete;
    Peer& operator=(Peer&&) = delete;
    ~Peer() override { close(); }

    /// Queues a message, which is sent after what is enqueued on `stream`, if given. Raises DuplicateKeyError,
    /// TransportError for one that fits no slot, or the peer's failure.
    void post(SendRequest request, std::optional<DeviceStream> stream);

    /// Gives the oldest queued message a slot; none if nothing is queued, no slot is free, or the message is larger.
    [[nodiscard]] std::optional<StartedSend> start_next(std::uint64_t most_bytes) noexcept;

    /// Starts to copy the message; the path may end the copy later.
    void copy(const StartedSend& started) noexcept { path_->start(started, *this); }
    [[nodiscard]] bool starts_at_once() const noexcept { return path_->starts_at_once(); }
    void completed(const StartedSend& started, std::uint64_t start_ns, std::uint64_t end_ns) noexcept override;
    void failed(const StartedSend& started, const std::string& why) noexcept override;

    /// Whether messages wait for a slot or are being copied.
    [[nodiscard]] bool sending() const;

    /// Appends all messages that have arrived, in the order of their slots.
    void take_all(std::vector<Arrival>& arrivals);
    /// Keys of the messages that are announced and not taken, whole or on their way; of a peer that failed, only whole
    /// ones. Raises its failure if there are none.
    [[nodiscard]] std::vector<std::uint64_t> posted();
    /// The message of this key, if it has arrived, or with `posted` also if it is announced: its times are then 0.
    /// Raises the peer's failure if it has not arrived.
    [[nodiscard]] std::optional<Arrival> take(std::uint64_t key, bool posted);
    /// Whether a message that was taken is whole. Raises the peer's failure if it will never be.
    [[nodiscard]] bool whole(std::uint32_t slot);
    /// Where the times of a message will be that was just taken without any; null if it has them.
    [[nodiscard]] std::shared_ptr<LaterTimes> later_times(const Arrival& arrival);
    [[nodiscard]] std::optional<CopyTimes> times(const Arrival& arrival, LaterTimes& later);
    /// Lets a stream wait for a message that was taken.
    void wait(std::uint32_t slot, DeviceStream stream);
    [[nodiscard]] bool on_device() const noexcept { return path_->on_device(); }
    [[nodiscard]] std::byte* slot_data(std::uint32_t slot) const noexcept { return path_->slot_data(slot); }
    /// Returns a slot, after what is enqueued on `stream`, if given.
    void give_back(std::uint32_t slot, std::optional<DeviceStream> stream) noexcept;

    /// The next entry of the log that this peer leads, if there is one. Raises the peer's failure if not.
    [[nodiscard]] std::optional<std::uint64_t> next_entry();
    [[nodiscard]] std::uint64_t word(std::uint32_t index) const;
    void word_published(std::uint32_t index, std::uint64_t value) noexcept;
    void entry_appended(std::uint64_t value) noexcept;
    void ring_activity() noexcept { board_->ring_activity(); }

    /// Examines whether the peer lives and takes messages in time, and ends what waits for a peer that has failed;
    /// whether it failed since the last call.
    bool examine(std::uint64_t now_ns);

    /// Raises the peer's failure, if it has failed.
    void require_well() const;
    /// Raises the peer's failure if queued messages were given up because of it.
    void require_delivered() const;

    /// Ends all that waits for the peer, so that no transfer to another peer waits behind it.
    void abandon() noexcept;
    /// Ends all use of the path from this side.
    void close() noexcept;

    [[nodiscard]] PeerStatistics statistics() const;
    [[nodiscard]] std::uint32_t rank() const noexcept { return rank_; }

  private:
    enum class FailureKind : std::uint8_t { kLost, kTimeout, kCorrupt, kPath };
    struct Failure {
        FailureKind kind;
        std::string text;
        Timeout timeout;
    };
    enum class SlotState : std::uint8_t { kFree, kWaiting, kHeld };

    void enqueue(const SendRequest& request);

    // All below need the lock.
    void fail(Failure failure);
    void examine_life(std::uint64_t now_ns);
    void require_well_locked() const;
    [[noreturn]] void raise_failure() const;
    void read_returned();
    void read_arrivals();
    const Arrival& hold(std::uint32_t slot) noexcept;
    [[nodiscard]] bool whole_locked(std::uint32_t slot);
    [[nodiscard]] bool timed(std::uint32_t slot);
    void keep_times(std::uint32_t slot);
    void count_received(const Arrival& arrival, const CopyTimes& times) noexcept;
    [[nodiscard]] bool stalled(std::uint64_t now_ns) const noexcept;
    [[nodiscard]] std::string stalled_text() const;

    std::uint32_t own_rank_;
    std::uint32_t rank_;
    double deadline_s_;
    Completions* completions_;
    std::unique_ptr<RemoteBoard> board_;
    std::unique_ptr<Path> path_;

    mutable std::mutex mutex_;
    std::optional<Failure> failure_;
    bool closed_ = false;
    bool abandoned_ = false;
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
    std::vector<std::shared_ptr<LaterTimes>> later_;  ///< by slot: of its last message, until its times are known
};

}  // namespace megatronapp::transport
