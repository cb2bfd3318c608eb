/// Work on the items of a large step in several threads. What it computes must not depend on the number of parts.
#pragma once

#include <cstddef>
#include <functional>

namespace megatronapp {

/// Items from which on a thread of its own is worth its start, which takes as long as some thousands of them.
inline constexpr std::size_t kLeastItems = std::size_t{1} << 16U;

/// Allows functions of this process that work in parts up to `count` threads, that of the caller included, with
/// `least_items` or more for each; at first they use that of the caller alone. Callers at the same time share them.
/// Throws std::invalid_argument for 0.
void set_threads(std::size_t count, std::size_t least_items = kLeastItems);

/// The number of parts in which `items` are worked on; 1 or more.
[[nodiscard]] std::size_t parts_of(std::size_t items);

/// Work on the items from `begin` up to `end`.
using PartWork = std::function<void(std::size_t part, std::size_t begin, std::size_t end)>;

/// Calls `work` for each of so many consecutive parts of [0, items), in the threads that are allowed and not busy with
/// parts of other callers, and waits for all. `work` must not wait for another part: the caller's thread may do all.
/// Throws what the first part that failed has thrown.
void in_parts(std::size_t items, std::size_t parts, const PartWork& work);

}  // namespace megatronapp
