/// Order of the edges of a graph, and the longest paths through it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace megatronapp::detect {

/// Edges by the level of their target: the number of edges on the longest way to it.
struct LevelOrder {
    std::vector<std::int64_t> order;        // edges, sorted by level of the target, then by target, then by number
    std::vector<std::int64_t> level_begin;  // edges up to level k are the first level_begin[k] ones of them
    std::size_t reached;                    // events that depend on none in a circle; else `order` is of no use
};

/// Sorts edges between events numbered from 0 up to `events`. Throws std::invalid_argument where sizes or numbers do
/// not fit.
[[nodiscard]] LevelOrder sort_by_level(std::span<const std::int64_t> source, std::span<const std::int64_t> target,
                                       std::size_t events);

/// Writes the longest path to each event: the latest of source plus weight of its edges; events without edges keep
/// what `times` has. Edges are in the order of `sort_by_level`; `weights` is [edge][scenario], `times`
/// [event][scenario]. Throws std::invalid_argument where sizes or numbers do not fit.
void longest_paths(std::span<const std::int64_t> source, std::span<const std::int64_t> target,
                   std::span<const double> weights, std::size_t scenarios, std::span<double> times);

/// Scenarios that `latest_times` computes at a time: a bit each, and together a line of the cache for each event.
constexpr std::size_t kScenariosAtOnce = 8;

/// The time of the last event in each of up to kScenariosAtOnce scenarios: edge `e` has the weight `recorded[e]` in
/// those whose bit of `recorded_in[e]` is set, and `ideal[e]` in the others; events without edges are at `initial`.
/// Edges are in the order of `sort_by_level`, and there is at least one event. The same sums and maxima as of
/// `longest_paths`, without tables of weights. Throws std::invalid_argument where sizes or numbers do not fit.
[[nodiscard]] std::vector<double> latest_times(std::span<const std::int64_t> source,
                                               std::span<const std::int64_t> target, std::span<const double> recorded,
                                               std::span<const double> ideal, std::span<const std::uint8_t> recorded_in,
                                               std::span<const double> initial, std::size_t scenarios);

}  // namespace megatronapp::detect
