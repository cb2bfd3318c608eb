"""Intervals of the cost of tracing."""

import math
import random

import pytest
from paired_blocks import MANY, compared, interval, t_interval, t_quantile


@pytest.mark.parametrize(
    ("probability", "freedom", "value"),
    [  # printed tables of Student's t
        (0.975, 1, 12.706),
        (0.975, 2, 4.303),
        (0.975, 3, 3.182),
        (0.975, 4, 2.776),
        (0.95, 7, 1.895),
        (0.95, 30, 1.697),
        (0.99, 10, 2.764),
    ],
)
def test_quantiles_of_students_t(probability: float, freedom: int, value: float) -> None:
    assert t_quantile(probability, freedom) == pytest.approx(value, abs=6e-4)


@pytest.mark.parametrize(("probability", "freedom"), [(0.5, 3), (1.0, 3), (0.975, 0)])
def test_there_is_no_quantile_elsewhere(probability: float, freedom: int) -> None:
    with pytest.raises(ValueError, match="there is no quantile"):
        t_quantile(probability, freedom)


@pytest.mark.parametrize("count", [2, 4, 8])
def test_intervals_of_few_values_contain_their_mean_in_95_of_100_cases(count: int) -> None:
    drawn = random.Random(7)
    found = [interval([drawn.gauss(0.3, 1.0) for _ in range(count)]) for _ in range(2_000)]
    assert {each.method for each in found} == {"t"}
    assert sum(each.low <= 0.3 <= each.high for each in found) / 2_000 == pytest.approx(0.95, abs=0.015)
    assert sum(each.upper >= 0.3 for each in found) / 2_000 == pytest.approx(0.95, abs=0.015)


def test_many_values_are_resampled() -> None:
    drawn = random.Random(7)
    values = [drawn.gauss(0.0, 1.0) for _ in range(MANY)]
    found = interval(values)
    assert found.method == "bootstrap"
    assert found.half_width == pytest.approx(t_interval(values).half_width, rel=0.15)
    assert math.isinf(t_interval([1.0]).half_width)


def test_costs_are_compared_in_groups_and_controls_in_pairs_of_groups() -> None:
    groups = [[1.00, 1.02, 1.01, 1.00], [1.00, 1.01, 1.02, 1.00]] * 4  # B is 1.5 % longer
    found = compared(groups)
    assert (found["groups"], found["controls"], found["cost_interval"]) == (8, 4, "t")
    assert found["cost"] == pytest.approx(0.015)
    assert found["resolved"] and found["control_is_zero"]
    assert not compared(groups[:6])["resolved"]  # three comparisons of A with A


def test_a_control_of_more_than_chance_is_marked() -> None:
    base = [[1.0, 1.0, 1.0, 1.001 + 1e-5 * number] for number in range(8)]
    found = compared([each if number % 2 == 0 else [1.0] * 4 for number, each in enumerate(base)])
    assert not found["control_is_zero"]
    assert found["control"] == pytest.approx(5e-4, rel=0.1)
