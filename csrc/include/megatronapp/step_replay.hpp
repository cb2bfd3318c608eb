#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

namespace megatronapp {

/// The operations of one step and what each of them waits for. All replicas and steps have the same.
/// Lists of lists are concatenated: those of number i are from `begin[i]` up to `begin[i + 1]`.
struct ReplayPattern {
    /// Operations that end before operation i may start.
    std::span<const std::int32_t> dependency_begin;
    std::span<const std::int32_t> dependencies;
    /// Operations that transfer together: none of a group's transfers begins before all of them have started.
    /// An operation outside of all groups computes alone.
    std::span<const std::int32_t> group_begin;
    std::span<const std::int32_t> members;
    /// For each group whether it also waits for the same group of all other replicas.
    std::span<const std::uint8_t> spans_replicas;
    /// For each operation whether the step lasts until it has ended.
    std::span<const std::uint8_t> is_end;
};

/// Replays steps with some durations as recorded and all others as in an ideal step.
///
/// An operation starts when all that it depends on has ended, and ends its duration later; in a group its transfer
/// begins when the last member has started. 16 steps are computed at a time, for all scenarios one after another.
class StepReplay {
  public:
    /// `recorded`: seconds of [operation, replica, step]; `ideal`: of each operation. Both are of a computation or, in
    /// a group, of the transfer alone. Throws std::invalid_argument where sizes, indices or orders do not fit.
    StepReplay(const ReplayPattern& pattern, std::span<const double> recorded, std::span<const double> ideal,
               std::size_t replicas, std::size_t steps);
    ~StepReplay();
    StepReplay(const StepReplay&) = delete;
    StepReplay(StepReplay&&) = delete;
    StepReplay& operator=(const StepReplay&) = delete;
    StepReplay& operator=(StepReplay&&) = delete;

    /// Seconds of [scenario, step], from the start to the end of the last operation that the step lasts for.
    /// `is_recorded`: of [scenario, operation, replica], 1 for the recorded duration and 0 for the ideal one.
    /// Throws std::invalid_argument if its size is no multiple of operations times replicas.
    [[nodiscard]] std::vector<double> step_seconds(std::span<const std::uint8_t> is_recorded) const;

    [[nodiscard]] std::size_t operations() const noexcept;
    [[nodiscard]] std::size_t replicas() const noexcept;
    [[nodiscard]] std::size_t steps() const noexcept;

  private:
    struct Program;
    std::unique_ptr<const Program> program_;
};

}  // namespace megatronapp
