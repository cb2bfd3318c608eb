#include "megatronapp/transport/connector.hpp"

#include <algorithm>
#include <cstring>
#include <ctime>
#include <sstream>
#include <utility>

#include "megatronapp/clock.hpp"
#include "megatronapp/transport/cuda/cuda_path.hpp"
#include "megatronapp/transport/cuda/cuda_slots.hpp"
#include "megatronapp/transport/cuda/staged_path.hpp"
#include "megatronapp/transport/errors.hpp"

namespace megatronapp::transport {
namespace {

constexpr std::uint64_t kBoardBytes = InboxLayout::round_up(sizeof(BoardLayout), kPage);
constexpr long kLookNs = 1'000'000;  // between two looks for a file that is not there yet

void sleep_between_looks() noexcept {
    const timespec pause{.tv_sec = 0, .tv_nsec = kLookNs};
    ::nanosleep(&pause, nullptr);
}

Identity checked(Identity identity) {
    identity.check = identity.computed_check();
    return identity;
}

}  // namespace

Identity Connector::identity(std::uint64_t magic, std::uint32_t owner, std::uint32_t sender) const {
    return {.magic = magic,
            .version = kVersion,
            .file_bytes = kBoardBytes,
            .job = hash_of(directory_->job()),
            .attempt = directory_->attempt(),
            .owner = owner,
            .sender = sender,
            .slot_bytes = 0,
            .slots = 0,
            .memory = 0,
            .check = 0};
}

Identity Connector::inbox_identity(std::uint32_t receiver, std::uint32_t sender, const Pending& pending) const {
    Identity inbox = identity(kInboxMagic, receiver, sender);
    inbox.slot_bytes = pending.messages ? slot_bytes_ : 0;
    inbox.slots = pending.messages ? slots_ : 0;
    inbox.memory = static_cast<std::uint64_t>(*pending.memory);
    inbox.file_bytes = InboxLayout::of(inbox.slots, inbox.slot_bytes, *pending.memory).file_bytes;
    return checked(inbox);
}

OwnBoard Connector::make_board() const {
    directory_->remove_older_attempts();
    directory_->remove_names_if_dead(rank_);  // this attempt began before, and died while it connected
    Identity board = identity(kBoardMagic, rank_, rank_);
    board.memory = static_cast<std::uint64_t>(memory_);
    return {SharedFile::create(directory_->board(rank_), kBoardBytes), checked(board)};
}

void Connector::add_peer(std::uint32_t peer, bool messages) {
    const auto is_peer = [peer](const Pending& pending) { return pending.peer == peer; };
    if (peer == rank_ || std::any_of(pending_.begin(), pending_.end(), is_peer)) {
        throw TransportError("rank " + std::to_string(peer) + " is this rank or was added before");
    }
    Pending pending{.peer = peer,
                    .messages = messages,
                    .board = {},
                    .memory = {},
                    .identity = {},
                    .from_peer = {},
                    .slots = {},
                    .to_peer = {}};
    if (memory_ == SlotMemory::kHost || !messages) {  // a rank with a device has to know first what the peer has
        pending.memory = SlotMemory::kHost;
        make_inbox(pending);
    }
    pending_.push_back(std::move(pending));
}

void Connector::make_inbox(Pending& pending) const {
    pending.identity = inbox_identity(rank_, pending.peer, pending);
    InboxFile file = InboxFile::create(directory_->inbox(rank_, pending.peer), pending.identity);
    if (pending.memory != SlotMemory::kHost) {
        pending.slots = make_slots(device_, file, pending.identity);
    }
    if (!file.file().publish()) {
        throw TransportError(file.file().path() + ": exists; give each attempt of the job a new number");
    }
    pending.from_peer = std::move(file);
}

std::vector<std::shared_ptr<Peer>> Connector::connect(OwnBoard& board, Completions& completions,
                                                      const std::function<void()>& while_waiting) {
    const std::uint64_t deadline_ns = deadline_after(deadline_s_);
    open_all(board, deadline_ns, SliceHook(while_waiting));
    await_attached(board, deadline_ns, SliceHook(while_waiting));
    remove_names();
    board.file().remove_name();
    std::vector<std::shared_ptr<Peer>> peers;
    for (Pending& pending : pending_) {
        std::unique_ptr<Path> path = make_path(board, pending);
        auto peer_board = std::make_unique<PeerBoard>(std::move(*pending.board));
        pending.board.reset();  // if a later path fails, this peer learns it from the board of this rank
        peers.push_back(std::make_shared<Peer>(rank_, pending.peer, deadline_s_, std::move(path), std::move(peer_board),
                                               completions));
    }
    pending_.clear();
    return peers;
}

/// The path that both ends can use: between devices in their memory, otherwise in memory of the host, from and to which
/// a rank with a device copies.
std::unique_ptr<Path> Connector::make_path(OwnBoard& board, Pending& pending) const {
    Bell& peer_credits = pending.board->layout().credits;
    if (pending.slots != nullptr) {
        const CudaPath::Bells bells{.credits = &board.layout().credits, .activity = &pending.board->layout().activity};
        return std::make_unique<CudaPath>(device_, std::move(pending.slots), std::move(*pending.to_peer),
                                          std::move(*pending.from_peer), pending.identity, pending.peer, bells);
    }
    auto path = std::make_unique<HostPath>(std::move(*pending.to_peer), std::move(*pending.from_peer), pending.identity,
                                           pending.peer);
    return staged(device_, std::move(path), pending.peer, &peer_credits);
}

/// Opens the board of the peer, which says whether that rank has a device.
bool Connector::open_board(Pending& pending) const {
    const std::string path = directory_->board(pending.peer);
    std::optional<SharedFile> file = SharedFile::open(path, sizeof(BoardLayout));
    if (!file) {
        return false;
    }
    Identity found{};
    std::memcpy(&found, file->data(), sizeof(found));
    Identity expected = identity(kBoardMagic, pending.peer, pending.peer);
    expected.memory = std::min(found.memory, static_cast<std::uint64_t>(SlotMemory::kPinned));
    require_identity(path, found, expected);
    if (!pending.memory) {
        pending.memory = SlotMemory{found.memory} == SlotMemory::kHost ? SlotMemory::kHost : memory_;
    }
    pending.board.emplace(std::move(*file), pending.peer);
    return true;
}

/// Whether all files of the peer are open. The peer learns it from its inbox, and is woken.
bool Connector::open_files(Pending& pending) const {
    if (!pending.board && !open_board(pending)) {
        return false;
    }
    if (!pending.from_peer) {
        make_inbox(pending);
    }
    if (!pending.to_peer) {
        pending.to_peer =
            InboxFile::open(directory_->inbox(pending.peer, rank_), inbox_identity(pending.peer, rank_, pending));
    }
    if (!pending.to_peer) {
        return false;
    }
    pending.to_peer->header().attached.store(1, std::memory_order_release);
    ring(pending.board->layout().activity);
    return true;
}

bool Connector::Pending::attached() const noexcept {
    return from_peer && from_peer->header().attached.load(std::memory_order_acquire) == 1;
}

void Connector::open_all(const OwnBoard& board, std::uint64_t deadline_ns, SliceHook hook) {
    std::vector<Pending*> missing;
    for (Pending& pending : pending_) {
        missing.push_back(&pending);
    }
    while (true) {
        std::erase_if(missing, [this](Pending* pending) { return open_files(*pending); });
        if (missing.empty()) {
            return;
        }
        require_alive(board);
        if (monotonic_ns() >= deadline_ns) {
            raise_timeout(missing.front()->peer, "made no files in " + directory_->path() +
                                                     "; see its log, and check that it runs on this node with the same "
                                                     "MEGATRONAPP_SHM_DIR, job and attempt, "
                                                     "and that it added this rank");
        }
        sleep_between_looks();
        hook.call_if_due();
    }
}

void Connector::await_attached(const OwnBoard& board, std::uint64_t deadline_ns, SliceHook hook) {
    for (Pending& pending : pending_) {
        while (true) {
            const std::uint32_t seen = board.layout().activity.count.load(std::memory_order_acquire);
            const std::uint64_t attached = pending.from_peer->header().attached.load(std::memory_order_acquire);
            if (attached == 1) {
                break;
            }
            if (attached != 0) {
                throw TransportCorruptError(pending.from_peer->file().path() +
                                            ": its header is damaged; restart the job");
            }
            require_alive(board);
            if (monotonic_ns() >= deadline_ns) {
                raise_timeout(pending.peer, "did not open the files of this rank; it hangs or waits for another one");
            }
            wait(board.layout().activity, seen, end_of_slice(deadline_ns));
            hook.call_if_due();
        }
    }
}

/// A peer that has not attached yet can be neither dead nor closed if this is to succeed.
void Connector::require_alive(const OwnBoard& board) const {
    const std::uint64_t gave_up = board.layout().gave_up.load(std::memory_order_acquire);
    for (const Pending& pending : pending_) {
        const Life life = pending.board && !pending.attached() ? pending.board->life() : Life::kAlive;
        const std::string peer = "rank " + std::to_string(pending.peer);
        if (life == Life::kLost) {
            throw PeerLostError(peer + " died while the ranks connected; its own log says why", pending.peer);
        }
        if (life == Life::kClosed || gave_up == std::uint64_t{pending.peer} + 1) {
            throw PeerLostError(peer + " gave up while the ranks connected; its own log says why", pending.peer);
        }
    }
}

void Connector::raise_timeout(std::uint32_t peer, const std::string& what) const {
    std::ostringstream text;
    text << "rank " << peer << ": not connected within " << deadline_s_ << " s: it " << what;
    throw TransferTimeoutError(text.str(), {peer, std::nullopt, "connect", deadline_s_});
}

void Connector::give_up() noexcept {
    for (Pending& pending : pending_) {
        if (pending.board) {
            pending.board->layout().gave_up.store(std::uint64_t{rank_} + 1, std::memory_order_release);
            ring(pending.board->layout().activity);
        }
    }
}

void Connector::remove_names() noexcept {
    for (Pending& pending : pending_) {
        if (pending.from_peer) {
            pending.from_peer->file().remove_name();
        }
    }
    for (const Pending& pending : pending_) {
        directory_->remove_names_if_dead(pending.peer);
    }
}

}  // namespace megatronapp::transport
