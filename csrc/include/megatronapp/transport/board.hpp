#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "megatronapp/transport/layout.hpp"
#include "megatronapp/transport/shared_file.hpp"

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

enum class Life : std::uint8_t { kAlive, kClosed, kLost };

/// The board of a peer, with the follower's side of its log.
class PeerBoard {
  public:
    PeerBoard(SharedFile file, std::uint32_t rank);

    /// Raises TransportCorruptError if the board is in no state that there is.
    [[nodiscard]] Life life() const;

    [[nodiscard]] std::uint64_t word(std::uint32_t index) const;

    /// Finds this rank among the leader's followers; false while the leader has not entered it.
    [[nodiscard]] bool follow(std::uint32_t own_rank) noexcept;

    /// The next entry of the log, in order, if there is one. Raises TransportCorruptError.
    [[nodiscard]] std::optional<std::uint64_t> next_entry();

    [[nodiscard]] BoardLayout& layout() const noexcept { return *reinterpret_cast<BoardLayout*>(file_.data()); }

  private:
    SharedFile file_;
    std::uint32_t rank_;
    CheckedReader<1> log_;
    Follower* place_ = nullptr;
};

}  // namespace megatronapp::transport
