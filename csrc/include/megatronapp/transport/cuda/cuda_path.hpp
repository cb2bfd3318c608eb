#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "megatronapp/transport/cuda/copy_stream.hpp"
#include "megatronapp/transport/cuda/cuda_device.hpp"
#include "megatronapp/transport/host/host_path.hpp"
#include "megatronapp/transport/path.hpp"

namespace megatronapp::transport {

/// Slots in memory of the receiver's device, filled by a copy engine of the sender's and read in place; or, where the
/// devices do not reach each other, in pinned host memory, and copied from there by the receiver's device.
///
/// A send is enqueued on a stream of the path: wait for the mark on the caller's stream, copy, then write the sequence
/// number of the slot's message into the inbox, where the receiver's host reads it and the receiver's streams wait for
/// it. The message is announced as soon as all that is enqueued. A thread sees the number, too, and reports the times
/// of the copy. The receiver returns a slot by writing the same number into another word, on a stream or at once.
///
/// Streams wait for nothing but these words and streams of their own process. So when a peer fails, `abandon` ends all
/// waits by writing the words of announced messages itself; the messages then do not count as whole. It calls no
/// function of the driver and waits for no thread that does: while a stream waits, such calls may not return. For the
/// same reason no lock is held while work is enqueued on streams of the caller.
class CudaPath final : public Path {
  public:
    struct Bells {
        Bell* credits;   ///< of this rank
        Bell* activity;  ///< of the peer
    };

    /// Opens the peer's memory and tries a copy. Raises CudaError, or TransportError if the copy went wrong.
    CudaPath(const cuda::SharedDevice& device, std::unique_ptr<cuda::DeviceMemory> own_slots, InboxFile to_peer,
             InboxFile from_peer, const Identity& identity, std::uint32_t peer, Bells bells);
    CudaPath(const CudaPath&) = delete;
    CudaPath& operator=(const CudaPath&) = delete;
    CudaPath(CudaPath&&) = delete;
    CudaPath& operator=(CudaPath&&) = delete;
    ~CudaPath() override;

    [[nodiscard]] const char* name() const noexcept override { return pinned_ ? "pinned host memory" : "CUDA IPC"; }
    [[nodiscard]] std::uint64_t slots() const noexcept override { return slots_; }
    [[nodiscard]] std::uint64_t slot_bytes() const noexcept override { return slot_bytes_; }

    [[nodiscard]] bool on_device() const noexcept override { return true; }
    [[nodiscard]] bool starts_at_once() const noexcept override { return true; }
    void start(const StartedSend& started, CopySink& sink) noexcept override;
    [[nodiscard]] void* mark(DeviceStream stream) override;
    void drop_mark(void* mark) noexcept override { memory_->copies.drop_mark(mark); }
    [[nodiscard]] std::optional<std::uint32_t> next_returned() override;
    void need_slot() noexcept override;

    [[nodiscard]] std::optional<Arrival> next_arrival() override;
    [[nodiscard]] bool landed(std::uint32_t slot) override;
    [[nodiscard]] std::optional<CopyTimes> times(const Arrival& arrival) override;
    [[nodiscard]] std::byte* slot_data(std::uint32_t slot) const noexcept override;
    void give_back(std::uint32_t slot) noexcept override;
    void wait(std::uint32_t slot, DeviceStream stream) override;
    void give_back_after(std::uint32_t slot, DeviceStream stream) noexcept override;

    void abandon() noexcept override;
    void stop() noexcept override;

  private:
    /// What device work may still use after this rank has closed.
    struct Memory {
        InboxFile to_peer;
        InboxFile from_peer;
        cuda::RegisteredMemory seen_to_peer;
        cuda::RegisteredMemory seen_from_peer;
        std::unique_ptr<cuda::DeviceMemory> own_slots;
        std::optional<cuda::OpenedMemory> peer_slots;
        CopyStream copies;
        cuda::LastUses last_uses;  ///< by slot: waits, then returns

        Memory(const cuda::SharedDevice& device, std::unique_ptr<cuda::DeviceMemory> slots, InboxFile to,
               InboxFile from, std::uint64_t count, const std::string& peer);
    };

    /// Received messages of a slot.
    struct Received {
        std::uint32_t sequence = 0;
        std::uint64_t bytes = 0;
        bool abandoned = false;
    };

    void try_copy();
    [[nodiscard]] cuda::Address target(std::uint32_t slot) const noexcept;
    [[nodiscard]] bool whole(std::uint32_t slot) const;
    [[nodiscard]] std::string slot_text(std::uint32_t slot) const;

    void watch_flights() noexcept;
    void publish_times(const CopyStream::Ended& ended) noexcept;
    void ring_credits_if_returned() noexcept;

    cuda::SharedDevice device_;
    std::uint64_t slots_;
    std::uint64_t slot_bytes_;
    bool pinned_;
    std::string peer_;
    Bells bells_;
    std::unique_ptr<Memory> memory_;

    std::mutex send_mutex_;
    std::condition_variable wake_;
    CheckedWriter<kAnnouncementWords> announcements_;
    std::vector<std::uint32_t> sent_;   ///< by slot: sequence of its last message
    std::vector<std::uint32_t> timed_;  ///< by slot: sequence of the last message whose times are published
    std::vector<bool> lent_;
    std::atomic<bool> needs_slot_ = false;
    bool stopping_ = false;
    bool given_up_ = false;

    std::mutex receive_mutex_;
    CheckedReader<kAnnouncementWords> arrivals_;
    std::vector<Received> received_;

    std::thread watcher_;
};

}  // namespace megatronapp::transport
