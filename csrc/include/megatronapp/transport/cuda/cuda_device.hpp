/// One device of this process, and what is taken from its driver, each given back by a destructor.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "megatronapp/transport/cuda/cuda_driver.hpp"

namespace megatronapp::transport::cuda {

/// The primary context of a device, the one that torch uses, too.
class CudaDevice {
  public:
    /// Raises CudaError, and TransportError for a device that lacks what the transport needs.
    CudaDevice(const Driver& driver, int ordinal);
    CudaDevice(const CudaDevice&) = delete;
    CudaDevice& operator=(const CudaDevice&) = delete;
    CudaDevice(CudaDevice&&) = delete;
    CudaDevice& operator=(CudaDevice&&) = delete;
    ~CudaDevice();

    [[nodiscard]] const Driver& driver() const noexcept { return *driver_; }
    [[nodiscard]] int ordinal() const noexcept { return ordinal_; }
    [[nodiscard]] Context context() const noexcept { return context_; }

  private:
    const Driver* driver_;
    int ordinal_;
    Device device_ = 0;
    Context context_ = nullptr;
};

using SharedDevice = std::shared_ptr<const CudaDevice>;

/// Makes the context of a device current on this thread until its end.
class CurrentContext {
  public:
    explicit CurrentContext(const CudaDevice& device) noexcept
        : driver_(&device.driver()), pushed_(driver_->context_push(device.context()) == kSuccess) {}
    CurrentContext(const CurrentContext&) = delete;
    CurrentContext& operator=(const CurrentContext&) = delete;
    CurrentContext(CurrentContext&&) = delete;
    CurrentContext& operator=(CurrentContext&&) = delete;
    ~CurrentContext() {
        Context context = nullptr;
        if (pushed_) {  // otherwise the next call of the driver says why not
            static_cast<void>(driver_->context_pop(&context));
        }
    }

  private:
    const Driver* driver_;
    bool pushed_;
};

/// Memory of the device that other processes can open.
class DeviceMemory {
  public:
    DeviceMemory(SharedDevice device, std::size_t bytes);
    DeviceMemory(const DeviceMemory&) = delete;
    DeviceMemory& operator=(const DeviceMemory&) = delete;
    DeviceMemory(DeviceMemory&&) = delete;
    DeviceMemory& operator=(DeviceMemory&&) = delete;
    ~DeviceMemory();

    [[nodiscard]] Address address() const noexcept { return address_; }
    [[nodiscard]] IpcHandle handle() const;

  private:
    SharedDevice device_;
    Address address_ = 0;
};

/// Memory of another process's device, opened in the context of the device that copies into it: opened in the context
/// of the device that owns it, copies are ten times slower.
class OpenedMemory {
  public:
    OpenedMemory(SharedDevice device, const IpcHandle& handle);
    OpenedMemory(const OpenedMemory&) = delete;
    OpenedMemory& operator=(const OpenedMemory&) = delete;
    OpenedMemory(OpenedMemory&&) = delete;
    OpenedMemory& operator=(OpenedMemory&&) = delete;
    ~OpenedMemory();

    [[nodiscard]] Address address() const noexcept { return address_; }

  private:
    SharedDevice device_;
    Address address_ = 0;
};

/// Host memory that the device reads and writes.
class RegisteredMemory {
  public:
    RegisteredMemory(SharedDevice device, std::byte* data, std::size_t bytes);
    RegisteredMemory(const RegisteredMemory&) = delete;
    RegisteredMemory& operator=(const RegisteredMemory&) = delete;
    RegisteredMemory(RegisteredMemory&&) = delete;
    RegisteredMemory& operator=(RegisteredMemory&&) = delete;
    ~RegisteredMemory();

    /// The address at which the device sees a place of this memory.
    [[nodiscard]] Address address_of(const void* place) const noexcept {
        return address_ + static_cast<Address>(static_cast<const std::byte*>(place) - data_);
    }

  private:
    SharedDevice device_;
    std::byte* data_;
    Address address_ = 0;
};

/// A stream that does not wait for the default stream.
class OwnStream {
  public:
    explicit OwnStream(SharedDevice device);
    OwnStream(const OwnStream&) = delete;
    OwnStream& operator=(const OwnStream&) = delete;
    OwnStream(OwnStream&&) = delete;
    OwnStream& operator=(OwnStream&&) = delete;
    ~OwnStream();

    [[nodiscard]] Stream get() const noexcept { return stream_; }

  private:
    SharedDevice device_;
    Stream stream_ = nullptr;
};

/// Events that are used again; safe for any number of threads. The context must be current.
class EventPool {
  public:
    EventPool(SharedDevice device, unsigned flags) : device_(std::move(device)), flags_(flags) {}
    EventPool(const EventPool&) = delete;
    EventPool& operator=(const EventPool&) = delete;
    EventPool(EventPool&&) = delete;
    EventPool& operator=(EventPool&&) = delete;
    ~EventPool();

    [[nodiscard]] Event take();
    void give_back(Event event);

  private:
    SharedDevice device_;
    unsigned flags_;
    std::mutex mutex_;
    std::vector<Event> all_;
    std::vector<Event> free_;
};

/// Maps times of a device's events to the monotonic clock, from an event whose host time is known. A difference of
/// events is a 32-bit float of milliseconds, so that event must not be old.
class EventClock {
  public:
    struct Origin {
        Event event;
        std::uint64_t ns;
    };
    using SharedOrigin = std::shared_ptr<const Origin>;  ///< to be dropped before the clock

    explicit EventClock(SharedDevice device);
    EventClock(const EventClock&) = delete;
    EventClock& operator=(const EventClock&) = delete;
    EventClock(EventClock&&) = delete;
    EventClock& operator=(EventClock&&) = delete;
    ~EventClock() = default;

    /// An origin before all later events, by rule at most a second old; one thread at a time. Waits some microseconds
    /// for the device, at the first call until it answers. Raises CudaError.
    [[nodiscard]] SharedOrigin origin();

    /// The time of an ended event; none if the driver says that it has not ended. Raises CudaError.
    [[nodiscard]] std::optional<std::uint64_t> time_of(const Origin& origin, Event event) const;

  private:
    SharedDevice device_;
    OwnStream stream_;
    EventPool events_;
    SharedOrigin origin_;
    std::uint64_t tried_ns_ = 0;
};

/// The end of device work that uses memory which must outlive it: an event after the last use in each of some places.
/// Safe for any number of threads. The context must be current.
class LastUses {
  public:
    LastUses(SharedDevice device, std::size_t places)
        : device_(std::move(device)), events_(device_, kUntimedEvent), last_(places, nullptr) {}

    void record(std::size_t place, Stream stream) noexcept;

    /// Whether all uses end within some seconds.
    [[nodiscard]] bool ended_soon() const noexcept;

  private:
    SharedDevice device_;
    EventPool events_;
    mutable std::mutex mutex_;
    std::vector<Event> last_;
};

}  // namespace megatronapp::transport::cuda
