#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <optional>
#include <span>
#include <string>

#include "megatronapp/transport/host/host_slots.hpp"
#include "megatronapp/transport/path.hpp"
#include "megatronapp/transport/shm/layout.hpp"
#include "megatronapp/transport/shm/shared_file.hpp"

namespace megatronapp::transport {

/// One file of messages from a sender to a receiver, as either of them sees it.
class InboxFile {
  public:
    /// Makes the file of the receiver, without a name yet.
    static InboxFile create(const std::string& path, const Identity& identity);
    /// Opens it as the sender; none while there is no such file. Raises TransportMismatchError.
    static std::optional<InboxFile> open(const std::string& path, const Identity& expected);

    [[nodiscard]] InboxHeader& header() const noexcept { return *reinterpret_cast<InboxHeader*>(file_.data()); }
    [[nodiscard]] Announcement* announcements() const noexcept;
    [[nodiscard]] ReturnedSlot* returned_slots() const noexcept;
    [[nodiscard]] std::byte* slot_data(std::uint32_t slot) const noexcept;
    [[nodiscard]] SlotFlags& flags(std::uint32_t slot) const noexcept;
    [[nodiscard]] SharedFile& file() noexcept { return file_; }
    [[nodiscard]] std::span<std::byte> memory() const noexcept { return {file_.data(), file_.bytes()}; }
    [[nodiscard]] const InboxLayout& layout() const noexcept { return layout_; }

  private:
    InboxFile(SharedFile file, const InboxLayout& layout) : file_(std::move(file)), layout_(layout) {}

    SharedFile file_;
    InboxLayout layout_;
};

/// Raises TransportMismatchError unless a file is what it should be, and says which of the two ranks to change.
void require_identity(const std::string& path, const Identity& found, const Identity& expected);

/// Slots in shared memory of one node, filled by memcpy and read in place.
class HostPath final : public HostSlots {
  public:
    HostPath(InboxFile to_peer, InboxFile from_peer, const Identity& identity, std::uint32_t peer);

    [[nodiscard]] const char* name() const noexcept override { return "host memory"; }
    [[nodiscard]] const char* staged_name() const noexcept override { return "pinned host memory"; }
    [[nodiscard]] std::uint64_t slots() const noexcept override { return slots_; }
    [[nodiscard]] std::uint64_t slot_bytes() const noexcept override { return slot_bytes_; }

    void start(const StartedSend& started, CopySink& sink) noexcept override;
    [[nodiscard]] std::optional<std::uint32_t> next_returned() override;

    [[nodiscard]] std::optional<Arrival> next_arrival() override;
    [[nodiscard]] std::byte* slot_data(std::uint32_t slot) const noexcept override;
    void give_back(std::uint32_t slot) noexcept override;

    [[nodiscard]] std::span<std::byte> incoming() const noexcept override { return from_peer_.memory(); }
    [[nodiscard]] std::span<std::byte> outgoing() const noexcept override { return to_peer_.memory(); }
    [[nodiscard]] std::byte* outgoing_slot(std::uint32_t slot) const noexcept override {
        return to_peer_.slot_data(slot);
    }

  private:
    std::uint64_t slots_;
    std::uint64_t slot_bytes_;
    std::string peer_;
    InboxFile to_peer_;
    InboxFile from_peer_;
    std::mutex announce_mutex_;
    std::atomic<std::uint64_t> copied_ = 0;  ///< number of messages in slots, counted before they are announced
    CheckedWriter<kAnnouncementWords> announcements_;
    CheckedReader<1> returned_;
    CheckedReader<kAnnouncementWords> arrivals_;
    CheckedWriter<1> returns_;
};

}  // namespace megatronapp::transport
