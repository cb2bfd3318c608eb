#pragma once

#include <cstdint>
#include <string>

#include "megatronapp/transport/cuda_driver.hpp"

namespace megatronapp::transport::testing {

/// A double of the CUDA driver in this process: devices have plain memory, and a stream runs its work in order on a
/// thread of its own.
[[nodiscard]] const cuda::Driver& driver_double();

/// Lets the next call of a function fail.
void fail_next(const std::string& function, cuda::Result code);

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

}  // namespace megatronapp::transport::testing
