#pragma once

#include <cstdint>

namespace megatronapp {

/// Forks between the first call in the oldest ancestor and this process: a value kept from before differs in a child.
/// Costs one load. A clone(2) or vfork(2) by hand is not counted.
[[nodiscard]] std::uint64_t fork_count() noexcept;

}  // namespace megatronapp
