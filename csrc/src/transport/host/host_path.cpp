#include "megatronapp/transport/host/host_path.hpp"

#include <cstring>
#include <new>
#include <utility>

#include "megatronapp/clock.hpp"
#include "megatronapp/transport/errors.hpp"

namespace megatronapp::transport {
namespace {

void require_equal(const std::string& path, const char* what, std::uint64_t found, std::uint64_t expected) {
    if (found != expected) {
        throw TransportMismatchError(path + ": the peer has " + what + " " + std::to_string(found) + ", this rank " +
                                     std::to_string(expected) + "; start both with the same settings");
    }
}

}  // namespace

void require_identity(const std::string& path, const Identity& found, const Identity& expected) {
    if (found.magic != expected.magic) {
        throw TransportMismatchError(path + ": not a file of this transport; remove it");
    }
    if (found.version != expected.version) {
        throw TransportMismatchError(path + ": version " + std::to_string(found.version) + ", this rank has " +
                                     std::to_string(expected.version) +
                                     "; install the same megatronapp-native on all ranks");
    }
    if (found.check != found.computed_check()) {
        throw TransportCorruptError(path + ": its header is damaged; restart the job");
    }
    if (found.job != expected.job || found.attempt != expected.attempt || found.owner != expected.owner ||
        found.sender != expected.sender) {
        throw TransportMismatchError(path + ": the header is that of another job, attempt or rank than the name; " +
                                     "remove the file");
    }
    require_equal(path, "a slot size of", found.slot_bytes, expected.slot_bytes);
    require_equal(path, "a number of slots of", found.slots, expected.slots);
    require_equal(path, "a kind of slots (0 host memory, 1 device memory, 2 pinned host memory) of", found.memory,
                  expected.memory);
    require_equal(path, "a file size of", found.file_bytes, expected.file_bytes);
}

InboxFile InboxFile::create(const std::string& path, const Identity& identity) {
    SharedFile file = SharedFile::create(path, identity.file_bytes);
    auto* header = new (file.data()) InboxHeader{};
    header->identity = identity;
    return {std::move(file), InboxLayout::of(identity.slots, identity.slot_bytes, SlotMemory{identity.memory})};
}

std::optional<InboxFile> InboxFile::open(const std::string& path, const Identity& expected) {
    std::optional<SharedFile> file = SharedFile::open(path, sizeof(InboxHeader));
    if (!file) {
        return std::nullopt;
    }
    Identity found{};
    std::memcpy(&found, file->data(), sizeof(found));  // once: what is checked is what is used
    require_identity(path, found, expected);
    require_equal(path, "a length of", file->bytes(), expected.file_bytes);
    return InboxFile(std::move(*file),
                     InboxLayout::of(expected.slots, expected.slot_bytes, SlotMemory{expected.memory}));
}

Announcement* InboxFile::announcements() const noexcept {
    return reinterpret_cast<Announcement*>(file_.data() + layout_.announcements);
}

ReturnedSlot* InboxFile::returned_slots() const noexcept {
    return reinterpret_cast<ReturnedSlot*>(file_.data() + layout_.returned_slots);
}

SlotFlags& InboxFile::flags(std::uint32_t slot) const noexcept {
    return reinterpret_cast<SlotFlags*>(file_.data() + layout_.flags)[slot];
}

std::byte* InboxFile::slot_data(std::uint32_t slot) const noexcept {
    return file_.data() + layout_.data + slot * layout_.slot_stride;
}

HostPath::HostPath(InboxFile to_peer, InboxFile from_peer, const Identity& identity, std::uint32_t peer)
    : slots_(identity.slots),
      slot_bytes_(identity.slot_bytes),
      peer_("rank " + std::to_string(peer)),
      to_peer_(std::move(to_peer)),
      from_peer_(std::move(from_peer)),
      announcements_(&to_peer_.header().announced, to_peer_.announcements(), slots_),
      returned_(&to_peer_.header().returned, to_peer_.returned_slots(), slots_),
      arrivals_(&from_peer_.header().announced, from_peer_.announcements(), slots_),
      returns_(&from_peer_.header().returned, from_peer_.returned_slots(), slots_) {}

void HostPath::start(const StartedSend& started, CopySink& sink) noexcept {
    const auto& [request, slot, begun_ns] = started;
    const std::uint64_t start_ns = begun_ns != 0 ? begun_ns : monotonic_ns();
    copy_parts(to_peer_.slot_data(slot), request.source, request.bytes);
    const std::uint64_t end_ns = monotonic_ns();
    {
        const std::lock_guard lock(announce_mutex_);
        copied_.store(announcements_.count() + 1, std::memory_order_release);  // see next_returned
        announcements_.push({request.key, request.bytes, slot, start_ns, end_ns, request.queued_ns});
    }
    sink.completed(started, start_ns, end_ns);
}

/// A returned slot may be written by another thread than the last time. The two copies are ordered, by these pairs:
/// - `start` stores `announced` with release after its copy; `next_arrival` of the receiver loads it with acquire, and
///   the message goes to the thread that will return it under a lock of the receiver;
/// - `give_back` stores `returned` with release after the receiver has read the message; this function loads it with
///   acquire, under the lock of this rank's `Peer` with which the next copy gets its slot.
/// The ranks map the file at different addresses. Lock-free atomics are address-free ([atomics.lockfree]), so the pairs
/// hold all the same. But where both ranks are in one process, ThreadSanitizer takes the two addresses of a word for
/// two words and does not see the pairs. `copied_` repeats the order at one address: its store precedes that of
/// `announced`, and its load follows that of `returned`, so it reads this store or a later one, and `announce_mutex_`
/// orders the stores.
std::optional<std::uint32_t> HostPath::next_returned() {
    const std::optional<RingEntry<1>> entry = returned_.next("the slots returned by " + peer_);
    if (!entry) {
        return std::nullopt;
    }
    const std::uint64_t copied = copied_.load(std::memory_order_acquire);
    if (returned_.count() > copied) {
        throw TransportCorruptError("the slots returned by " + peer_ + ": " + std::to_string(returned_.count()) +
                                    " returned after " + std::to_string(copied) +
                                    " sent; something else writes to this memory: restart the job");
    }
    if (entry->front() >= slots_) {
        throw TransportCorruptError("the slots returned by " + peer_ + ": slot " + std::to_string(entry->front()) +
                                    " of " + std::to_string(slots_));
    }
    return static_cast<std::uint32_t>(entry->front());
}

std::optional<Arrival> HostPath::next_arrival() {
    const std::optional<RingEntry<kAnnouncementWords>> entry = arrivals_.next("the messages of " + peer_);
    if (!entry) {
        return std::nullopt;
    }
    const auto [key, bytes, slot, start_ns, end_ns, queued_ns] = *entry;
    if (slot >= slots_ || bytes > slot_bytes_) {
        throw TransportCorruptError("the messages of " + peer_ + ": " + std::to_string(bytes) + " bytes in slot " +
                                    std::to_string(slot) + ", of " + std::to_string(slots_) + " slots of " +
                                    std::to_string(slot_bytes_) + " bytes");
    }
    const std::uint64_t now_ns = monotonic_ns();
    if (queued_ns > start_ns || start_ns > end_ns || end_ns > now_ns) {  // one clock for all processes of a node
        throw TransportCorruptError("the messages of " + peer_ + ": queued at " + std::to_string(queued_ns) +
                                    " ns, copied from " + std::to_string(start_ns) + " to " + std::to_string(end_ns) +
                                    " ns, and it is " + std::to_string(now_ns) +
                                    " ns now; something else writes to this memory: restart the job");
    }
    return Arrival{key, bytes, static_cast<std::uint32_t>(slot), start_ns, end_ns, queued_ns};
}

std::byte* HostPath::slot_data(std::uint32_t slot) const noexcept { return from_peer_.slot_data(slot); }

void HostPath::give_back(std::uint32_t slot) noexcept { returns_.push({slot}); }

}  // namespace megatronapp::transport
