#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "megatronapp/transport/cuda/cuda_device.hpp"
#include "megatronapp/transport/host/host_path.hpp"
#include "megatronapp/transport/peer.hpp"
#include "megatronapp/transport/settings.hpp"
#include "megatronapp/transport/shm/board.hpp"
#include "megatronapp/transport/shm/directory.hpp"

namespace megatronapp::transport {

/// Makes the files of one rank, opens those of its peers, and removes the names once all sides have opened them.
class Connector {
  public:
    /// `device`: whose memory messages come from and go to; null for host memory.
    Connector(const Directory& directory, const Settings& settings, cuda::SharedDevice device)
        : directory_(&directory),
          device_(std::move(device)),
          memory_(device_ == nullptr ? SlotMemory::kHost
                  : settings.pinned  ? SlotMemory::kPinned
                                     : SlotMemory::kDevice),
          rank_(settings.rank),
          slots_(settings.slots),
          slot_bytes_(settings.slot_bytes),
          deadline_s_(settings.deadline_s) {}

    /// Raises TransportError if another living process is this rank.
    [[nodiscard]] OwnBoard make_board() const;

    void add_peer(std::uint32_t peer, bool messages);

    /// Raises TransferTimeoutError, PeerLostError, TransportMismatchError or TransportCorruptError.
    [[nodiscard]] std::vector<std::shared_ptr<Peer>> connect(OwnBoard& board, Completions& completions,
                                                             const std::function<void()>& while_waiting);

    /// Lets the peers know that this rank does not connect.
    void give_up() noexcept;

    /// Removes the names of this rank's inboxes, and all names of added peers that are dead.
    void remove_names() noexcept;

  private:
    struct Pending {
        std::uint32_t peer;
        bool messages;
        std::optional<PeerBoard> board;
        std::optional<SlotMemory> memory;  ///< of the slots between the two, once it is known
        Identity identity;                 ///< of the inbox from the peer
        std::optional<InboxFile> from_peer;
        std::unique_ptr<cuda::DeviceMemory> slots;  ///< of `from_peer`, if they are in memory of the device
        std::optional<InboxFile> to_peer;

        [[nodiscard]] bool attached() const noexcept;
    };

    [[nodiscard]] Identity identity(std::uint64_t magic, std::uint32_t owner, std::uint32_t sender) const;
    [[nodiscard]] Identity inbox_identity(std::uint32_t receiver, std::uint32_t sender, const Pending& pending) const;
    [[nodiscard]] bool open_files(Pending& pending) const;
    [[nodiscard]] bool open_board(Pending& pending) const;
    void make_inbox(Pending& pending) const;
    [[nodiscard]] std::unique_ptr<Path> make_path(OwnBoard& board, Pending& pending) const;
    void open_all(const OwnBoard& board, std::uint64_t deadline_ns, SliceHook hook);
    void await_attached(const OwnBoard& board, std::uint64_t deadline_ns, SliceHook hook);
    void require_alive(const OwnBoard& board) const;
    [[noreturn]] void raise_timeout(std::uint32_t peer, const std::string& what) const;

    const Directory* directory_;
    cuda::SharedDevice device_;
    SlotMemory memory_;
    std::uint32_t rank_;
    std::uint64_t slots_;
    std::uint64_t slot_bytes_;
    double deadline_s_;
    std::vector<Pending> pending_;
};

}  // namespace megatronapp::transport
