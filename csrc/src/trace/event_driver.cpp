#include "megatronapp/trace/event_driver.hpp"

#include <dlfcn.h>

#include "megatronapp/error.hpp"

namespace megatronapp {
namespace {

template <typename Function>
void bind(void* library, const std::string& path, const char* name, Function& function) {
    void* symbol = ::dlsym(library, name);
    if (symbol == nullptr) {
        throw RingError(path + " has no function " + name + "; install an NVIDIA driver for CUDA 11.7 or newer");
    }
    function = reinterpret_cast<Function>(symbol);
}

}  // namespace

EventDriver load_event_driver(const std::string& library) {
    void* handle = ::dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (handle == nullptr) {
        throw RingError(library +
                        " cannot be loaded, so the device's times cannot be recorded; install the NVIDIA "
                        "driver, or give the container its GPUs");
    }
    EventDriver driver{};
    bind(handle, library, "cuInit", driver.init);
    bind(handle, library, "cuGetErrorName", driver.error_name);
    bind(handle, library, "cuDeviceGet", driver.device);
    bind(handle, library, "cuDevicePrimaryCtxRetain", driver.primary_context_retain);
    bind(handle, library, "cuDevicePrimaryCtxRelease_v2", driver.primary_context_release);
    bind(handle, library, "cuCtxPushCurrent_v2", driver.context_push);
    bind(handle, library, "cuCtxPopCurrent_v2", driver.context_pop);
    bind(handle, library, "cuEventCreate", driver.event_create);
    bind(handle, library, "cuEventDestroy_v2", driver.event_destroy);
    bind(handle, library, "cuEventRecord", driver.event_record);
    bind(handle, library, "cuEventQuery", driver.event_query);
    bind(handle, library, "cuEventElapsedTime", driver.event_elapsed);
    return driver;
}

}  // namespace megatronapp
