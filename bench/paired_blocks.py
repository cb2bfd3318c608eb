"""Intervals of a cost that is measured in paired blocks of steps: Student's t for few of them, bootstrap for many.

A bootstrap of four or five values knows no spread beyond theirs and is too narrow: its 95 % interval of four normal
values contains their mean in 79 % of cases. Student's t is exact for normal values.
"""

import dataclasses
import math
import random
import statistics
from collections.abc import Sequence
from typing import Any

SAMPLES = 10_000
"""Bootstrap samples."""
MANY = 30
"""Values from which on their bootstrap is taken in place of Student's t."""
RESOLVED = 0.001
"""Half width of the control's interval up to which a difference is resolved."""
LEAST_CONTROLS = 4
"""Comparisons of A with A below which an interval says nothing."""


@dataclasses.dataclass(frozen=True, slots=True)
class Interval:
    """Mean of values, its 95 % interval, and its upper bound at 95 %."""

    mean: float
    low: float
    high: float
    upper: float
    method: str
    """`t` or `bootstrap`."""

    @property
    def half_width(self) -> float:
        return (self.high - self.low) / 2


def t_between(value: float, freedom: int) -> float:
    """Return the probability that a Student's t lies between -value and value (Abramowitz and Stegun, 26.7.3 and 4)."""
    angle = math.atan(value / math.sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = freedom % 2
    term, total = (cosine, 0.0) if odd else (1.0, 0.0)
    for number in range(odd, freedom - 1, 2):
        total += term
        term *= cosine * cosine * (number + 1) / (number + 2)
    return 2 / math.pi * (angle + sine * total) if odd else sine * total


def t_quantile(probability: float, freedom: int) -> float:
    """Return the value below which a Student's t lies with a probability of more than a half."""
    if not (0.5 < probability < 1 and freedom >= 1):
        raise ValueError(f"there is no quantile {probability} of Student's t with {freedom} degrees of freedom here")
    low, high = 0.0, 1.0
    while t_between(high, freedom) < 2 * probability - 1:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if t_between(middle, freedom) < 2 * probability - 1 else (low, middle)
    return (low + high) / 2


def t_interval(values: Sequence[float]) -> Interval:
    """Return the interval of a mean by Student's t; infinite for a single value."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return Interval(mean, -math.inf, math.inf, math.inf, "t")
    error, freedom = statistics.stdev(values) / math.sqrt(len(values)), len(values) - 1
    half = t_quantile(0.975, freedom) * error
    return Interval(mean, mean - half, mean + half, mean + t_quantile(0.95, freedom) * error, "t")


def bootstrap_interval(values: Sequence[float], random_state: random.Random) -> Interval:
    """Return the interval of a mean by the percentiles of bootstrap samples."""
    means = sorted(statistics.fmean(random_state.choices(values, k=len(values))) for _ in range(SAMPLES))
    low, high, upper = (means[min(int(part * SAMPLES), SAMPLES - 1)] for part in (0.025, 0.975, 0.95))
    return Interval(statistics.fmean(values), low, high, upper, "bootstrap")


def interval(values: Sequence[float]) -> Interval:
    """Return the interval of a mean: by bootstrap of many values, by Student's t of few."""
    return bootstrap_interval(values, random.Random(1)) if len(values) >= MANY else t_interval(values)


def compared(groups: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Return the cost of B in groups of four blocks ABBA, and of the control A against A, as parts of a step."""
    cost = interval([(b1 + b2 - a1 - a2) / (a1 + a2) for a1, b1, b2, a2 in groups])
    pairs = zip(groups[::2], groups[1::2], strict=False)
    controls = [(a[3] + b[0] - a[0] - b[3]) / (a[0] + b[3]) for a, b in pairs]
    control = t_interval(controls)
    return {
        "groups": len(groups),
        "cost": cost.mean,
        "cost_low": cost.low,
        "cost_high": cost.high,
        "cost_upper_95": cost.upper,
        "cost_interval": cost.method,
        "control": control.mean,
        "control_half_width": control.half_width,
        "controls": len(controls),
        "control_is_zero": control.low <= 0 <= control.high,
        "resolved": control.half_width <= RESOLVED and len(controls) >= LEAST_CONTROLS,
    }
