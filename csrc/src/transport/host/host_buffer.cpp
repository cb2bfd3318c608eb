#include "megatronapp/transport/host/host_buffer.hpp"

#include <sys/mman.h>

#include <string>

#include "megatronapp/transport/errors.hpp"

namespace megatronapp::transport {

HostBuffer::HostBuffer(std::uint64_t bytes) : bytes_(bytes) {
    if (bytes_ == 0) {
        return;
    }
    void* data = ::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    if (data == MAP_FAILED) {  // NOLINT(performance-no-int-to-ptr): as mmap defines it
        throw TransportError("no memory for " + std::to_string(bytes) + " bytes of slots; use fewer or smaller slots");
    }
    data_ = static_cast<std::byte*>(data);
}

HostBuffer::~HostBuffer() {
    if (data_ != nullptr) {
        ::munmap(data_, bytes_);
    }
}

}  // namespace megatronapp::transport
