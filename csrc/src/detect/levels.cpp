#include "megatronapp/detect/levels.hpp"

#include <algorithm>
#include <array>
#include <numeric>
#include <stdexcept>
#include <string>

namespace megatronapp::detect {
namespace {

using Numbers = std::vector<std::int64_t>;

std::size_t at(std::int64_t number) { return static_cast<std::size_t>(number); }

void check(std::span<const std::int64_t> source, std::span<const std::int64_t> target, std::size_t events) {
    if (source.size() != target.size()) {
        throw std::invalid_argument("edges have " + std::to_string(source.size()) + " sources and " +
                                    std::to_string(target.size()) + " targets; give one of each per edge");
    }
    for (const auto& ends : {source, target}) {
        for (const std::int64_t event : ends) {
            if (event < 0 || at(event) >= events) {
                throw std::invalid_argument("an edge names event " + std::to_string(event) + ", and there are " +
                                            std::to_string(events));
            }
        }
    }
}

/// Places of items by key, from counts: those of key k are from begin[k] up to begin[k + 1].
Numbers begins(std::span<const std::int64_t> keys, std::size_t count) {
    Numbers begin(count + 1, 0);
    for (const std::int64_t key : keys) {
        ++begin[at(key) + 1];
    }
    std::partial_sum(begin.begin(), begin.end(), begin.begin());
    return begin;
}

/// Numbers of items sorted by key, equal ones in their order.
Numbers sorted_by(std::span<const std::int64_t> keys, const Numbers& begin) {
    Numbers next(begin);
    Numbers sorted(keys.size());
    for (std::size_t item = 0; item < keys.size(); ++item) {
        sorted[at(next[at(keys[item])]++)] = static_cast<std::int64_t>(item);
    }
    return sorted;
}

/// The level of each event, and how many events have one (Kahn's algorithm).
struct Levels {
    Numbers of;
    std::size_t reached = 0;
    std::int64_t count = 0;

    Levels(std::span<const std::int64_t> source, std::span<const std::int64_t> target, std::size_t events)
        : of(events, 0) {
        const Numbers begin = begins(source, events);
        const Numbers by_source = sorted_by(source, begin);
        Numbers waits_for(events, 0);
        for (const std::int64_t event : target) {
            ++waits_for[at(event)];
        }
        Numbers ready;
        ready.reserve(events);
        for (std::size_t event = 0; event < events; ++event) {
            if (waits_for[event] == 0) {
                ready.push_back(static_cast<std::int64_t>(event));
            }
        }
        for (; reached < ready.size(); ++reached) {
            const std::size_t event = at(ready[reached]);
            count = std::max(count, of[event] + 1);
            for (std::int64_t place = begin[event]; place < begin[event + 1]; ++place) {
                const std::size_t next = at(target[at(by_source[at(place)])]);
                of[next] = std::max(of[next], of[event] + 1);
                if (--waits_for[next] == 0) {
                    ready.push_back(static_cast<std::int64_t>(next));
                }
            }
        }
    }
};

}  // namespace

LevelOrder sort_by_level(std::span<const std::int64_t> source, std::span<const std::int64_t> target,
                         std::size_t events) {
    check(source, target, events);
    const Levels levels(source, target, events);
    LevelOrder found{.order = {}, .level_begin = {}, .reached = levels.reached};
    if (levels.reached < events) {
        return found;
    }
    // Events by level are a numbering of targets by which edges are sorted as by level, then target.
    const Numbers event_begin = begins(levels.of, at(levels.count));
    const Numbers by_level = sorted_by(levels.of, event_begin);
    Numbers place_of(events);
    for (std::size_t place = 0; place < events; ++place) {
        place_of[at(by_level[place])] = static_cast<std::int64_t>(place);
    }
    Numbers keys(target.size());
    std::ranges::transform(target, keys.begin(), [&](std::int64_t event) { return place_of[at(event)]; });
    const Numbers edge_begin = begins(keys, events);
    found.order = sorted_by(keys, edge_begin);
    for (std::int64_t level = 1; level <= levels.count; ++level) {
        found.level_begin.push_back(edge_begin[at(event_begin[at(level)])]);
    }
    return found;
}

void longest_paths(std::span<const std::int64_t> source, std::span<const std::int64_t> target,
                   std::span<const double> weights, std::size_t scenarios, std::span<double> times) {
    if (scenarios == 0 || weights.size() != source.size() * scenarios || times.size() % scenarios != 0) {
        throw std::invalid_argument("longest_paths: " + std::to_string(weights.size()) + " weights and " +
                                    std::to_string(times.size()) + " times of " + std::to_string(source.size()) +
                                    " edges and " + std::to_string(scenarios) + " scenarios do not fit");
    }
    check(source, target, times.size() / scenarios);
    for (std::size_t edge = 0; edge < source.size(); ++edge) {
        const std::span<const double> from = times.subspan(at(source[edge]) * scenarios, scenarios);
        const std::span<double> reached = times.subspan(at(target[edge]) * scenarios, scenarios);
        const std::span<const double> weight = weights.subspan(edge * scenarios, scenarios);
        const bool is_first = edge == 0 || target[edge] != target[edge - 1];
        for (std::size_t scenario = 0; scenario < scenarios; ++scenario) {
            const double time = from[scenario] + weight[scenario];
            reached[scenario] = is_first ? time : std::max(reached[scenario], time);
        }
    }
}

std::vector<double> latest_times(std::span<const std::int64_t> source, std::span<const std::int64_t> target,
                                 std::span<const double> recorded, std::span<const double> ideal,
                                 std::span<const std::uint8_t> recorded_in, std::span<const double> initial,
                                 std::size_t scenarios) {
    const std::size_t edges = source.size();
    if (scenarios == 0 || scenarios > kScenariosAtOnce || initial.empty() || recorded.size() != edges ||
        ideal.size() != edges || recorded_in.size() != edges) {
        throw std::invalid_argument(
            "latest_times: " + std::to_string(recorded.size()) + " recorded and " + std::to_string(ideal.size()) +
            " ideal weights, " + std::to_string(recorded_in.size()) + " sets and " + std::to_string(initial.size()) +
            " times of " + std::to_string(edges) + " edges and " + std::to_string(scenarios) + " scenarios do not fit");
    }
    check(source, target, initial.size());
    using Times = std::array<double, kScenariosAtOnce>;
    std::vector<Times> times(initial.size());
    for (std::size_t event = 0; event < initial.size(); ++event) {
        times[event].fill(initial[event]);
    }
    for (std::size_t edge = 0; edge < edges; ++edge) {
        const Times& from = times[at(source[edge])];
        Times& reached = times[at(target[edge])];
        const bool is_first = edge == 0 || target[edge] != target[edge - 1];
        for (std::size_t scenario = 0; scenario < kScenariosAtOnce; ++scenario) {
            const bool is_recorded = ((recorded_in[edge] >> scenario) & 1U) != 0;
            const double time = from[scenario] + (is_recorded ? recorded[edge] : ideal[edge]);
            reached[scenario] = is_first ? time : std::max(reached[scenario], time);
        }
    }
    Times latest = times.front();
    for (const Times& of_event : times) {
        for (std::size_t scenario = 0; scenario < kScenariosAtOnce; ++scenario) {
            latest[scenario] = std::max(latest[scenario], of_event[scenario]);
        }
    }
    return {latest.begin(), latest.begin() + static_cast<std::ptrdiff_t>(scenarios)};
}

}  // namespace megatronapp::detect
