#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace megatronapp::transport {

enum class Life : std::uint8_t { kAlive, kClosed, kLost };

/// What a rank sees of a peer beside its messages: whether it lives, its progress words, and the log that it leads.
/// `PeerBoard` reads it in shared memory; a path between nodes brings it over the network. All but `life` are called
/// by one thread at a time.
class RemoteBoard {
  public:
    RemoteBoard(const RemoteBoard&) = delete;
    RemoteBoard& operator=(const RemoteBoard&) = delete;
    virtual ~RemoteBoard() = default;

    /// Raises TransportCorruptError if the peer is in no state that there is.
    [[nodiscard]] virtual Life life() const = 0;

    /// What happened to a lost peer, to be read after its name.
    [[nodiscard]] virtual std::string how_lost() const { return "died; its own log says why"; }

    /// The last value of a progress word that is known here. Raises TransportError for an index that does not exist.
    [[nodiscard]] virtual std::uint64_t word(std::uint32_t index) const = 0;

    /// Whether the peer has entered this rank among the followers of its log.
    [[nodiscard]] virtual bool follow(std::uint32_t own_rank) noexcept = 0;

    /// The next entry of the log, in order, if there is one. Raises TransportCorruptError.
    [[nodiscard]] virtual std::optional<std::uint64_t> next_entry() = 0;

    /// Wakes threads of the peer that wait for a message, an entry, or room in its log.
    virtual void ring_activity() noexcept = 0;
    /// Wakes threads of the peer that wait for a slot.
    virtual void ring_credits() noexcept = 0;

    /// This rank has published a word, or appended an entry, in its own board. Nothing to do where the peer reads that
    /// board itself.
    virtual void word_published(std::uint32_t /*index*/, std::uint64_t /*value*/) noexcept {}
    virtual void entry_appended(std::uint64_t /*value*/) noexcept {}

  protected:
    RemoteBoard() = default;
    RemoteBoard(RemoteBoard&&) = default;
    RemoteBoard& operator=(RemoteBoard&&) = default;
};

}  // namespace megatronapp::transport
