"""Commands of rank 0 to all ranks about what is captured, sent through the engine."""

import dataclasses

import numpy as np
from numpy.typing import NDArray

from megatronapp_common.scope.protocol_requests import CaptureSettings, ProbeSite

TOPIC = "scope"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BeginRun:
    """Begin a run, whose samples are requests with the ids `run-0`, `run-1`, .."""

    run: str
    capture: CaptureSettings
    lengths: tuple[int, ...]
    """Tokens of each prompt."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ChangeRun:
    """Change what a run captures from now on."""

    run: str
    capture: CaptureSettings


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EndRun:
    """End a run or probe."""

    run: str


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BeginProbe:
    """Begin a probe, whose prompts are requests with the ids `probe-0`, .."""

    probe: str
    lengths: tuple[int, ...]
    sites: tuple[ProbeSite, ...]
    queries: tuple[int, int] | None
    stride: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SetBasis:
    """Use these axes for projections from now on."""

    version: int
    layers: tuple[int, ...]
    mean: NDArray[np.float32]
    """[layers, hidden]."""
    axes: NDArray[np.float32]
    """[layers, components, hidden]."""


CaptureCommand = BeginRun | ChangeRun | EndRun | BeginProbe | SetBasis
