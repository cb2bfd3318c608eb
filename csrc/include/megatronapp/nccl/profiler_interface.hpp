/// Version 4 of the profiler interface of NCCL (2.27 and later), as far as the plugin uses it.
///
/// Declared after NCCL's documentation of the interface (github.com/NVIDIA/nccl, ext-profiler), so that no header of
/// NCCL is needed to build. Sizes and order of fields are part of its binary interface.
#pragma once

#include <cstddef>
#include <cstdint>

namespace megatronapp::nccl {

using Result = int;
inline constexpr Result kSuccess = 0;

enum EventType : std::uint8_t { kCollective = 1U << 1U, kPointToPoint = 1U << 2U, kKernelChannel = 1U << 6U };

inline constexpr int kKernelChannelStop = 22;

struct CollectiveEvent {
    std::uint64_t sequence;
    const char* function;
    const void* send_buffer;
    void* receive_buffer;
    std::size_t count;
    int root;
    const char* datatype;
    std::uint8_t channels;
    std::uint8_t warps;
    const char* algorithm;
    const char* protocol;
};

struct PointToPointEvent {
    const char* function;
    void* buffer;
    const char* datatype;
    std::size_t count;
    int peer;
    std::uint8_t channels;
};

struct KernelChannelEvent {
    std::uint8_t channel;
    std::uint64_t timer_ns;  // of the device: its global timer
};

struct EventDescription {
    std::uint8_t type;
    void* parent;
    int rank;
    union {
        CollectiveEvent collective;
        PointToPointEvent point_to_point;
        KernelChannelEvent kernel_channel;
    };
};

union StateArguments {
    std::size_t bytes;
    void* data;
    struct {
        std::uint64_t timer_ns;
    } kernel_channel;
};

using Logger = void (*)(int level, unsigned long flags, const char* file, int line, const char* format, ...);

struct Profiler {
    const char* name;
    Result (*init)(void** context, int* event_types, const char* name, std::uint64_t hash, int nodes, int ranks,
                   int rank, Logger logger);
    Result (*start_event)(void* context, void** handle, EventDescription* description);
    Result (*stop_event)(void* handle);
    Result (*record_state)(void* handle, int state, StateArguments* arguments);
    Result (*finalize)(void* context);
};

}  // namespace megatronapp::nccl
