#include <dlfcn.h>

#include <csignal>
#include <map>
#include <mutex>

#include "megatronapp/transport/errors.hpp"
#include "megatronapp/transport/ucx/api.hpp"

namespace megatronapp::transport::ucx {
namespace {

constexpr const char* kAdvice =
    "; install libucx-cu13 (TCP only) or a UCX of the system (for InfiniBand), or name a libucp.so.0 with "
    "MEGATRONAPP_UCX_LIBRARY";

std::string last_error() {
    const char* text = ::dlerror();  // NOLINT(concurrency-mt-unsafe): of this thread
    return text == nullptr ? "unknown error" : text;
}

/// Opens the library and leaves the handler of SIGHUP as it is, which UCX replaces to enter a debugger.
void* open(const std::string& path) {
    struct sigaction before {};
    ::sigaction(SIGHUP, nullptr, &before);
    void* handle = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    const std::string error = handle == nullptr ? last_error() : std::string();
    ::sigaction(SIGHUP, &before, nullptr);
    if (handle == nullptr) {
        throw TransportError("UCX cannot be loaded: " + error + kAdvice);
    }
    return handle;
}

template <typename Function>
void find(void* handle, const std::string& path, const char* name, Function& function) {
    function = reinterpret_cast<Function>(::dlsym(handle, name));
    if (function == nullptr) {
        throw TransportError(path + " has no " + name + ", so it is older than UCX 1.12" + kAdvice);
    }
}

Library make_library(const std::string& path) {
    void* handle = open(path);
    Library library{};
    find(handle, path, "ucp_get_version", library.get_version);
    find(handle, path, "ucs_status_string", library.status_string);
    find(handle, path, "ucp_config_read", library.config_read);
    find(handle, path, "ucp_config_modify", library.config_modify);
    find(handle, path, "ucp_config_release", library.config_release);
    find(handle, path, "ucp_init_version", library.init_version);
    find(handle, path, "ucp_cleanup", library.cleanup);
    find(handle, path, "ucp_worker_create", library.worker_create);
    find(handle, path, "ucp_worker_destroy", library.worker_destroy);
    find(handle, path, "ucp_worker_get_address", library.worker_get_address);
    find(handle, path, "ucp_worker_release_address", library.worker_release_address);
    find(handle, path, "ucp_worker_progress", library.worker_progress);
    find(handle, path, "ucp_worker_get_efd", library.worker_get_efd);
    find(handle, path, "ucp_worker_arm", library.worker_arm);
    find(handle, path, "ucp_worker_set_am_recv_handler", library.worker_set_am_recv_handler);
    find(handle, path, "ucp_ep_create", library.ep_create);
    find(handle, path, "ucp_ep_close_nbx", library.ep_close_nbx);
    find(handle, path, "ucp_am_send_nbx", library.am_send_nbx);
    find(handle, path, "ucp_am_recv_data_nbx", library.am_recv_data_nbx);
    find(handle, path, "ucp_request_check_status", library.request_check_status);
    find(handle, path, "ucp_request_free", library.request_free);
    unsigned major = 0;
    unsigned minor = 0;
    unsigned release = 0;
    library.get_version(&major, &minor, &release);
    library.version = std::to_string(major) + "." + std::to_string(minor) + "." + std::to_string(release);
    if (major != 1 || minor < 12) {
        throw TransportError(path + " is UCX " + library.version + ", and 1.12 or a later 1.x is needed" + kAdvice);
    }
    return library;
}

}  // namespace

const Library& Library::load(const std::string& path) {
    static std::mutex mutex;
    static std::map<std::string, Library> loaded;
    const std::lock_guard lock(mutex);
    auto found = loaded.find(path);
    if (found == loaded.end()) {
        found = loaded.emplace(path, make_library(path)).first;
    }
    return found->second;
}

}  // namespace megatronapp::transport::ucx
