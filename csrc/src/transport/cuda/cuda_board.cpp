#include "megatronapp/transport/cuda/cuda_board.hpp"

namespace megatronapp::transport {

cuda::SharedDevice device_of(const Settings& settings) {
    if (!settings.device) {
        return nullptr;
    }
    const cuda::Driver& driver = settings.driver != nullptr ? *settings.driver : cuda::installed_driver();
    return std::make_shared<cuda::CudaDevice>(driver, *settings.device);
}

BoardOnDevice::BoardOnDevice(const cuda::SharedDevice& device, OwnBoard& board)
    : device_(device),
      seen_(std::make_unique<cuda::RegisteredMemory>(device, board.file().data(), board.file().bytes())),
      last_uses_(device, 1) {}

BoardOnDevice::~BoardOnDevice() {
    const cuda::CurrentContext current(*device_);
    if (!last_uses_.ended_soon()) {
        static_cast<void>(seen_.release());  // NOLINT(bugprone-unused-return-value): the device still writes there
    }
}

void BoardOnDevice::publish_after(DeviceStream stream, const Word& word, std::uint64_t value) {
    const cuda::CurrentContext current(*device_);
    const std::lock_guard lock(mutex_);
    auto* handle = static_cast<cuda::Stream>(stream.handle);
    const cuda::Driver& driver = device_->driver();
    cuda::require(driver, "cuStreamWriteValue64",
                  driver.stream_write_64(handle, seen_->address_of(&word), value, cuda::kWriteWithBarrier),
                  "an earlier kernel may have failed: run with CUDA_LAUNCH_BLOCKING=1 to see which");
    last_uses_.record(0, handle);
}

}  // namespace megatronapp::transport
