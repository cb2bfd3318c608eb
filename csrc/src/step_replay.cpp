#include "megatronapp/step_replay.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>

namespace megatronapp {
namespace {

constexpr std::size_t kQuad = 4;
constexpr std::size_t kQuads = 4;
/// Steps that are computed at a time.
constexpr std::size_t kLanes = kQuad * kQuads;

/// A vector of AVX2, or two of SSE2. Compilers make none of loops over arrays here, which they unroll before.
using Quad [[gnu::vector_size(kQuad * sizeof(double))]] = double;

/// Seconds of that many steps.
struct alignas(kQuad * sizeof(double)) Lanes {
    std::array<Quad, kQuads> quads;

    [[nodiscard]] double at(std::size_t lane) const { return quads[lane / kQuad][lane % kQuad]; }
    void set(std::size_t lane, double seconds) { quads[lane / kQuad][lane % kQuad] = seconds; }
    void fill(double seconds) { quads.fill(Quad{} + seconds); }
};

using Indices = std::vector<std::int32_t>;

/// An operation that starts, or (`starts` is false) the group whose last member has started.
struct Instruction {
    std::int32_t number;
    bool starts;
};

[[noreturn]] void refuse(const std::string& message) { throw std::invalid_argument("StepReplay: " + message); }

void check_lists(std::span<const std::int32_t> begin, std::span<const std::int32_t> values, std::size_t operations,
                 const char* name) {
    if (begin.empty() || begin.front() != 0 || static_cast<std::size_t>(begin.back()) != values.size() ||
        !std::is_sorted(begin.begin(), begin.end())) {
        refuse(std::string(name) + " must begin at 0, grow, and end at the number of values");
    }
    for (const std::int32_t value : values) {
        if (value < 0 || static_cast<std::size_t>(value) >= operations) {
            refuse(std::string(name) + " name operation " + std::to_string(value) + ", and there are " +
                   std::to_string(operations));
        }
    }
}

std::span<const std::int32_t> list_of(const Indices& begin, const Indices& values, std::int32_t number) {
    const auto first = static_cast<std::size_t>(begin[static_cast<std::size_t>(number)]);
    const auto last = static_cast<std::size_t>(begin[static_cast<std::size_t>(number) + 1]);
    return std::span<const std::int32_t>(values).subspan(first, last - first);
}

/// The operations that wait for each one.
struct Followers {
    Indices begin;
    Indices values;

    Followers(const Indices& dependency_begin, const Indices& dependencies);
    [[nodiscard]] std::span<const std::int32_t> of(std::int32_t operation) const {
        return list_of(begin, values, operation);
    }
};

Followers::Followers(const Indices& dependency_begin, const Indices& dependencies)
    : begin(dependency_begin.size()), values(dependencies.size()) {
    for (const std::int32_t dependency : dependencies) {
        ++begin[static_cast<std::size_t>(dependency) + 1];
    }
    for (std::size_t number = 1; number < begin.size(); ++number) {
        begin[number] += begin[number - 1];
    }
    Indices next(begin);
    for (std::int32_t number = 0; number + 1 < static_cast<std::int32_t>(begin.size()); ++number) {
        for (const std::int32_t dependency : list_of(dependency_begin, dependencies, number)) {
            const std::int32_t place = next[static_cast<std::size_t>(dependency)]++;
            values[static_cast<std::size_t>(place)] = number;
        }
    }
}

}  // namespace

struct StepReplay::Program {
    std::size_t operations = 0;
    std::size_t replicas = 0;
    std::size_t steps = 0;
    std::size_t blocks = 0;
    Indices dependency_begin;
    Indices dependencies;
    Indices group_begin;
    Indices members;
    /// Group of each operation, -1 for one that waits for no other member.
    Indices group_of;
    std::vector<std::uint8_t> spans_replicas;
    std::vector<std::uint8_t> is_end;
    std::vector<Instruction> order;
    /// Durations of [block of steps, operation, replica]; lanes after the last step are 0.
    std::vector<Lanes> recorded;
    /// Durations of each operation, the same in all lanes.
    std::vector<Lanes> ideal;

    Program(const ReplayPattern& pattern, std::size_t all_operations, std::size_t all_replicas, std::size_t all_steps);
    void find_groups();
    void find_order();
    void lay_out(std::span<const double> recorded_seconds, std::span<const double> ideal_seconds);
};

void StepReplay::Program::find_groups() {
    group_of.assign(operations, -1);
    std::vector<std::uint8_t> is_member(operations, 0);
    for (std::size_t group = 0; group < spans_replicas.size(); ++group) {
        const auto all = list_of(group_begin, members, static_cast<std::int32_t>(group));
        const bool waits = all.size() > 1 || spans_replicas[group] != 0;
        for (const std::int32_t member : all) {
            const auto place = static_cast<std::size_t>(member);
            if (is_member[place] != 0) {
                refuse("operation " + std::to_string(member) + " is in two groups");
            }
            is_member[place] = 1;
            group_of[place] = waits ? static_cast<std::int32_t>(group) : -1;
        }
    }
}

/// A topological order (Kahn), in which a group ends when its last member has started.
void StepReplay::Program::find_order() {
    const Followers followers(dependency_begin, dependencies);
    Indices waits_for(operations);
    Indices ready;
    for (std::size_t number = 0; number < operations; ++number) {
        const auto operation = static_cast<std::int32_t>(number);
        waits_for[number] = dependency_begin[number + 1] - dependency_begin[number];
        if (waits_for[number] == 0) {
            ready.push_back(operation);
        }
    }
    const auto end = [&](std::int32_t operation) {
        for (const std::int32_t follower : followers.of(operation)) {
            if (--waits_for[static_cast<std::size_t>(follower)] == 0) {
                ready.push_back(follower);
            }
        }
    };
    Indices started(spans_replicas.size());
    std::size_t next = 0;
    while (next < ready.size()) {
        const std::int32_t operation = ready[next++];
        const std::int32_t group = group_of[static_cast<std::size_t>(operation)];
        order.push_back({.number = operation, .starts = true});
        if (group < 0) {
            end(operation);
            continue;
        }
        const auto all = list_of(group_begin, members, group);
        if (static_cast<std::size_t>(++started[static_cast<std::size_t>(group)]) == all.size()) {
            order.push_back({.number = group, .starts = false});
            for (const std::int32_t member : all) {
                end(member);
            }
        }
    }
    if (ready.size() != operations) {
        const auto stuck = std::find_if(waits_for.begin(), waits_for.end(), [](std::int32_t left) { return left > 0; });
        refuse("operations wait for each other in a circle; one of those that never start is " +
               std::to_string(stuck - waits_for.begin()));
    }
}

namespace {

/// What the kernel reads, and its memory.
struct Pass {
    std::size_t replicas;
    std::span<const Instruction> order;
    const std::int32_t* dependency_begin;
    const std::int32_t* dependencies;
    const std::int32_t* group_begin;
    const std::int32_t* members;
    const std::int32_t* group_of;
    const std::uint8_t* spans_replicas;
    const std::uint8_t* is_end;
    const Lanes* recorded;
    const Lanes* ideal;
    const std::uint8_t* is_recorded;
    /// Ends of [operation, replica]. Those of a group's members are their starts until the group ends.
    Lanes* ends;
    Lanes* latest;
};

[[gnu::always_inline]] inline void take_later(Lanes& times, const Lanes& others) {
    for (std::size_t place = 0; place < kQuads; ++place) {
        const Quad other = others.quads[place];
        Quad& time = times.quads[place];
        time = other > time ? other : time;
    }
}

[[gnu::always_inline]] inline const Lanes& duration(const Pass& pass, std::size_t operation, std::size_t replica) {
    const std::size_t place = (operation * pass.replicas) + replica;
    return pass.is_recorded[place] != 0 ? pass.recorded[place] : pass.ideal[operation];
}

[[gnu::always_inline]] inline void end_at(const Pass& pass, const Lanes& starts, std::size_t operation,
                                          std::size_t replica) {
    const Lanes& seconds = duration(pass, operation, replica);
    Lanes& ends = pass.ends[(operation * pass.replicas) + replica];
    for (std::size_t place = 0; place < kQuads; ++place) {
        ends.quads[place] = starts.quads[place] + seconds.quads[place];
    }
    if (pass.is_end[operation] != 0) {
        take_later(*pass.latest, ends);
    }
}

[[gnu::always_inline]] inline void start(const Pass& pass, std::size_t operation) {
    const std::int32_t first = pass.dependency_begin[operation];
    const std::int32_t last = pass.dependency_begin[operation + 1];
    const bool is_alone = pass.group_of[operation] < 0;
    for (std::size_t replica = 0; replica < pass.replicas; ++replica) {
        Lanes times{};
        for (std::int32_t place = first; place < last; ++place) {
            const auto dependency = static_cast<std::size_t>(pass.dependencies[place]);
            const Lanes& ends = pass.ends[(dependency * pass.replicas) + replica];
            if (place == first) {
                times = ends;
            } else {
                take_later(times, ends);
            }
        }
        if (is_alone) {
            end_at(pass, times, operation, replica);
        } else {
            pass.ends[(operation * pass.replicas) + replica] = times;
        }
    }
}

[[gnu::always_inline]] inline void take_starts(const Pass& pass, std::size_t group, std::size_t replica, Lanes& times) {
    for (std::int32_t place = pass.group_begin[group]; place < pass.group_begin[group + 1]; ++place) {
        const auto member = static_cast<std::size_t>(pass.members[place]);
        take_later(times, pass.ends[(member * pass.replicas) + replica]);
    }
}

[[gnu::always_inline]] inline void end_group(const Pass& pass, std::size_t group) {
    const bool spans_replicas = pass.spans_replicas[group] != 0;
    Lanes common;  // NOLINT(cppcoreguidelines-pro-type-member-init): filled in the next line
    common.fill(-std::numeric_limits<double>::infinity());
    if (spans_replicas) {
        for (std::size_t replica = 0; replica < pass.replicas; ++replica) {
            take_starts(pass, group, replica, common);
        }
    }
    for (std::size_t replica = 0; replica < pass.replicas; ++replica) {
        Lanes times = common;
        if (!spans_replicas) {
            take_starts(pass, group, replica, times);
        }
        for (std::int32_t place = pass.group_begin[group]; place < pass.group_begin[group + 1]; ++place) {
            end_at(pass, times, static_cast<std::size_t>(pass.members[place]), replica);
        }
    }
}

[[gnu::always_inline]] inline void run(const Pass& pass) {
    for (const Instruction instruction : pass.order) {
        if (instruction.starts) {
            start(pass, static_cast<std::size_t>(instruction.number));
        } else {
            end_group(pass, static_cast<std::size_t>(instruction.number));
        }
    }
}

void run_anywhere(const Pass& pass) { run(pass); }

#if defined(__x86_64__)
[[gnu::target("avx2")]] void run_avx2(const Pass& pass) { run(pass); }

/// The same code for the widest vectors that this processor has. Results are equal: maxima and sums alone.
void run_here(const Pass& pass) {
    if (static_cast<bool>(__builtin_cpu_supports("avx2"))) {
        run_avx2(pass);
    } else {
        run_anywhere(pass);
    }
}
#else
void run_here(const Pass& pass) { run_anywhere(pass); }
#endif

}  // namespace

StepReplay::Program::Program(const ReplayPattern& pattern, std::size_t all_operations, std::size_t all_replicas,
                             std::size_t all_steps)
    : operations(all_operations),
      replicas(all_replicas),
      steps(all_steps),
      blocks((all_steps + kLanes - 1) / kLanes),
      dependency_begin(pattern.dependency_begin.begin(), pattern.dependency_begin.end()),
      dependencies(pattern.dependencies.begin(), pattern.dependencies.end()),
      group_begin(pattern.group_begin.begin(), pattern.group_begin.end()),
      members(pattern.members.begin(), pattern.members.end()),
      spans_replicas(pattern.spans_replicas.begin(), pattern.spans_replicas.end()),
      is_end(pattern.is_end.begin(), pattern.is_end.end()) {}

void StepReplay::Program::lay_out(std::span<const double> recorded_seconds, std::span<const double> ideal_seconds) {
    const std::size_t rows = operations * replicas;
    recorded.resize(blocks * rows);
    for (std::size_t row = 0; row < rows; ++row) {
        for (std::size_t step = 0; step < steps; ++step) {
            recorded[(step / kLanes * rows) + row].set(step % kLanes, recorded_seconds[(row * steps) + step]);
        }
    }
    ideal.resize(operations);
    for (std::size_t operation = 0; operation < operations; ++operation) {
        ideal[operation].fill(ideal_seconds[operation]);
    }
}

StepReplay::StepReplay(const ReplayPattern& pattern, std::span<const double> recorded, std::span<const double> ideal,
                       std::size_t replicas, std::size_t steps) {
    const std::size_t operations = ideal.size();
    if (pattern.dependency_begin.size() != operations + 1) {
        refuse("dependency_begin has " + std::to_string(pattern.dependency_begin.size()) + " numbers; for " +
               std::to_string(operations) + " operations it must have one more than these");
    }
    if (pattern.group_begin.size() != pattern.spans_replicas.size() + 1) {
        refuse("group_begin must have one number more than spans_replicas");
    }
    if (pattern.is_end.size() != operations) {
        refuse("is_end has " + std::to_string(pattern.is_end.size()) + " flags for " + std::to_string(operations) +
               " operations");
    }
    const auto is_finite = [](double seconds) { return std::isfinite(seconds); };
    if (!std::all_of(recorded.begin(), recorded.end(), is_finite) ||
        !std::all_of(ideal.begin(), ideal.end(), is_finite)) {
        refuse("durations must be finite numbers");
    }
    if (recorded.size() != operations * replicas * steps) {
        refuse("recorded has " + std::to_string(recorded.size()) + " numbers; operations x replicas x steps are " +
               std::to_string(operations * replicas * steps));
    }
    check_lists(pattern.dependency_begin, pattern.dependencies, operations, "dependencies");
    check_lists(pattern.group_begin, pattern.members, operations, "members");
    auto program = std::make_unique<Program>(pattern, operations, replicas, steps);
    program->find_groups();
    program->find_order();
    program->lay_out(recorded, ideal);
    program_ = std::move(program);
}

StepReplay::~StepReplay() = default;

std::size_t StepReplay::operations() const noexcept { return program_->operations; }

std::size_t StepReplay::replicas() const noexcept { return program_->replicas; }

std::size_t StepReplay::steps() const noexcept { return program_->steps; }

std::vector<double> StepReplay::step_seconds(std::span<const std::uint8_t> is_recorded) const {
    const Program& program = *program_;
    const std::size_t rows = program.operations * program.replicas;
    if (rows == 0 || is_recorded.size() % rows != 0) {
        refuse("is_recorded has " + std::to_string(is_recorded.size()) + " flags; operations x replicas are " +
               std::to_string(rows));
    }
    const std::size_t scenarios = is_recorded.size() / rows;
    std::vector<double> seconds(scenarios * program.steps);
    std::vector<Lanes> ends(rows);
    for (std::size_t block = 0; block < program.blocks; ++block) {
        const std::size_t first = block * kLanes;
        const std::size_t count = std::min(kLanes, program.steps - first);
        for (std::size_t scenario = 0; scenario < scenarios; ++scenario) {
            Lanes latest{};
            run_here({.replicas = program.replicas,
                      .order = program.order,
                      .dependency_begin = program.dependency_begin.data(),
                      .dependencies = program.dependencies.data(),
                      .group_begin = program.group_begin.data(),
                      .members = program.members.data(),
                      .group_of = program.group_of.data(),
                      .spans_replicas = program.spans_replicas.data(),
                      .is_end = program.is_end.data(),
                      .recorded = program.recorded.data() + (block * rows),
                      .ideal = program.ideal.data(),
                      .is_recorded = is_recorded.data() + (scenario * rows),
                      .ends = ends.data(),
                      .latest = &latest});
            for (std::size_t lane = 0; lane < count; ++lane) {
                seconds[(scenario * program.steps) + first + lane] = latest.at(lane);
            }
        }
    }
    return seconds;
}

}  // namespace megatronapp
