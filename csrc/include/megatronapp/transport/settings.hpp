#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

namespace megatronapp::transport {

namespace cuda {
struct Driver;
}

struct Settings {
    std::string directory;  ///< of shared memory, the same for all ranks of a node
    std::string job;        ///< uid; letters, digits, '-' and '_'
    std::uint64_t attempt;
    std::uint32_t rank;
    std::uint64_t slot_bytes;  ///< the largest message
    std::uint64_t slots;       ///< messages between two ranks in one direction that are not released yet
    double deadline_s;         ///< for a peer to register, and for a send to get a slot
    std::uint32_t threads;     ///< that copy in host memory
    /// Called by waiting threads of the application every 100 ms, so that it can react to signals; may throw.
    std::function<void()> while_waiting = {};
    /// Ordinal of the device from whose memory and into whose memory messages go; none: host memory. Peers may have
    /// one or not.
    std::optional<int> device = {};
    /// With a device: slots in pinned host memory, where devices do not reach each other. The same on all ranks with
    /// devices; for other peers they are there in any case.
    bool pinned = false;
    const cuda::Driver* driver = nullptr;  ///< null: that of libcuda.so.1
};

/// The settings, if an endpoint can have them. Raises TransportError.
[[nodiscard]] Settings checked(Settings settings);

}  // namespace megatronapp::transport
