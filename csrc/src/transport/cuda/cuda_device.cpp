#include "megatronapp/transport/cuda/cuda_device.hpp"

#include <algorithm>
#include <string>
#include <thread>
#include <utility>

#include "megatronapp/clock.hpp"

namespace megatronapp::transport::cuda {
namespace {

constexpr const char* kDeviceAdvice = "check the driver's log (dmesg) and that this process may use the device";
constexpr const char* kMemoryAdvice =
    "leave more memory of the device free: fewer or smaller slots, or a smaller model";
constexpr std::uint64_t kOriginNs = 1'000'000'000;
constexpr std::uint64_t kOriginWaitNs = 200'000;  // of a caller that has work to do
constexpr std::uint64_t kEndedSoonNs = 2'000'000'000;

}  // namespace

CudaDevice::CudaDevice(const Driver& driver, int ordinal) : driver_(&driver), ordinal_(ordinal) {
    require(driver, "cuInit", driver.init(0), kDeviceAdvice);
    require(driver, "cuDeviceGet", driver.device(&device_, ordinal),
            "name a device that CUDA_VISIBLE_DEVICES has, counted from 0");
    int can_write = 0;
    require(driver, "cuDeviceGetAttribute",
            driver.device_attribute(&can_write, kCanUse64BitStreamMemoryOperations, device_), kDeviceAdvice);
    if (can_write == 0) {
        throw TransportError("device " + std::to_string(ordinal) +
                             " cannot wait for values in memory; use a device of compute capability 7.0 or newer");
    }
    require(driver, "cuDevicePrimaryCtxRetain", driver.primary_context_retain(&context_, device_), kDeviceAdvice);
}

CudaDevice::~CudaDevice() { static_cast<void>(driver_->primary_context_release(device_)); }

DeviceMemory::DeviceMemory(SharedDevice device, std::size_t bytes) : device_(std::move(device)) {
    const CurrentContext current(*device_);
    const Driver& driver = device_->driver();
    require(driver, "cuMemAlloc", driver.allocate(&address_, bytes), kMemoryAdvice);
}

DeviceMemory::~DeviceMemory() {
    const CurrentContext current(*device_);
    static_cast<void>(device_->driver().free(address_));
}

IpcHandle DeviceMemory::handle() const {
    const CurrentContext current(*device_);
    IpcHandle handle{};
    require(device_->driver(), "cuIpcGetMemHandle", device_->driver().ipc_handle(&handle, address_),
            "this system does not share memory of devices between processes; place the slots in host memory");
    return handle;
}

OpenedMemory::OpenedMemory(SharedDevice device, const IpcHandle& handle) : device_(std::move(device)) {
    const CurrentContext current(*device_);
    require(device_->driver(), "cuIpcOpenMemHandle", device_->driver().ipc_open(&address_, handle, kEnablePeerAccess),
            "this device has no peer access to the receiver's, or the two processes share no IPC namespace; place the "
            "slots in host memory on all ranks");
}

OpenedMemory::~OpenedMemory() {
    const CurrentContext current(*device_);
    static_cast<void>(device_->driver().ipc_close(address_));
}

RegisteredMemory::RegisteredMemory(SharedDevice device, std::byte* data, std::size_t bytes)
    : device_(std::move(device)), data_(data) {
    const CurrentContext current(*device_);
    const Driver& driver = device_->driver();
    require(
        driver, "cuMemHostRegister", driver.host_register(data, bytes, kPortableAndMapped),
        "files on a disk cannot be registered: set MEGATRONAPP_SHM_DIR to a tmpfs such as /dev/shm; or the limit of "
        "locked memory (ulimit -l) is too low");
    const Result code = driver.host_address(&address_, data, 0);
    if (code != kSuccess) {
        static_cast<void>(driver.host_unregister(data));
        throw CudaError(driver, "cuMemHostGetDevicePointer", code, kDeviceAdvice);
    }
}

RegisteredMemory::~RegisteredMemory() {
    const CurrentContext current(*device_);
    static_cast<void>(device_->driver().host_unregister(data_));
}

OwnStream::OwnStream(SharedDevice device) : device_(std::move(device)) {
    const CurrentContext current(*device_);
    require(device_->driver(), "cuStreamCreate", device_->driver().stream_create(&stream_, kNonBlockingStream),
            kMemoryAdvice);
}

OwnStream::~OwnStream() {
    const CurrentContext current(*device_);
    static_cast<void>(device_->driver().stream_destroy(stream_));
}

EventPool::~EventPool() {
    const CurrentContext current(*device_);
    for (Event event : all_) {
        static_cast<void>(device_->driver().event_destroy(event));
    }
}

Event EventPool::take() {
    const std::lock_guard lock(mutex_);
    if (free_.empty()) {
        Event event = nullptr;
        require(device_->driver(), "cuEventCreate", device_->driver().event_create(&event, flags_), kMemoryAdvice);
        all_.push_back(event);
        free_.reserve(all_.size());  // so that giving one back cannot fail
        return event;
    }
    Event event = free_.back();
    free_.pop_back();
    return event;
}

void EventPool::give_back(Event event) {
    const std::lock_guard lock(mutex_);
    free_.push_back(event);
}

EventClock::EventClock(SharedDevice device)
    : device_(std::move(device)), stream_(device_), events_(device_, kTimedEvent) {}

EventClock::SharedOrigin EventClock::origin() {
    const std::uint64_t now_ns = monotonic_ns();
    if (origin_ && now_ns - tried_ns_ < kOriginNs) {
        return origin_;
    }
    tried_ns_ = now_ns;
    Event event = events_.take();
    const Driver& driver = device_->driver();
    require(driver, "cuEventRecord", driver.event_record(event, stream_.get()), kDeviceAdvice);
    const std::uint64_t wait_ns = origin_ ? kOriginWaitNs : kEndedSoonNs;
    Result code = driver.event_query(event);
    while (code == kNotReady && monotonic_ns() - now_ns < wait_ns) {
        code = driver.event_query(event);
    }
    if (code == kNotReady) {  // streams may share a queue of the device
        events_.give_back(event);
        if (!origin_) {
            throw TransportError("the device did nothing for 2 s; see what keeps it busy");
        }
        return origin_;  // older, and good enough
    }
    require(driver, "cuEventQuery", code, kDeviceAdvice);
    const std::uint64_t origin_ns = now_ns + (monotonic_ns() - now_ns) / 2;
    origin_ = SharedOrigin(new Origin{event, origin_ns}, [this](const Origin* origin) {
        events_.give_back(origin->event);
        delete origin;
    });
    return origin_;
}

std::optional<std::uint64_t> EventClock::time_of(const Origin& origin, Event event) const {
    float milliseconds = 0;
    const Driver& driver = device_->driver();
    const Result code = driver.event_elapsed(&milliseconds, origin.event, event);
    if (code == kNotReady) {
        return std::nullopt;
    }
    require(driver, "cuEventElapsedTime", code, kDeviceAdvice);
    return origin.ns + static_cast<std::uint64_t>(1e6 * static_cast<double>(std::max(milliseconds, 0.0F)));
}

void LastUses::record(std::size_t place, Stream stream) noexcept {
    try {
        Event event = nullptr;
        {
            const std::lock_guard lock(mutex_);
            if (last_[place] == nullptr) {
                last_[place] = events_.take();
            }
            event = last_[place];
        }
        static_cast<void>(device_->driver().event_record(event, stream));  // a full stream may block it
    } catch (const CudaError&) {
        return;  // no memory for an event, or a dead context: its later query says so
    }
}

bool LastUses::ended_soon() const noexcept {
    const std::uint64_t until_ns = monotonic_ns() + kEndedSoonNs;
    const std::lock_guard lock(mutex_);
    return std::all_of(last_.begin(), last_.end(), [&](Event event) {
        while (event != nullptr && device_->driver().event_query(event) == kNotReady) {
            if (monotonic_ns() >= until_ns) {
                return false;
            }
            std::this_thread::yield();
        }
        return true;
    });
}

}  // namespace megatronapp::transport::cuda
