#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "megatronapp/transport/cuda/cuda_driver.hpp"
#include "megatronapp/transport/message.hpp"
#include "megatronapp/transport/transfers.hpp"

namespace megatronapp::transport::testing {

/// A double of the CUDA driver in this process: devices have plain memory, and a stream runs its work in order on a
/// thread of its own.
[[nodiscard]] const cuda::Driver& driver_double();
/// The same without batches of copies.
[[nodiscard]] const cuda::Driver& old_driver_double();

/// Lets the next call of a function fail, or one after `before` calls that do not.
void fail_next(const std::string& function, cuda::Result code, int before = 0);

/// What was taken from the driver and not given back.
struct Taken {
    std::int64_t memory;
    std::int64_t opened;
    std::int64_t registered;
    std::int64_t streams;
    std::int64_t events;
    std::int64_t contexts;

    bool operator==(const Taken&) const = default;
};
[[nodiscard]] Taken taken();

/// A stream of the application.
class ComputeStream {
  public:
    ComputeStream() { driver_double().stream_create(&stream_, 0); }
    ComputeStream(const ComputeStream&) = delete;
    ComputeStream& operator=(const ComputeStream&) = delete;
    ComputeStream(ComputeStream&&) = delete;
    ComputeStream& operator=(ComputeStream&&) = delete;
    ~ComputeStream() {
        open();
        driver_double().stream_destroy(stream_);
    }

    [[nodiscard]] DeviceStream get() const { return {stream_}; }
    void synchronize() const { driver_double().stream_synchronize(stream_); }

    /// Lets all later work wait until `open`.
    void close_gate() { driver_double().stream_wait_32(stream_, reinterpret_cast<cuda::Address>(&gate_), ++gates_, 0); }
    void open() { gate_.store(gates_); }

    void copy(std::vector<std::byte>& to, const Message& message) const {
        to.resize(message.bytes());
        if (to.empty()) {
            return;
        }
        driver_double().copy(reinterpret_cast<cuda::Address>(to.data()),
                             reinterpret_cast<cuda::Address>(message.data()), message.bytes(), stream_);
    }

  private:
    cuda::Stream stream_ = nullptr;
    std::atomic<std::uint32_t> gate_ = 0;
    std::uint32_t gates_ = 0;
};

}  // namespace megatronapp::transport::testing
