"""Cause of passes that are longer than usual on a device: its compute, its memory, or links inside the unit.

A slow clock, or another process that takes turns with the training, makes all that a device does longer, the optimizer
at most as much as the passes. Where others use the memory's bandwidth, work grows by its part that waits for memory:
the optimizer, which multiplies no matrices, more than passes. Where links between the devices of a unit are slow, the
transfers of its collectives grow more than the passes that contain them.
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from megatronapp_analyzer.model import Cause

MORE = 1.5
"""How many times more, in logarithms, than passes a part must have grown to be the reason of their growth."""
LEAST_OPTIMIZER = math.log(1.15)
LEAST_TRANSFERS = math.log(1.25)
"""Least growth of a part; single collectives are short, and so less exact."""
UNKNOWN = float("nan")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PassParts:
    """Growth of what belongs to slow passes in one step, in logarithms; NaN where it is unknown."""

    optimizer: float
    transfers: float
    layers: float = UNKNOWN
    """Growth of norms beyond that of attention and MLP, in a step that was recorded in detail."""


def typical_parts(parts: Sequence[PassParts]) -> PassParts:
    """Return the median growth over steps."""
    return PassParts(
        optimizer=_median([each.optimizer for each in parts]),
        transfers=_median([each.transfers for each in parts]),
        layers=_median([each.layers for each in parts]),
    )


def _median(values: Sequence[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return float(np.median(known)) if known else UNKNOWN


def compute_cause(ratio: float, parts: PassParts, *, link: Cause) -> Cause:
    """Return the cause of passes that take `ratio` times as long as usual; `link` is that of links inside the unit."""
    least = MORE * math.log(max(ratio, 1.0))
    found = [
        (growth, cause)
        for growth, cause, smallest in (
            (parts.optimizer, Cause.MEMORY, LEAST_OPTIMIZER),
            (parts.transfers, link, LEAST_TRANSFERS),
        )
        if growth > max(least, smallest)
    ]
    if found:
        return max(found)[1]
    return Cause.MEMORY if parts.layers > LEAST_OPTIMIZER else Cause.COMPUTE
