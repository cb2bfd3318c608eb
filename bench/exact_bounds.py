"""Exact bounds of a share (Clopper and Pearson 1934), without a statistics library."""

import math
from collections.abc import Callable


def binomial_at_least(successes: int, trials: int, probability: float) -> float:
    """Probability of `successes` or more in `trials` with probability `share` each."""
    if probability in {0.0, 1.0}:
        return float(probability == 1.0 or successes == 0)
    success, failure = math.log(probability), math.log1p(-probability)
    return math.fsum(
        math.exp(_log_choices(trials, k) + k * success + (trials - k) * failure) for k in range(successes, trials + 1)
    )


def _log_choices(trials: int, chosen: int) -> float:
    """Logarithm of the binomial coefficient, which exceeds a float from some thousand trials on."""
    return math.lgamma(trials + 1) - math.lgamma(chosen + 1) - math.lgamma(trials - chosen + 1)


def clopper_pearson(successes: int, trials: int, level: float = 0.95) -> tuple[float, float]:
    """Lower and upper bound of a share of which `successes` of `trials` were seen. (0, 1) without trials."""
    tail = (1 - level) / 2
    lower, upper = 0.0, 1.0
    if trials and successes:
        lower = _solve(lambda probability: binomial_at_least(successes, trials, probability) - tail)
    if trials and successes < trials:
        upper = _solve(lambda probability: binomial_at_least(successes + 1, trials, probability) - (1 - tail))
    return lower, upper


def with_bounds(successes: int, trials: int) -> str:
    """`58/60 (95 %: 0.885 to 0.996)`."""
    lower, upper = clopper_pearson(successes, trials)
    return f"{successes}/{trials} (95 %: {lower:.3f} to {upper:.3f})"


def _solve(rises: Callable[[float], float]) -> float:
    """Root of a function that rises from below 0 to above 0 between 0 and 1."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if rises(middle) < 0 else (low, middle)
    return (low + high) / 2
