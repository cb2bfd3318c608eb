#include "megatronapp/transport/settings.hpp"

#include "megatronapp/transport/errors.hpp"
#include "megatronapp/transport/shm/layout.hpp"

namespace megatronapp::transport {
namespace {

constexpr std::uint32_t kMaxThreads = 64;

}  // namespace

Settings checked(Settings settings) {
    if (settings.slots == 0 || settings.slots > kMaxSlots) {
        throw TransportError(std::to_string(settings.slots) + " slots: give 1 to " + std::to_string(kMaxSlots));
    }
    if (settings.slot_bytes == 0 || settings.slot_bytes > kMaxSlotBytes) {
        throw TransportError("slots of " + std::to_string(settings.slot_bytes) + " bytes: give 1 to " +
                             std::to_string(kMaxSlotBytes));
    }
    if (settings.threads == 0 || settings.threads > kMaxThreads) {
        throw TransportError(std::to_string(settings.threads) + " threads: give 1 to " + std::to_string(kMaxThreads));
    }
    if (!(settings.deadline_s > 0)) {
        throw TransportError("a deadline of " + std::to_string(settings.deadline_s) + " s: give more than 0");
    }
    return settings;
}

}  // namespace megatronapp::transport
