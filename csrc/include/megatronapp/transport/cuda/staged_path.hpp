#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "megatronapp/transport/cuda/copy_stream.hpp"
#include "megatronapp/transport/host/host_buffer.hpp"
#include "megatronapp/transport/host/host_slots.hpp"
#include "megatronapp/transport/shm/layout.hpp"

namespace megatronapp::transport {

/// A device's end of a path between hosts, for a peer with which its device shares no memory: a rank without a device,
/// or one on another node. The other end does not know that this one is a device.
///
/// A send is copied by the device into pinned memory of the host: the receiver's slot where this rank maps it,
/// otherwise memory of its own. Once that has ended, a thread of this path hands the message to the path between the
/// hosts. So a message is announced when it is whole, and no stream waits for a peer. A received message is copied into
/// memory of the device by the stream that is to read it, and its slot is returned once that stream has read it.
class StagedPath final : public Path {
  public:
    /// `peer_credits`: the peer's bell, null where the path between the hosts wakes the peer itself. Takes a path that
    /// carries messages, pins its memory, and tries a copy. Raises CudaError, or TransportError if that went wrong.
    StagedPath(const cuda::SharedDevice& device, std::unique_ptr<HostSlots> hosts, std::uint32_t peer,
               Bell* peer_credits);
    StagedPath(const StagedPath&) = delete;
    StagedPath& operator=(const StagedPath&) = delete;
    StagedPath(StagedPath&&) = delete;
    StagedPath& operator=(StagedPath&&) = delete;
    ~StagedPath() override;

    [[nodiscard]] const char* name() const noexcept override { return memory_->hosts->staged_name(); }
    [[nodiscard]] std::uint64_t slots() const noexcept override { return slots_; }
    [[nodiscard]] std::uint64_t slot_bytes() const noexcept override { return memory_->hosts->slot_bytes(); }

    [[nodiscard]] bool on_device() const noexcept override { return true; }
    [[nodiscard]] bool starts_at_once() const noexcept override { return true; }
    void start(const StartedSend& started, CopySink& sink) noexcept override;
    [[nodiscard]] void* mark(DeviceStream stream) override;
    void drop_mark(void* mark) noexcept override { memory_->copies.drop_mark(mark); }
    [[nodiscard]] std::optional<std::uint32_t> next_returned() override { return memory_->hosts->next_returned(); }
    void need_slot() noexcept override { memory_->hosts->need_slot(); }

    [[nodiscard]] std::optional<Arrival> next_arrival() override;
    [[nodiscard]] bool landed(std::uint32_t slot) override { return memory_->hosts->landed(slot); }
    [[nodiscard]] std::byte* slot_data(std::uint32_t slot) const noexcept override;
    void give_back(std::uint32_t slot) noexcept override;
    void wait(std::uint32_t slot, DeviceStream stream) override;
    void give_back_after(std::uint32_t slot, DeviceStream stream) noexcept override;

    void abandon() noexcept override { memory_->hosts->abandon(); }
    void stop() noexcept override;

  private:
    /// Written by the device: numbers of the messages of a slot, from 1.
    struct alignas(kLine) SlotWords {
        std::atomic<std::uint32_t> staged;    ///< the last one whose contents are in pinned memory
        std::atomic<std::uint32_t> released;  ///< the last received one that no stream reads any more
    };

    /// A slot that is returned once the device has written a number.
    struct Return {
        std::uint32_t slot;
        std::uint32_t number;
    };

    /// What device work may still use after this rank has closed.
    struct Memory {
        std::unique_ptr<HostSlots> hosts;
        std::uint64_t stride;
        HostBuffer staging;  ///< of sends, where the receiver's slots are out of reach
        HostBuffer words;
        cuda::RegisteredMemory seen_incoming;
        cuda::RegisteredMemory seen_outgoing;
        cuda::RegisteredMemory seen_words;
        cuda::DeviceMemory own_slots;
        CopyStream copies;
        cuda::LastUses last_uses;  ///< by slot: copies out of it, then returns

        Memory(const cuda::SharedDevice& device, std::unique_ptr<HostSlots> path, const std::string& peer);
        [[nodiscard]] std::span<std::byte> outgoing() const noexcept;
        [[nodiscard]] std::byte* outgoing_slot(std::uint32_t slot) const noexcept;
        [[nodiscard]] SlotWords& words_of(std::uint32_t slot) const noexcept;
    };

    void try_copy();
    void watch() noexcept;
    void hand_over(const CopyStream::Ended& ended) noexcept;
    [[nodiscard]] bool return_released() noexcept;

    cuda::SharedDevice device_;
    std::uint64_t slots_;
    std::string peer_;
    Bell* peer_credits_;
    std::unique_ptr<Memory> memory_;

    std::mutex mutex_;
    std::condition_variable wake_;
    std::vector<std::uint32_t> sent_;  ///< by slot: messages
    std::deque<Return> returns_;
    bool stopping_ = false;
    bool given_up_ = false;

    std::mutex return_mutex_;
    std::vector<std::uint32_t> returned_;  ///< by slot: messages that are returned in the order of a stream
    std::vector<std::uint64_t> bytes_;     ///< by slot: of the message that it holds

    std::thread watcher_;
};

/// A path between hosts as it is, or staged if this rank has a device and the path carries messages. `device` may be
/// null; otherwise as the constructor of `StagedPath`.
[[nodiscard]] std::unique_ptr<Path> staged(const cuda::SharedDevice& device, std::unique_ptr<HostSlots> hosts,
                                           std::uint32_t peer, Bell* peer_credits);

}  // namespace megatronapp::transport
