/// The functions of the CUDA driver that the recorder uses. Neither building nor running without a device needs CUDA.
#pragma once

#include <string>

namespace megatronapp {

using DeviceEvent = struct DeviceEventHandle*;
using DeviceStream = struct DeviceStreamHandle*;
using DeviceContext = struct DeviceContextHandle*;

inline constexpr int kDriverSuccess = 0;
inline constexpr int kDriverNotReady = 600;
inline constexpr unsigned kTimedEventFlags = 0;

struct EventDriver {
    int (*init)(unsigned flags);
    int (*error_name)(int code, const char** name);
    int (*device)(int* device, int ordinal);
    int (*primary_context_retain)(DeviceContext* context, int device);
    int (*primary_context_release)(int device);
    int (*context_push)(DeviceContext context);
    int (*context_pop)(DeviceContext* context);
    int (*event_create)(DeviceEvent* event, unsigned flags);
    int (*event_destroy)(DeviceEvent event);
    int (*event_record)(DeviceEvent event, DeviceStream stream);
    int (*event_query)(DeviceEvent event);
    int (*event_elapsed)(float* milliseconds, DeviceEvent start, DeviceEvent end);
};

/// The functions of a library of the driver, by default libcuda.so.1. It stays loaded. Raises RingError where there is
/// no such library or it has no such functions.
[[nodiscard]] EventDriver load_event_driver(const std::string& library);

}  // namespace megatronapp
