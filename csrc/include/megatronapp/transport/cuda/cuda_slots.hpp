#pragma once

#include <memory>

#include "megatronapp/transport/cuda/cuda_device.hpp"
#include "megatronapp/transport/host/host_path.hpp"

namespace megatronapp::transport {

/// The slots of a receiver in memory of its device, made with the inbox that names them.
[[nodiscard]] std::unique_ptr<cuda::DeviceMemory> make_slots(const cuda::SharedDevice& device, InboxFile& inbox,
                                                             const Identity& identity);

/// Keeps slots that a peer's device may still use until the peer has said that it does not, and frees those of which
/// that is known by now.
void retire_slots(InboxFile inbox, std::unique_ptr<cuda::DeviceMemory> slots);

}  // namespace megatronapp::transport
