#pragma once

#include <cstddef>
#include <cstdint>

namespace megatronapp::transport {

/// Messages of this size or more do not pass through the caches. A smaller message is in the cache that two ranks share
/// when its receiver reads it; a larger one would mostly be evicted before, after each of its lines was read from
/// memory to be overwritten. Measured in docs/benchmarks.md.
inline constexpr std::uint64_t kStreamedBytes = std::uint64_t{4} << 20U;

/// Copies memory, the contents of which other threads may see once anything is announced to them after this call.
/// `message_bytes`: size of the message that the copy is a part of.
void streamed_copy(std::byte* target, const std::byte* source, std::uint64_t bytes,
                   std::uint64_t message_bytes) noexcept;

}  // namespace megatronapp::transport
