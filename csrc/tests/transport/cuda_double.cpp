#include "cuda_double.hpp"

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

#include "megatronapp/clock.hpp"

namespace megatronapp::transport::cuda {

struct EventHandle {
    std::atomic<std::uint64_t> recorded = 0;
    std::atomic<std::uint64_t> ended = 0;
    std::atomic<std::uint64_t> time_ns = 0;
};

inline constexpr std::size_t kMostQueued = 1024;

struct StreamHandle {
    static inline std::atomic<std::uint64_t> order = 0;

    StreamHandle() : thread([this] { run(); }) {}
    StreamHandle(const StreamHandle&) = delete;
    StreamHandle& operator=(const StreamHandle&) = delete;
    StreamHandle(StreamHandle&&) = delete;
    StreamHandle& operator=(StreamHandle&&) = delete;
    ~StreamHandle() {
        enqueue({});
        thread.join();
    }

    /// As the driver's, returns only once there is room.
    void enqueue(std::function<void()> work) {
        std::unique_lock lock(mutex);
        changed.wait(lock, [this] { return queue.size() < kMostQueued; });
        queue.push_back(std::move(work));
        changed.notify_all();
    }

    void synchronize() {
        std::unique_lock lock(mutex);
        changed.wait(lock, [this] { return queue.empty(); });
    }

    void run() {
        std::unique_lock lock(mutex);
        while (true) {
            changed.wait(lock, [this] { return !queue.empty(); });
            const std::function<void()> work = queue.front();
            if (!work) {
                return;
            }
            lock.unlock();
            // Orders the work of all streams for ThreadSanitizer, which does not see that two mappings of a shared file
            // are one memory.
            ++order;
            work();
            ++order;
            lock.lock();
            queue.pop_front();
            changed.notify_all();
        }
    }

    std::mutex mutex;
    std::condition_variable changed;
    std::deque<std::function<void()>> queue;
    std::thread thread;
};

}  // namespace megatronapp::transport::cuda

namespace megatronapp::transport::testing {
namespace {

using cuda::Address;
using cuda::Event;
using cuda::Result;
using cuda::Stream;

struct Failure {
    Result code;
    int before;  ///< calls that do not fail
};

struct State {
    std::atomic<std::int64_t> memory = 0;
    std::atomic<std::int64_t> opened = 0;
    std::atomic<std::int64_t> registered = 0;
    std::atomic<std::int64_t> streams = 0;
    std::atomic<std::int64_t> events = 0;
    std::atomic<std::int64_t> contexts = 0;
    std::mutex mutex;
    std::map<std::string, Failure> failures;
    std::vector<std::unique_ptr<cuda::EventHandle>> destroyed;
};

State& state() {
    static State value;
    return value;
}

Result failure_of(const char* function) {
    const std::lock_guard lock(state().mutex);
    const auto found = state().failures.find(function);
    if (found == state().failures.end()) {
        return cuda::kSuccess;
    }
    if (found->second.before-- > 0) {
        return cuda::kSuccess;
    }
    const Result code = found->second.code;
    state().failures.erase(found);
    return code;
}

/// Runs what a function does, unless it is to fail.
template <typename Function>
Result call(const char* name, Function function) {
    const Result code = failure_of(name);
    if (code == cuda::kSuccess) {
        function();
    }
    return code;
}

void* memory_at(Address address) {
    return reinterpret_cast<void*>(address);  // NOLINT(performance-no-int-to-ptr): how a driver names memory
}

template <typename Value>
std::atomic_ref<Value> word_at(Address address) {
    return std::atomic_ref<Value>(*static_cast<Value*>(memory_at(address)));
}

/// Work of other threads and streams goes on meanwhile.
template <typename Predicate>
void wait_until(Predicate predicate) {
    while (!predicate()) {
        std::this_thread::yield();
    }
}

template <typename Value>
Result write_value(const char* name, Stream stream, Address address, Value value) {
    return call(name,
                [&] { stream->enqueue([=] { word_at<Value>(address).store(value, std::memory_order_seq_cst); }); });
}

Result record_event(Event event, Stream stream) {
    return call("cuEventRecord", [&] {
        const std::uint64_t number = event->recorded.fetch_add(1) + 1;
        stream->enqueue([=] {
            event->time_ns.store(monotonic_ns());
            event->ended.store(number);
        });
    });
}

Result elapsed(float* milliseconds, Event start, Event end) {
    return call("cuEventElapsedTime", [&] {
        const auto difference = static_cast<std::int64_t>(end->time_ns.load() - start->time_ns.load());
        *milliseconds = static_cast<float>(static_cast<double>(difference) / 1e6);
    });
}

bool ended(Event event) { return event->ended.load() == event->recorded.load(); }

void add_memory_functions(cuda::Driver& driver) {
    driver.allocate = [](Address* address, std::size_t bytes) {
        return call("cuMemAlloc", [&] {
            *address = reinterpret_cast<Address>(::operator new (bytes, std::align_val_t{512}));
            ++state().memory;
        });
    };
    driver.free = [](Address address) {
        return call("cuMemFree", [&] {
            ::operator delete (memory_at(address), std::align_val_t{512});
            --state().memory;
        });
    };
    driver.ipc_handle = [](cuda::IpcHandle* handle, Address address) {
        return call("cuIpcGetMemHandle", [&] { std::memcpy(handle->bytes.data(), &address, sizeof(address)); });
    };
    driver.ipc_open = [](Address* address, cuda::IpcHandle handle, unsigned) {
        return call("cuIpcOpenMemHandle", [&] {
            std::memcpy(address, handle.bytes.data(), sizeof(*address));
            ++state().opened;
        });
    };
    driver.ipc_close = [](Address) { return call("cuIpcCloseMemHandle", [] { --state().opened; }); };
    driver.host_register = [](void*, std::size_t, unsigned) {
        return call("cuMemHostRegister", [] { ++state().registered; });
    };
    driver.host_unregister = [](void*) { return call("cuMemHostUnregister", [] { --state().registered; }); };
    driver.host_address = [](Address* address, void* data, unsigned) {
        return call("cuMemHostGetDevicePointer", [&] { *address = reinterpret_cast<Address>(data); });
    };
}

void add_stream_functions(cuda::Driver& driver) {
    driver.copy = [](Address to, Address from, std::size_t bytes, Stream stream) {
        return call("cuMemcpyAsync",
                    [&] { stream->enqueue([=] { std::memcpy(memory_at(to), memory_at(from), bytes); }); });
    };
    driver.copy_batch = [](const Address* to, const Address* from, const std::size_t* bytes, std::size_t count,
                           cuda::CopyAttributes*, std::size_t*, std::size_t, Stream stream) {
        return call("cuMemcpyBatchAsync", [&] {
            for (std::size_t place = count; place-- > 0;) {  // in another order than given: there is none
                const Address target = to[place];
                const Address source = from[place];
                const std::size_t size = bytes[place];
                stream->enqueue([=] { std::memcpy(memory_at(target), memory_at(source), size); });
            }
        });
    };
    driver.stream_create = [](Stream* stream, unsigned) {
        return call("cuStreamCreate", [&] {
            *stream = new cuda::StreamHandle;
            ++state().streams;
        });
    };
    driver.stream_destroy = [](Stream stream) {
        return call("cuStreamDestroy", [&] {
            delete stream;
            --state().streams;
        });
    };
    driver.stream_synchronize = [](Stream stream) {
        return call("cuStreamSynchronize", [&] { stream->synchronize(); });
    };
    driver.stream_wait_event = [](Stream stream, Event event, unsigned) {
        return call("cuStreamWaitEvent", [&] {
            const std::uint64_t number = event->recorded.load();
            stream->enqueue([=] { wait_until([&] { return event->ended.load() >= number; }); });
        });
    };
    driver.stream_write_32 = [](Stream stream, Address address, std::uint32_t value, unsigned) {
        return write_value("cuStreamWriteValue32", stream, address, value);
    };
    driver.stream_write_64 = [](Stream stream, Address address, std::uint64_t value, unsigned) {
        return write_value("cuStreamWriteValue64", stream, address, value);
    };
    driver.stream_wait_32 = [](Stream stream, Address address, std::uint32_t value, unsigned) {
        return call("cuStreamWaitValue32", [&] {
            stream->enqueue([=] {
                wait_until(
                    [&] { return static_cast<std::int32_t>(word_at<std::uint32_t>(address).load() - value) >= 0; });
            });
        });
    };
}

cuda::Driver make_double() {
    cuda::Driver driver{};
    driver.init = [](unsigned) { return failure_of("cuInit"); };
    driver.error_name = [](Result, const char** name) {
        *name = "CUDA_ERROR_OF_THE_DOUBLE";
        return cuda::kSuccess;
    };
    driver.device = [](cuda::Device* device, int ordinal) {
        *device = ordinal;
        return ordinal < 2 ? failure_of("cuDeviceGet") : 101;
    };
    driver.device_attribute = [](int* value, int, cuda::Device) {
        *value = 1;
        return failure_of("cuDeviceGetAttribute");
    };
    driver.can_access_peer = [](int* can, cuda::Device, cuda::Device) {
        *can = 1;
        return failure_of("cuDeviceCanAccessPeer");
    };
    driver.primary_context_retain = [](cuda::Context* context, cuda::Device) {
        return call("cuDevicePrimaryCtxRetain", [&] {
            *context = nullptr;
            ++state().contexts;
        });
    };
    driver.primary_context_release = [](cuda::Device) {
        return call("cuDevicePrimaryCtxRelease", [] { --state().contexts; });
    };
    driver.context_push = [](cuda::Context) { return cuda::kSuccess; };
    driver.context_pop = [](cuda::Context*) { return cuda::kSuccess; };
    driver.event_create = [](Event* event, unsigned) {
        return call("cuEventCreate", [&] {
            *event = new cuda::EventHandle;
            ++state().events;
        });
    };
    driver.event_destroy = [](Event event) {
        return call("cuEventDestroy", [&] {
            const std::lock_guard lock(state().mutex);
            state().destroyed.emplace_back(event);  // work in queues may still use it
            --state().events;
        });
    };
    driver.event_record = record_event;
    driver.event_query = [](Event event) {
        const Result code = failure_of("cuEventQuery");
        return code != cuda::kSuccess || ended(event) ? code : cuda::kNotReady;
    };
    driver.event_elapsed = [](float* milliseconds, Event start, Event end) {
        return ended(start) && ended(end) ? elapsed(milliseconds, start, end) : cuda::kNotReady;
    };
    add_memory_functions(driver);
    add_stream_functions(driver);
    return driver;
}

}  // namespace

const cuda::Driver& driver_double() {
    static const cuda::Driver driver = make_double();
    return driver;
}

const cuda::Driver& old_driver_double() {
    static const cuda::Driver driver = [] {
        cuda::Driver old = make_double();
        old.copy_batch = nullptr;
        return old;
    }();
    return driver;
}

void fail_next(const std::string& function, cuda::Result code, int before) {
    const std::lock_guard lock(state().mutex);
    state().failures[function] = {code, before};
}

Taken taken() {
    const State& now = state();
    return {now.memory, now.opened, now.registered, now.streams, now.events, now.contexts};
}

}  // namespace megatronapp::transport::testing
