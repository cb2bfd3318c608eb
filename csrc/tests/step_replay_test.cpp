#include "megatronapp/step_replay.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

namespace megatronapp {
namespace {

using Indices = std::vector<std::int32_t>;
using Flags = std::vector<std::uint8_t>;
using Seconds = std::vector<double>;

/// Operations 0 and 2 compute, 1 (after 0) sends to 3 (after 2), and 4 computes after 3.
struct Case {
    Indices dependency_begin{0, 0, 1, 1, 2, 3};
    Indices dependencies{0, 2, 3};
    Indices group_begin{0, 2};
    Indices members{1, 3};
    Flags spans_replicas{0};
    Flags is_end{0, 0, 0, 0, 1};
    std::size_t steps = 1;

    [[nodiscard]] StepReplay replay(const Seconds& recorded, const Seconds& ideal) const {
        const ReplayPattern pattern{.dependency_begin = dependency_begin,
                                    .dependencies = dependencies,
                                    .group_begin = group_begin,
                                    .members = members,
                                    .spans_replicas = spans_replicas,
                                    .is_end = is_end};
        return {pattern, recorded, ideal, recorded.size() / ideal.size() / steps, steps};
    }
};

Seconds usual() { return {1.0, 0.5, 1.0, 0.5, 1.0}; }

TEST(StepReplay, StartsTransfersWhenTheLastMemberHasStarted) {
    const StepReplay replay = Case{}.replay({3.0, 0.25, 2.0, 0.75, 1.0}, usual());
    EXPECT_EQ(replay.step_seconds(Flags(5, 1)), Seconds{3.0 + 0.75 + 1.0});
    EXPECT_EQ(replay.step_seconds(Flags(5, 0)), Seconds{1.0 + 0.5 + 1.0});
    EXPECT_EQ(replay.step_seconds(Flags{1, 0, 0, 0, 0, 0, 0, 1, 0, 0}), (Seconds{4.5, 3.5}));
}

TEST(StepReplay, LetsAGroupWaitForAllReplicas) {
    Case two;
    two.spans_replicas = {1};
    const Seconds recorded{1.0, 5.0, 0.5, 0.5, 1.0, 1.0, 0.5, 0.5, 1.0, 1.0};  // of both replicas for each operation
    EXPECT_EQ(two.replay(recorded, usual()).step_seconds(Flags(10, 1)), Seconds{6.5});
    Flags slow_one_ideal(10, 1);
    slow_one_ideal[1] = 0;
    EXPECT_EQ(two.replay(recorded, usual()).step_seconds(slow_one_ideal), Seconds{2.5});
}

TEST(StepReplay, ComputesMoreStepsThanFitIntoOneVector) {
    Case many;
    many.steps = 37;
    Seconds recorded;
    for (std::size_t operation = 0; operation < usual().size(); ++operation) {
        for (std::size_t step = 0; step < many.steps; ++step) {
            recorded.push_back(operation == 2 ? static_cast<double>(step) : 1.0);
        }
    }
    const Seconds found = many.replay(recorded, usual()).step_seconds(Flags(5, 1));
    for (std::size_t step = 0; step < many.steps; ++step) {
        EXPECT_EQ(found[step], std::max(1.0, static_cast<double>(step)) + 2.0);
    }
}

std::string refusal(const Case& wrong, const Seconds& recorded = usual()) {
    try {
        static_cast<void>(wrong.replay(recorded, usual()));
    } catch (const std::invalid_argument& error) {
        return error.what();
    }
    return "";
}

TEST(StepReplay, RefusesPatternsThatDoNotFit) {
    Case circle;
    circle.dependency_begin = {0, 1, 2, 2, 3, 4};
    circle.dependencies = {4, 0, 2, 3};
    EXPECT_NE(refusal(circle).find("circle"), std::string::npos);
    Case unknown;
    unknown.dependencies = {0, 2, 9};
    EXPECT_NE(refusal(unknown).find("operation 9"), std::string::npos);
    Case twice;
    twice.members = {1, 1};
    EXPECT_NE(refusal(twice).find("two groups"), std::string::npos);
    EXPECT_NE(refusal(Case{}, Seconds(5, std::numeric_limits<double>::quiet_NaN())).find("finite"), std::string::npos);
    EXPECT_NE(refusal(Case{}, Seconds(7, 1.0)).find("recorded has 7"), std::string::npos);
    EXPECT_THROW(static_cast<void>(Case{}.replay(usual(), usual()).step_seconds(Flags(3))), std::invalid_argument);
}

}  // namespace
}  // namespace megatronapp
