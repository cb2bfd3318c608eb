"""Compute what steps would have taken if some operations had taken as long as they usually do.

An ideal step gives every operation the usual duration of its kind: computation the mean, communication the median, over
all replicas, stages and steps. A step is then replayed with some durations as recorded and the others ideal; which ones
are recorded says which part of the lost time is. N operations, R replicas, S stages, T steps, seconds throughout.
"""

import dataclasses
import enum
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatronapp_analyzer.errors import WhatIfError
from megatronapp_analyzer.whatif.pattern import COMMUNICATION, OPTIMIZER, StepPattern, pattern_of
from megatronapp_analyzer.whatif.recording import Recording
from megatronapp_native import StepReplay

_CLOCK_ERROR_S = 1e-2
"""A transfer that ends this long before its last member starts is a fault of clocks, and takes no time."""
_LEAST_LOSS = 1e-6
"""Fraction of the ideal step below which a loss is an error of rounding, and has no parts."""
_FLAGS_BYTES = 64 << 20
"""Flags of scenarios that are replayed at a time."""
_WORKERS_PERCENT = 3
"""Number of workers, those with the largest slowdown, whose part of the lost time is M_W, as a percentage."""
_MERGED = {
    "forward-send": "forward-pp-comm",
    "forward-recv": "forward-pp-comm",
    "backward-send": "backward-pp-comm",
    "backward-recv": "backward-pp-comm",
}
"""Kinds that are reported together."""


class Idealise(enum.StrEnum):
    """Which operations are expected to take equally long."""

    POOLED = "pooled"
    """All of a kind, as published: a stage with more work than others is found slow."""
    WORK = "work"
    """All of a kind on one stage and chunk, which do the same work in every replica and step."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Breakdown:
    """Slowdowns of parts of a job if only the part's durations are as recorded, against the ideal step."""

    overall: Mapping[str, float]
    """By name of the part, over the means of all steps."""
    per_step: Mapping[int, Mapping[str, float]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class WhatIfResult:
    """The analysis of a recording."""

    slowdown: float
    """S: the recorded steps without launch delays over the ideal ones."""
    worker_fraction: float | None
    """M_W: the fraction of the lost time that is saved if the slowest 3 % of workers are ideal; None without loss."""
    last_stage_fraction: float | None
    """M_S: the same of the last stage."""
    launch_ratio: float
    """The recorded steps over those without launch delays: times in which nothing held up an operation."""
    step_slowdowns: Mapping[int, float]
    step_launch_ratios: Mapping[int, float]
    by_dp_rank: Breakdown
    by_stage: Breakdown
    by_type: Breakdown
    workers: Mapping[int, float]
    """Slowdown of each worker: the lesser of those of its data-parallel rank and its stage."""
    slowest_workers: tuple[int, ...]
    """Workers that M_W is about."""
    recorded_s: float
    ideal_s: float
    """Mean seconds of a step."""
    operations: int
    """Number of recorded operations."""
    skipped_steps: tuple[int, ...]
    idealise: Idealise

    def document(self) -> dict[str, Any]:
        """Return the result as a JSON object."""
        return {
            "S": self.slowdown,
            "M_W": self.worker_fraction,
            "M_S": self.last_stage_fraction,
            "launch_ratio": self.launch_ratio,
            "waste": 1 - 1 / self.slowdown,
            "idealise": self.idealise,
            "recorded_step_s": self.recorded_s,
            "ideal_step_s": self.ideal_s,
            "steps": len(self.step_slowdowns),
            "skipped_steps": self.skipped_steps,
            "operations": self.operations,
            "by_dp_rank": self.by_dp_rank.overall,
            "by_stage": self.by_stage.overall,
            "by_type": self.by_type.overall,
            "by_worker": self.workers,
            "slowest_workers": self.slowest_workers,
            "by_step": self.step_slowdowns,
            "launch_ratio_by_step": self.step_launch_ratios,
            "by_dp_rank_per_step": self.by_dp_rank.per_step,
            "by_stage_per_step": self.by_stage.per_step,
            "by_type_per_step": self.by_type.per_step,
        }


def analyze(recording: Recording, idealise: Idealise = Idealise.POOLED) -> WhatIfResult:
    """Analyse a recording. Raises WhatIfError for operations that the dependency model does not know."""
    pattern = pattern_of(recording)
    durations_NRT = durations_of(recording, pattern)
    ideal_N = ideal_durations(recording, durations_NRT, idealise)
    is_end_N = _ends(recording)
    try:
        replay = StepReplay(**pattern.flat(), is_end=is_end_N, recorded=durations_NRT, ideal=ideal_N)
    except ValueError as error:
        raise WhatIfError(
            "the operations of a step wait for each other in a circle; starts must be in the order in which they ran"
        ) from error
    scenarios = _Scenarios(recording)
    seconds = scenarios.replay(replay)
    recorded_T, ideal_T = seconds["recorded"], seconds["ideal"]
    if not ideal_T.min() > 0:
        raise WhatIfError("with usual durations a step takes no time; durations must be seconds above 0")
    parts = {name: scenarios.breakdown(name, seconds, ideal_T) for name in ("dp_rank", "stage", "type")}
    workers = _worker_slowdowns(recording, parts["dp_rank"].overall, parts["stage"].overall)
    count = -(-len(workers) * _WORKERS_PERCENT // 100)
    slowest = tuple(sorted(workers, key=lambda worker: (-workers[worker], worker))[:count])
    without = scenarios.without(np.isin(recording.workers_RS, slowest))
    lost_s = recorded_T.mean() - ideal_T.mean()

    def fraction(seconds_T: NDArray[np.float64]) -> float | None:
        return float((recorded_T.mean() - seconds_T.mean()) / lost_s) if lost_s > _LEAST_LOSS * ideal_T.mean() else None

    begun_T = recording.starts_NRT.min(axis=(0, 1))
    base_T = (recording.ends_NRT[is_end_N].max(axis=(0, 1)) - begun_T).astype(np.float64)
    return WhatIfResult(
        slowdown=float(recorded_T.mean() / ideal_T.mean()),
        worker_fraction=fraction(replay.step_seconds(without)[0]),
        last_stage_fraction=fraction(seconds["without the last stage"]),
        launch_ratio=float(base_T.mean() / recorded_T.mean()),
        step_slowdowns=scenarios.by_step(recorded_T / ideal_T),
        step_launch_ratios=scenarios.by_step(base_T / recorded_T),
        by_dp_rank=parts["dp_rank"],
        by_stage=parts["stage"],
        by_type=parts["type"],
        workers=workers,
        slowest_workers=slowest,
        recorded_s=float(recorded_T.mean()),
        ideal_s=float(ideal_T.mean()),
        operations=recording.starts_NRT.size,
        skipped_steps=recording.skipped,
        idealise=idealise,
    )


def durations_of(recording: Recording, pattern: StepPattern) -> NDArray[np.float64]:
    """Return seconds of computation, and of transfers without the wait for the last member, [N, R, T]."""
    found = recording.seconds_NRT.astype(np.float64)
    ends_NRT = recording.ends_NRT
    for group, spans_replicas in zip(pattern.groups, pattern.spans_replicas, strict=True):
        members = list(group)
        last_starts = recording.starts_NRT[members].max(axis=0)
        if spans_replicas:
            last_starts = last_starts.max(axis=0)
        transfer_s = (ends_NRT[members] - last_starts).astype(np.float64)
        found[members] = np.where(transfer_s <= -_CLOCK_ERROR_S, 0, transfer_s)
    return found


def _ends(recording: Recording) -> NDArray[np.bool_]:
    """Return the operations with which a step ends, [N]: those of the optimizer, or all without an optimizer."""
    is_optimizer = np.array([kind == OPTIMIZER for kind in recording.operations.kinds])
    return is_optimizer if is_optimizer.any() else ~is_optimizer


def ideal_durations(
    recording: Recording, durations_NRT: NDArray[np.float64], idealise: Idealise
) -> NDArray[np.float64]:
    """Return the usual duration of each operation, [N]: of computation the mean, of communication the median."""
    operations = recording.operations
    stages, chunks = operations.stages_N.tolist(), operations.chunks_N.tolist()
    places: dict[tuple[str, int, int], list[int]] = {}
    for place, kind in enumerate(operations.kinds):
        stage, chunk = (stages[place], chunks[place]) if idealise is Idealise.WORK else (-1, -1)
        places.setdefault((kind, stage, chunk), []).append(place)
    found = np.empty(len(operations))
    for (kind, _, _), alike in places.items():
        values = durations_NRT[alike]
        found[alike] = _median(values.ravel()) if kind in COMMUNICATION else values.mean()
    return found


def _median(values: NDArray[np.float64]) -> float:
    """Return the median. np.median first imports masked arrays, which takes longer than all medians here."""
    middle = values.size // 2
    places = [middle] if values.size % 2 else [middle - 1, middle]
    return float(np.partition(values, places)[places].mean())


class _Scenarios:
    """Which durations are as recorded: for each scenario those of some operations [N] of some replicas [R]."""

    def __init__(self, recording: Recording) -> None:
        operations, (replicas, stages) = recording.operations, recording.workers_RS.shape
        self._steps = recording.steps_T.tolist()
        self._stages_N = operations.stages_N
        kinds = np.array([_MERGED.get(kind, kind) for kind in operations.kinds])
        all_N, all_R = np.ones(len(operations), dtype=np.uint8), np.ones(replicas, dtype=np.uint8)
        self._recorded: dict[str, tuple[NDArray[Any], NDArray[Any]]] = {
            "recorded": (all_N, all_R),
            "ideal": (0 * all_N, all_R),
            "without the last stage": (self._stages_N != stages - 1, all_R),
        }
        self._parts: dict[str, list[str]] = {
            "dp_rank": list(map(str, range(replicas))),
            "stage": list(map(str, range(stages))),
            "type": sorted(set(kinds.tolist())),
        }
        for replica in range(replicas):
            self._recorded[f"dp_rank {replica}"] = all_N, np.arange(replicas) == replica
        for stage in range(stages):
            self._recorded[f"stage {stage}"] = self._stages_N == stage, all_R
        for kind in self._parts["type"]:
            self._recorded[f"type {kind}"] = kinds == kind, all_R

    def replay(self, replay: StepReplay) -> dict[str, NDArray[np.float64]]:
        """Return the seconds of each step, by scenario."""
        found: dict[str, NDArray[np.float64]] = {}
        names = list(self._recorded)
        all_N, all_R = self._recorded["recorded"]
        at_once = max(1, _FLAGS_BYTES // (len(all_N) * len(all_R)))
        for first in range(0, len(names), at_once):
            some = names[first : first + at_once]
            flags = [np.outer(*self._recorded[name]).astype(np.uint8) for name in some]
            found |= dict(zip(some, replay.step_seconds(np.stack(flags)), strict=True))
        return found

    def without(self, is_ideal_RS: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Return flags [1, N, R] of a scenario in which these workers are ideal."""
        flags: NDArray[np.bool_] = ~is_ideal_RS[:, self._stages_N].T[None]
        return flags

    def by_step(self, values_T: NDArray[np.float64]) -> dict[int, float]:
        """Return values by step."""
        return dict(zip(self._steps, values_T.tolist(), strict=True))

    def breakdown(
        self, name: str, seconds: Mapping[str, NDArray[np.float64]], ideal_T: NDArray[np.float64]
    ) -> Breakdown:
        """Return the slowdowns of the parts of one kind, largest first."""
        found = {part: seconds[f"{name} {part}"] for part in self._parts[name]}
        overall = {part: float(seconds_T.mean() / ideal_T.mean()) for part, seconds_T in found.items()}
        ratios = {part: (seconds_T / ideal_T).tolist() for part, seconds_T in found.items()}
        per_step = {
            step: _largest_first({part: ratios[part][place] for part in found})
            for place, step in enumerate(self._steps)
        }
        return Breakdown(overall=_largest_first(overall), per_step=per_step)


def _largest_first(values: dict[str, float]) -> dict[str, float]:
    return dict(sorted(values.items(), key=lambda item: -item[1]))


def _worker_slowdowns(
    recording: Recording, of_replicas: Mapping[str, float], of_stages: Mapping[str, float]
) -> dict[int, float]:
    """Return the slowdown of each worker by number, which bounds that of its operations alone from above."""
    workers: Sequence[Sequence[int]] = recording.workers_RS.tolist()
    return {
        worker: min(of_replicas[str(replica)], of_stages[str(stage)])
        for replica, of_replica in enumerate(workers)
        for stage, worker in enumerate(of_replica)
    }
