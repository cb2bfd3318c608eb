#include "megatronapp/transport/cuda/cuda_slots.hpp"

#include <cstring>
#include <mutex>
#include <utility>
#include <vector>

namespace megatronapp::transport {
namespace {

/// Memory of slots that a peer's device may still use; given back when a path is made or ends after the peer's end.
class RetiredSlots {
  public:
    struct Entry {
        InboxFile inbox;
        std::unique_ptr<cuda::DeviceMemory> slots;
    };

    static RetiredSlots& instance() {
        static auto* slots = new RetiredSlots;  // the driver may end before static objects do
        return *slots;
    }

    void add(Entry entry) {
        const std::lock_guard lock(mutex_);
        entries_.push_back(std::move(entry));
    }

    void free_unused() {
        const std::lock_guard lock(mutex_);
        std::erase_if(entries_, [](const Entry& entry) {
            return entry.inbox.header().detached.load(std::memory_order_acquire) != 0;
        });
    }

  private:
    std::mutex mutex_;
    std::vector<Entry> entries_;
};

}  // namespace

std::unique_ptr<cuda::DeviceMemory> make_slots(const cuda::SharedDevice& device, InboxFile& inbox,
                                               const Identity& identity) {
    RetiredSlots::instance().free_unused();
    auto slots = std::make_unique<cuda::DeviceMemory>(device, identity.slots * inbox.layout().slot_stride);
    if (SlotMemory{identity.memory} == SlotMemory::kDevice) {
        SlotHandle& handle = inbox.header().handle;
        const cuda::IpcHandle of_driver = slots->handle();
        std::memcpy(handle.words.data(), of_driver.bytes.data(), sizeof(handle.words));
        handle.check = handle.computed_check();
    }
    return slots;
}

void retire_slots(InboxFile inbox, std::unique_ptr<cuda::DeviceMemory> slots) {
    RetiredSlots::instance().add({std::move(inbox), std::move(slots)});
    RetiredSlots::instance().free_unused();
}

}  // namespace megatronapp::transport
