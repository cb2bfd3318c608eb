"""What rank 0 tells all ranks to look at, through the engine's commands."""

import dataclasses

import numpy as np
from numpy.typing import NDArray

from megatronapp_common.scope.protocol_requests import CaptureSettings, ProbeSite

TOPIC = "scope"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BeginRun:
    """A run comes; its samples are requests of the ids `run-0`, `run-1`, .."""

    run: str
    capture: CaptureSettings
    lengths: tuple[int, ...]
    """Tokens of each prompt."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ChangeRun:
    """Capture this from now on."""

    run: str
    capture: CaptureSettings


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EndRun:
    """A run or probe is over."""

    run: str


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BeginProbe:
    """A probe comes; its prompts are requests of the ids `probe-0`, .."""

    probe: str
    lengths: tuple[int, ...]
    sites: tuple[ProbeSite, ...]
    queries: tuple[int, int] | None
    stride: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SetBasis:
    """Project on these axes from now on."""

    version: int
    layers: tuple[int, ...]
    mean: NDArray[np.float32]
    """[layers, hidden]."""
    axes: NDArray[np.float32]
    """[layers, components, hidden]."""


CaptureCommand = BeginRun | ChangeRun | EndRun | BeginProbe | SetBasis
