/// The functions of the CUDA driver that the transport uses, bound when a device is first needed: neither building nor
/// running without a device needs CUDA. Types and numbers are those of the driver API's documentation; all functions
/// but `copy_batch` exist since CUDA 11.7.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

#include "megatronapp/transport/errors.hpp"

namespace megatronapp::transport::cuda {

using Result = int;
using Address = unsigned long long;  // NOLINT(google-runtime-int): what the driver API says
using Context = struct DriverContext*;
using Stream = struct StreamHandle*;
using Event = struct EventHandle*;
using Device = int;

struct IpcHandle {
    std::array<char, 64> bytes;
};

/// Attributes of the copies of a batch: CUmemcpyAttributes_v1. Hints on locations are for managed memory alone.
struct CopyAttributes {
    int source_access_order;
    std::array<int, 2> source_location;
    std::array<int, 2> target_location;
    unsigned flags;
};

inline constexpr int kSourceInStreamOrder = 1;
inline constexpr Result kSuccess = 0;
inline constexpr Result kNotReady = 600;
inline constexpr int kCanUse64BitStreamMemoryOperations = 122;  // attribute of a device
inline constexpr unsigned kNonBlockingStream = 1;
inline constexpr unsigned kTimedEvent = 0;
inline constexpr unsigned kUntimedEvent = 2;
inline constexpr unsigned kEnablePeerAccess = 1;
inline constexpr unsigned kPortableAndMapped = 3;
inline constexpr unsigned kWaitUntilAtLeast = 0;
inline constexpr unsigned kWriteWithBarrier = 0;

struct Driver {
    Result (*init)(unsigned flags);
    Result (*error_name)(Result code, const char** name);
    Result (*device)(Device* device, int ordinal);
    Result (*device_attribute)(int* value, int attribute, Device device);
    Result (*can_access_peer)(int* can, Device device, Device peer);
    Result (*primary_context_retain)(Context* context, Device device);
    Result (*primary_context_release)(Device device);
    Result (*context_push)(Context context);
    Result (*context_pop)(Context* context);
    Result (*allocate)(Address* address, std::size_t bytes);
    Result (*free)(Address address);
    Result (*ipc_handle)(IpcHandle* handle, Address address);
    Result (*ipc_open)(Address* address, IpcHandle handle, unsigned flags);
    Result (*ipc_close)(Address address);
    Result (*host_register)(void* data, std::size_t bytes, unsigned flags);
    Result (*host_unregister)(void* data);
    Result (*host_address)(Address* address, void* data, unsigned flags);
    Result (*copy)(Address to, Address from, std::size_t bytes, Stream stream);
    /// Copies in no order between each other, by one call; null where the driver is older than CUDA 13.
    Result (*copy_batch)(const Address* to, const Address* from, const std::size_t* bytes, std::size_t count,
                         CopyAttributes* attributes, std::size_t* first_copies, std::size_t attribute_count,
                         Stream stream);
    Result (*stream_create)(Stream* stream, unsigned flags);
    Result (*stream_destroy)(Stream stream);
    Result (*stream_synchronize)(Stream stream);
    Result (*stream_wait_event)(Stream stream, Event event, unsigned flags);
    Result (*stream_write_32)(Stream stream, Address address, std::uint32_t value, unsigned flags);
    Result (*stream_write_64)(Stream stream, Address address, std::uint64_t value, unsigned flags);
    Result (*stream_wait_32)(Stream stream, Address address, std::uint32_t value, unsigned flags);
    Result (*event_create)(Event* event, unsigned flags);
    Result (*event_destroy)(Event event);
    Result (*event_record)(Event event, Stream stream);
    Result (*event_query)(Event event);
    Result (*event_elapsed)(float* milliseconds, Event start, Event end);
};

/// The functions of libcuda.so.1. Raises TransportError where there is no such library, or one that is too old.
[[nodiscard]] const Driver& installed_driver();

/// A function of the driver that failed.
class CudaError : public TransportError {
  public:
    CudaError(const Driver& driver, const char* failed_function, Result failed_code, const std::string& advice);

    std::string function;
    Result code;
};

/// Raises CudaError unless the code is that of success.
void require(const Driver& driver, const char* function, Result code, const char* advice);

}  // namespace megatronapp::transport::cuda
