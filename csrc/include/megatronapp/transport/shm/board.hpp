#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "megatronapp/transport/shm/layout.hpp"
#include "megatronapp/transport/shm/remote_board.hpp"
#include "megatronapp/transport/shm/shared_file.hpp"

namespace megatronapp::transport {

/// A follower as its leader knows it.
struct FollowerState {
    std::uint32_t rank;
    std::uint64_t cursor;  ///< as of the last look
};

/// The board of this rank, with the leader's side of a log.
class OwnBoard {
  public:
    /// Gives the rank's lock to this process and the file its name. Raises TransportError.
    OwnBoard(SharedFile file, const Identity& identity);

    /// Raises TransportError for an index that does not exist.
    [[nodiscard]] const Word& word(std::uint32_t index) const;
    void publish_word(std::uint32_t index, std::uint64_t value) const;

    /// Enters the followers, once. Raises TransportError if there are none, too many, or some already.
    void lead(const std::vector<std::uint32_t>& followers);

    /// The follower that has not read enough for one more entry to fit, none if there is room. Raises
    /// TransportCorruptError for a cursor that nobody could have written.
    [[nodiscard]] std::optional<std::uint32_t> slowest_follower();

    /// Appends an entry; there must be room.
    void append(std::uint64_t value) noexcept { log_.push({value}); }

    [[nodiscard]] const std::vector<FollowerState>& followers() const noexcept { return followers_; }

    void close() const noexcept;

    [[nodiscard]] BoardLayout& layout() const noexcept { return *reinterpret_cast<BoardLayout*>(file_.data()); }
    [[nodiscard]] SharedFile& file() noexcept { return file_; }

  private:
    SharedFile file_;
    LifeLock lock_;
    CheckedWriter<1> log_;
    std::vector<FollowerState> followers_;
};

/// The board of a peer on this node, with the follower's side of its log.
class PeerBoard final : public RemoteBoard {
  public:
    PeerBoard(SharedFile file, std::uint32_t rank);

    [[nodiscard]] Life life() const override;
    [[nodiscard]] std::uint64_t word(std::uint32_t index) const override;
    [[nodiscard]] bool follow(std::uint32_t own_rank) noexcept override;
    /// Wakes the leader only if its log is at least half full: it waits for nothing but room.
    [[nodiscard]] std::optional<std::uint64_t> next_entry() override;
    void ring_activity() noexcept override { ring(layout().activity); }
    void ring_credits() noexcept override { ring(layout().credits); }

    [[nodiscard]] BoardLayout& layout() const noexcept { return *reinterpret_cast<BoardLayout*>(file_.data()); }

  private:
    SharedFile file_;
    std::uint32_t rank_;
    CheckedReader<1> log_;
    Follower* place_ = nullptr;
};

}  // namespace megatronapp::transport
