/// The part of UCX's public interface (ucp/api/ucp.h, API 1.12 and later) that this transport uses, declared here so
/// that nothing of UCX is needed to build. Structures grow at their end, and a mask says which fields are meant, so
/// these prefixes hold for later versions; a test compares them with the headers of the wheel.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

namespace megatronapp::transport::ucx {

enum class Status : std::int8_t { kOk = 0, kInProgress = 1, kBusy = -15, kRejected = -23, kLast = -100 };

struct ContextHandle;
struct WorkerHandle;
struct EndpointHandle;
struct ConfigHandle;
struct AddressHandle;

inline constexpr std::uint64_t kFeatureWakeup = 1U << 4U;
inline constexpr std::uint64_t kFeatureActiveMessages = 1U << 6U;
inline constexpr std::uint64_t kParamsFeatures = 1U << 0U;
inline constexpr std::uint64_t kParamsEndpoints = 1U << 6U;

struct ContextParams {
    std::uint64_t field_mask;
    std::uint64_t features;
    std::size_t request_size;
    void (*request_init)(void*);
    void (*request_cleanup)(void*);
    std::uint64_t tag_sender_mask;
    int mt_workers_shared;
    std::size_t estimated_num_eps;
};

inline constexpr std::uint64_t kWorkerThreadMode = 1U << 0U;
enum class ThreadMode : std::uint32_t { kSingle, kSerialized, kMulti };

struct WorkerParams {
    std::uint64_t field_mask;
    ThreadMode thread_mode;
    std::array<unsigned long, 16> cpu_mask;  // NOLINT(google-runtime-int): as UCX declares it
    unsigned events;
    void* user_data;
    int event_fd;
    std::uint64_t flags;
};

inline constexpr std::uint64_t kEndpointAddress = 1U << 0U;
inline constexpr std::uint64_t kEndpointErrorMode = 1U << 1U;
inline constexpr std::uint64_t kEndpointErrorHandler = 1U << 2U;
enum class ErrorMode : std::uint32_t { kNone, kPeer };

using ErrorCallback = void (*)(void* argument, EndpointHandle* endpoint, Status status);

struct ErrorHandler {
    ErrorCallback callback;
    void* argument;
};

struct SocketAddress {
    const void* address;
    std::uint32_t length;
};

struct EndpointParams {
    std::uint64_t field_mask;
    const AddressHandle* address;
    ErrorMode error_mode;
    ErrorHandler error_handler;
    void* user_data;
    unsigned flags;
    SocketAddress socket_address;
};

inline constexpr std::uint64_t kReceivedReplyEndpoint = 1U << 0U;
inline constexpr std::uint64_t kReceivedRendezvous = 1U << 17U;

struct ReceivedParams {
    std::uint64_t attributes;
    EndpointHandle* reply_endpoint;
};

using MessageCallback = Status (*)(void* argument, const void* header, std::size_t header_length, void* data,
                                   std::size_t length, const ReceivedParams* params);

inline constexpr std::uint64_t kHandlerId = 1U << 0U;
inline constexpr std::uint64_t kHandlerCallback = 1U << 2U;
inline constexpr std::uint64_t kHandlerArgument = 1U << 3U;

struct HandlerParams {
    std::uint64_t field_mask;
    unsigned id;
    std::uint32_t flags;
    MessageCallback callback;
    void* argument;
};

inline constexpr std::uint32_t kOperationCallback = 1U << 1U;
inline constexpr std::uint32_t kOperationUserData = 1U << 2U;
inline constexpr std::uint32_t kOperationDatatype = 1U << 3U;
inline constexpr std::uint32_t kOperationFlags = 1U << 4U;
inline constexpr std::uint32_t kOperationMemoryType = 1U << 6U;
inline constexpr std::uint32_t kSendEager = 1U << 1U;
inline constexpr std::uint32_t kSendRendezvous = 1U << 2U;
inline constexpr std::uint32_t kCloseForce = 1U << 0U;
enum class MemoryType : std::uint32_t { kHost };

inline constexpr std::uint64_t kDatatypeIov = 2;

/// One of the pieces of memory that data with `kDatatypeIov` consists of, one after another.
struct IovEntry {
    const void* buffer;
    std::size_t length;
};

using SendCallback = void (*)(void* request, Status status, void* user_data);
using ReceiveCallback = void (*)(void* request, Status status, std::size_t length, void* user_data);

struct RequestParams {
    std::uint32_t attributes;
    std::uint32_t flags;
    void* request;
    union {
        SendCallback send;
        ReceiveCallback receive;
    } callback;
    std::uint64_t datatype;
    void* user_data;
    void* reply_buffer;
    MemoryType memory_type;
    void* received;
    void* memory;
};

/// The functions of a loaded library. It is never unloaded: UCX has threads and handlers of its own.
struct Library {
    /// Loads `libucp.so.0`: from this path, or from where the system finds it if the name has no slash. Signals that
    /// UCX would take over stay as they are. Raises TransportError, which says what to install.
    static const Library& load(const std::string& path);

    std::string version;

    void (*get_version)(unsigned* major, unsigned* minor, unsigned* release);
    const char* (*status_string)(Status status);
    Status (*config_read)(const char* prefix, const char* file, ConfigHandle** config);
    Status (*config_modify)(ConfigHandle* config, const char* name, const char* value);
    void (*config_release)(ConfigHandle* config);
    Status (*init_version)(unsigned major, unsigned minor, const ContextParams* params, const ConfigHandle* config,
                           ContextHandle** context);
    void (*cleanup)(ContextHandle* context);
    Status (*worker_create)(ContextHandle* context, const WorkerParams* params, WorkerHandle** worker);
    void (*worker_destroy)(WorkerHandle* worker);
    Status (*worker_get_address)(WorkerHandle* worker, AddressHandle** address, std::size_t* length);
    void (*worker_release_address)(WorkerHandle* worker, AddressHandle* address);
    unsigned (*worker_progress)(WorkerHandle* worker);
    Status (*worker_get_efd)(WorkerHandle* worker, int* descriptor);
    Status (*worker_arm)(WorkerHandle* worker);
    Status (*worker_set_am_recv_handler)(WorkerHandle* worker, const HandlerParams* params);
    Status (*ep_create)(WorkerHandle* worker, const EndpointParams* params, EndpointHandle** endpoint);
    void* (*ep_close_nbx)(EndpointHandle* endpoint, const RequestParams* params);
    void* (*am_send_nbx)(EndpointHandle* endpoint, unsigned id, const void* header, std::size_t header_length,
                         const void* buffer, std::size_t count, const RequestParams* params);
    void* (*am_recv_data_nbx)(WorkerHandle* worker, void* descriptor, void* buffer, std::size_t count,
                              const RequestParams* params);
    Status (*request_check_status)(void* request);
    void (*request_free)(void* request);
};

/// Whether what a function returned is an error and not a request.
[[nodiscard]] inline bool is_error(const void* pointer) noexcept {
    return reinterpret_cast<std::uintptr_t>(pointer) >=
           static_cast<std::uintptr_t>(static_cast<std::intptr_t>(Status::kLast));
}
[[nodiscard]] inline Status status_of(const void* pointer) noexcept {
    return static_cast<Status>(static_cast<std::int8_t>(reinterpret_cast<std::intptr_t>(pointer)));
}

}  // namespace megatronapp::transport::ucx
