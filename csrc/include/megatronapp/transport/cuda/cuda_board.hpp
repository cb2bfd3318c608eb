#pragma once

#include <cstdint>
#include <memory>
#include <mutex>

#include "megatronapp/transport/cuda/cuda_device.hpp"
#include "megatronapp/transport/settings.hpp"
#include "megatronapp/transport/shm/board.hpp"
#include "megatronapp/transport/transfers.hpp"

namespace megatronapp::transport {

/// The device of an endpoint, null without one. Raises CudaError and TransportError.
[[nodiscard]] cuda::SharedDevice device_of(const Settings& settings);

/// A rank's board as its device writes to it.
class BoardOnDevice {
  public:
    BoardOnDevice(const cuda::SharedDevice& device, OwnBoard& board);
    BoardOnDevice(const BoardOnDevice&) = delete;
    BoardOnDevice& operator=(const BoardOnDevice&) = delete;
    BoardOnDevice(BoardOnDevice&&) = delete;
    BoardOnDevice& operator=(BoardOnDevice&&) = delete;
    ~BoardOnDevice();

    /// Stores a word of the board once all has ended that is enqueued on a stream. Raises CudaError.
    void publish_after(DeviceStream stream, const Word& word, std::uint64_t value);

  private:
    cuda::SharedDevice device_;
    std::unique_ptr<cuda::RegisteredMemory> seen_;
    std::mutex mutex_;
    cuda::LastUses last_uses_;
};

}  // namespace megatronapp::transport
