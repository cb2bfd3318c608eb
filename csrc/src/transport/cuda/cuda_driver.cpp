#include "megatronapp/transport/cuda/cuda_driver.hpp"

#include <dlfcn.h>

namespace megatronapp::transport::cuda {
namespace {

template <typename Function>
void bind(void* library, const char* name, Function& function) {
    void* symbol = ::dlsym(library, name);
    if (symbol == nullptr) {
        throw TransportError(std::string("libcuda.so.1 has no function ") + name +
                             "; install an NVIDIA driver for CUDA 11.7 or newer");
    }
    function = reinterpret_cast<Function>(symbol);
}

Driver load() {
    void* library = ::dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
        throw TransportError(
            "libcuda.so.1 cannot be loaded, so no device can be used; install the NVIDIA driver, give the container "
            "its GPUs, or name no device");
    }
    Driver driver{};
    bind(library, "cuInit", driver.init);
    bind(library, "cuGetErrorName", driver.error_name);
    bind(library, "cuDeviceGet", driver.device);
    bind(library, "cuDeviceGetAttribute", driver.device_attribute);
    bind(library, "cuDeviceCanAccessPeer", driver.can_access_peer);
    bind(library, "cuDevicePrimaryCtxRetain", driver.primary_context_retain);
    bind(library, "cuDevicePrimaryCtxRelease_v2", driver.primary_context_release);
    bind(library, "cuCtxPushCurrent_v2", driver.context_push);
    bind(library, "cuCtxPopCurrent_v2", driver.context_pop);
    bind(library, "cuMemAlloc_v2", driver.allocate);
    bind(library, "cuMemFree_v2", driver.free);
    bind(library, "cuIpcGetMemHandle", driver.ipc_handle);
    bind(library, "cuIpcOpenMemHandle_v2", driver.ipc_open);
    bind(library, "cuIpcCloseMemHandle", driver.ipc_close);
    bind(library, "cuMemHostRegister_v2", driver.host_register);
    bind(library, "cuMemHostUnregister", driver.host_unregister);
    bind(library, "cuMemHostGetDevicePointer_v2", driver.host_address);
    bind(library, "cuMemcpyAsync", driver.copy);
    driver.copy_batch =
        reinterpret_cast<decltype(driver.copy_batch)>(::dlsym(library, "cuMemcpyBatchAsync_v2"));  // may be missing
    bind(library, "cuStreamCreate", driver.stream_create);
    bind(library, "cuStreamDestroy_v2", driver.stream_destroy);
    bind(library, "cuStreamSynchronize", driver.stream_synchronize);
    bind(library, "cuStreamWaitEvent", driver.stream_wait_event);
    bind(library, "cuStreamWriteValue32_v2", driver.stream_write_32);
    bind(library, "cuStreamWriteValue64_v2", driver.stream_write_64);
    bind(library, "cuStreamWaitValue32_v2", driver.stream_wait_32);
    bind(library, "cuEventCreate", driver.event_create);
    bind(library, "cuEventDestroy_v2", driver.event_destroy);
    bind(library, "cuEventRecord", driver.event_record);
    bind(library, "cuEventQuery", driver.event_query);
    bind(library, "cuEventElapsedTime", driver.event_elapsed);
    return driver;
}

std::string text_of(const Driver& driver, const char* function, Result code, const std::string& advice) {
    const char* name = nullptr;
    if (driver.error_name(code, &name) != kSuccess || name == nullptr) {
        name = "unknown";
    }
    return std::string(function) + " failed with " + name + " (" + std::to_string(code) + "); " + advice;
}

}  // namespace

const Driver& installed_driver() {
    static const Driver driver = load();
    return driver;
}

CudaError::CudaError(const Driver& driver, const char* failed_function, Result failed_code, const std::string& advice)
    : TransportError(text_of(driver, failed_function, failed_code, advice)),
      function(failed_function),
      code(failed_code) {}

void require(const Driver& driver, const char* function, Result code, const char* advice) {
    if (code != kSuccess) {
        throw CudaError(driver, function, code, advice);
    }
}

}  // namespace megatronapp::transport::cuda
