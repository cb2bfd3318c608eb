#include <gtest/gtest.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <vector>

#include "megatronapp/detect/column_test.hpp"
#include "megatronapp/detect/medians.hpp"

namespace megatronapp::detect {
namespace {

constexpr ColumnSettings kSettings{.window = 64, .min_history = 8, .least_window = 1, .score = 2.3};
constexpr ColumnLimits kLimits{.floor = 0.004,
                               .own = 0.012,
                               .peers = 0.012,
                               .cap = 0.56,
                               .peer_spread = 0.012,
                               .least_peer_spread = 0.004,
                               .largest_step = 1.0};

std::array<double, kWindows.size()> prior() {
    std::array<double, kWindows.size()> errors{};
    errors.fill(1.0);
    return errors;
}

/// Judges steps of columns without doubts, and returns which columns are over.
class Steps {
  public:
    explicit Steps(std::size_t columns) : test_(std::vector<std::int64_t>(columns, 0), kSettings, prior()) {}

    std::vector<std::uint8_t> over(const std::vector<double>& values) {
        const std::size_t columns = values.size();
        std::vector<double> deviation(columns);
        std::vector<double> change(columns);
        std::vector<double> distance(columns);
        test_.compare(values, kLimits, deviation, change, distance);
        const std::vector<double> doubt(columns);
        const std::vector<std::uint8_t> usual(columns, 1);
        std::vector<std::uint8_t> known(columns);
        std::vector<std::uint8_t> over(columns);
        std::vector<double> size(columns);
        std::vector<double> strength(columns);
        std::vector<std::uint8_t> by_history(columns);
        std::vector<std::uint8_t> calm(columns);
        test_.judge(
            change, distance, doubt, doubt, usual,
            {.known = known, .over = over, .size = size, .strength = strength, .by_history = by_history, .calm = calm});
        return over;
    }

  private:
    ColumnTest test_;
};

TEST(ColumnTest, NamesTheColumnThatBecomesSlowAndNoOther) {
    Steps steps(8);
    std::vector<double> values(8, 0.1);
    for (int step = 0; step < 40; ++step) {
        values[0] += step % 2 == 0 ? 0.001 : -0.001;
        EXPECT_EQ(steps.over(values), std::vector<std::uint8_t>(8, 0));
    }
    values[3] += 0.3;
    std::vector<std::uint8_t> over;
    for (int step = 0; step < 6; ++step) {
        over = steps.over(values);
    }
    EXPECT_EQ(over, (std::vector<std::uint8_t>{0, 0, 0, 1, 0, 0, 0, 0}));
}

TEST(ColumnTest, RefusesSizesThatDoNotFit) {
    ColumnTest test(std::vector<std::int64_t>(3, 0), kSettings, prior());
    std::vector<double> three(3);
    const std::vector<double> two(2);
    EXPECT_THROW(test.compare(two, kLimits, three, three, three), std::invalid_argument);
    EXPECT_THROW(test.grow(std::vector<std::int64_t>(2, 0)), std::invalid_argument);
}

TEST(Medians, AreThoseOfSortedValues) {
    std::vector<double> values{5.0, 1.0, 4.0, 2.0};
    EXPECT_EQ(lower_median(values), 2.0);
    EXPECT_EQ(median(values), 3.0);
    const std::vector<double> columns{5.0, 1.0, kUnknown, 4.0, 2.0};
    const std::vector<std::int64_t> groups{0, 0, 0, 0, -1};
    std::vector<double> others(columns.size());
    median_of_others(columns, groups, others);
    EXPECT_EQ(others[0], 1.0);
    EXPECT_EQ(others[1], 4.0);
    EXPECT_EQ(others[3], 1.0);
    EXPECT_NE(others[2], others[2]);
    EXPECT_NE(others[4], others[4]);
    EXPECT_THROW(median_of_others(columns, std::vector<std::int64_t>(2, 0), others), std::invalid_argument);
}

}  // namespace
}  // namespace megatronapp::detect
