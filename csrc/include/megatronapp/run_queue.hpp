#pragma once

#include <cstdint>

namespace megatronapp {

/// Nanoseconds that the calling thread was ready to run but had no processor, since it began
/// (second field of /proc/thread-self/schedstat); 0 where the kernel does not tell.
/// The first call of a thread opens the file, later ones read it again.
[[nodiscard]] std::uint64_t run_queue_ns() noexcept;

}  // namespace megatronapp
