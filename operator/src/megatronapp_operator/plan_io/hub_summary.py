"""Parsing of progress and verdicts from ranks and hub. What cannot be parsed is treated as absent.

Neither decides over the life of a job, so a document of an unknown shape must not end the backend.
"""

import dataclasses
import itertools
import json
import math
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from megatronapp_common.errors import DocumentError
from megatronapp_common.job.api.analyzer import SlowRank
from megatronapp_common.job.api.progress import (
    ForwardBackward,
    PipelinePlan,
    Progress,
    ProgressState,
    ShipMode,
    ShipModeCost,
)
from megatronapp_common.job.api.status_fields import MAX_COUNT
from megatronapp_common.shared_documents import DocumentReader
from megatronapp_common.shared_memory_space import SharedMemorySpace
from megatronapp_common.text.terminal import to_single_line
from megatronapp_common.text.times import seconds_of
from megatronapp_operator.plan.observed import ControlAction
from megatronapp_operator.plan.policies.user_actions import HUB_MAX_CONTROLS

UNREADABLE = (KeyError, TypeError, ValueError, AttributeError, OverflowError)
"""Exceptions from reading a document of a wrong shape."""


MAX_VERDICTS, MAX_HUNG = 64, 1024
"""Most verdicts and hung ranks that are read: a status is limited, and a job may send any number of them."""
MAX_TEXT = 1024
"""Most characters of one text of a verdict."""
MAX_VERDICT_BYTES = 256 << 10
"""Bytes of all verdicts in a status; etcd takes 1.5 MB for an object."""
MAX_INT64 = (1 << 63) - 1
END_OF_TIME_S = 253_402_300_800.0
"""The year 10000 in seconds since the epoch, for which RFC 3339 has no digits."""
MAX_ROOMS = 16
"""Most workers with full shared memory that are read."""
MAX_CONTROLS, MAX_WHO, MAX_WHAT = HUB_MAX_CONTROLS, 256, 512
"""Most control actions that are read, and most characters of their user and their change."""
MAX_PLANS = 8
"""Most plans of MegaDPP that are read."""
MAX_SIZE = (1 << 53) - 1
"""Largest number of bytes; JSON readers differ about larger integers."""
MAX_CONTROL_ID = (1 << 53) - 1
"""Hubs number by milliseconds since 1970; JSON readers differ about larger integers."""
SHIP_MODES: tuple[ShipMode, ...] = typing.get_args(ShipMode)
STATES = frozenset(typing.get_args(ProgressState))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HubSummary:
    """Contents of GET /api/v1/summary."""

    attempt: int = 0
    """The newest attempt that the hub knows; hung ranks are of this one."""
    progress: Progress | None = None
    slow_ranks: tuple[SlowRank, ...] | None = ()
    """None: unknown, because the hub's detector cannot be started; so for hung ranks."""
    hung_ranks: tuple[int, ...] | None = ()
    full_shared_memory: tuple[str, ...] | None = None
    """One sentence for each worker whose shared memory is full; None: hubs of older releases do not report it."""
    controls: tuple[ControlAction, ...] = ()


def read_summary(document: Any) -> HubSummary | None:  # noqa: ANN401 - JSON of another process
    """Parse the answer to GET /api/v1/summary; return None if it has another shape."""
    try:
        return HubSummary(
            attempt=_whole(document["attempt"]),
            progress=read_progress(document["progress"]),
            slow_ranks=_read_verdicts(document["slowRanks"]),
            hung_ranks=_read_hung(document["hungRanks"]),
            full_shared_memory=read_rooms(document.get("fullSharedMemory")),
            controls=read_controls(document.get("actions", ())),
        )
    except UNREADABLE:
        return None


def read_rooms(entries: Any) -> tuple[str, ...] | None:  # noqa: ANN401 - JSON of another process
    """Return a sentence for each worker whose shared memory is full, or None for a document of another shape."""
    try:
        return tuple(
            _text(
                to_single_line(
                    f"worker {int(entry['worker'])} on {entry['node']}: {SharedMemorySpace.from_json(entry)}"
                )
            )
            for entry in entries[:MAX_ROOMS]
        )
    except UNREADABLE:
        return None


def read_page(page: DocumentReader) -> Progress | None:
    """Read progress from a document in shared memory; return None if it does not exist or has another shape."""
    try:
        return read_progress(page.read())
    except (DocumentError, *UNREADABLE):
        return None


def read_progress(page: Mapping[str, Any] | None) -> Progress | None:
    """Parse progress from a progress document or the hub's copy of it; None if it has no iteration.

    Raises one of UNREADABLE for a document of another shape.
    """
    if page is None or page.get("iteration") is None:
        return None
    checkpoint_iteration, checkpoint_time = read_checkpoint(page.get("checkpoint"))
    return Progress(
        attempt=_whole(page.get("attempt") or 0),
        iteration=_whole(page["iteration"]),
        total_iterations=_count(page.get("totalIterations")),
        state=page["state"] if page.get("state") in STATES else "training",
        loss=_finite(page.get("loss")),
        learning_rate=_finite(page.get("learningRate")),
        grad_norm=_finite(page.get("gradNorm")),
        tokens_per_second=_finite(page.get("tokensPerSecond")),
        tflops_per_gpu=_finite(page.get("tflopsPerGpu")),
        seconds_left=_finite(page.get("secondsLeft")),
        consumed_samples=_count(page.get("consumedSamples")),
        validation_loss=_finite(page.get("validationLoss")),
        checkpoint_iteration=checkpoint_iteration,
        checkpoint_time=checkpoint_time,
        updated_at=None if page.get("updatedAt") is None else _moment(seconds_of(page["updatedAt"])),
        plans=read_plans(page.get("plans", ())),
        forward_backward=read_forward_backward(page.get("forwardBackward")),
    )


def read_checkpoint(entry: Any) -> tuple[int | None, float | None]:  # noqa: ANN401 - JSON of another process
    """Return step and time of the newest checkpoint; None without one, and for the time of a release that has none.

    Times are rounded down: a checkpoint is never taken for younger than it is.
    """
    try:
        iteration = _limited(entry["iteration"], MAX_COUNT)
    except UNREADABLE:
        return None, None
    try:
        taken_at = _moment(seconds_of(entry["takenAt"]))
    except UNREADABLE:
        return iteration, None
    return iteration, None if taken_at is None else float(int(taken_at))


def read_plans(entries: Any) -> tuple[PipelinePlan, ...]:  # noqa: ANN401 - JSON of another process
    """Return the newest plans of MegaDPP, oldest first; none if they cannot be parsed."""
    try:
        return tuple(
            PipelinePlan(
                from_step=_whole(entry["fromStep"]),
                schedule=_text(to_single_line(str(entry["schedule"]))),
                plan=_text(to_single_line(str(entry["plan"]))),
                microbatches=_whole(entry["microbatches"]),
                chunks=_whole(entry["chunks"]),
                cap_chunks=_whole(entry["capChunks"]),
                spare_chunks=_whole(entry["spareChunks"]),
                chosen=bool(entry["chosen"]),
                simulated_seconds=_finite(entry.get("simulatedSeconds")),
                simulated_bubble=_finite(entry.get("simulatedBubble")),
                static_seconds=_finite(entry.get("staticSeconds")),
                static_bubble=_finite(entry.get("staticBubble")),
                measured_seconds=_finite(entry.get("measuredSeconds")),
            )
            for entry in entries[-MAX_PLANS:]
        )
    except UNREADABLE:
        return ()


def read_forward_backward(entry: Any) -> ForwardBackward | None:  # noqa: ANN401 - JSON of another process
    """Return the state of MegaFBD; None without it, or if it cannot be parsed."""
    if entry is None:
        return None
    try:
        advice, advised = entry.get("advice"), entry.get("advisedBackwardPerForward")
        return ForwardBackward(
            from_step=_limited(entry["fromStep"], MAX_COUNT),
            ship=_ship_mode(entry["ship"]),
            chosen=bool(entry["chosen"]),
            merged=bool(entry["merged"]),
            backward_per_forward=_limited(entry["backwardPerForward"], MAX_COUNT),
            ship_bytes=_limited(entry["shipBytes"], MAX_SIZE),
            forward_seconds=_finite(entry.get("forwardSeconds")),
            backward_seconds=_finite(entry.get("backwardSeconds")),
            ship_seconds=_finite(entry.get("shipSeconds")),
            modes=tuple(
                ShipModeCost(
                    ship=_ship_mode(mode["ship"]),
                    ship_bytes=_limited(mode["shipBytes"], MAX_SIZE),
                    step_seconds=_finite(mode.get("stepSeconds")),
                )
                for mode in entry["modes"][: len(SHIP_MODES)]
            ),
            advised_backward_per_forward=None if advised is None else _limited(advised, MAX_COUNT),
            advice=None if advice is None else _text(to_single_line(str(advice))) or None,
        )
    except UNREADABLE:
        return None


def read_controls(entries: Any) -> tuple[ControlAction, ...]:  # noqa: ANN401 - JSON of another process
    """Return the newest control actions, each once, oldest first; none if they cannot be parsed."""
    found = {}
    try:
        for entry in entries[-MAX_CONTROLS:]:
            number, who, what = int(entry["id"]), to_single_line(str(entry["who"])), to_single_line(str(entry["what"]))
            found[number] = ControlAction(id=number, text=f"{who[:MAX_WHO]} {what[:MAX_WHAT]}")
    except UNREADABLE:
        return ()
    return tuple(found[number] for number in sorted(found) if 0 <= number <= MAX_CONTROL_ID)


def newest(pages: Iterable[Progress | None]) -> Progress | None:
    """Return the progress with the highest attempt and iteration, or None."""
    found = [page for page in pages if page is not None]
    return max(found, key=lambda page: (page.attempt, page.iteration, page.updated_at or 0.0), default=None)


def _finite(value: float | None) -> float | None:
    """Return the number, or None for NaN and Inf, which a document may hold but JSON cannot. Raises TypeError."""
    if isinstance(value, bool):
        raise TypeError("a boolean is not a number")
    return float(value) if value is not None and math.isfinite(value) else None


def _whole(value: int) -> int:
    """Return an integer that fits an int64 of the status. Raises OverflowError, TypeError, ValueError."""
    found = int(value)
    if abs(found) > MAX_INT64:
        raise OverflowError(f"{found} does not fit 64 bits")
    return found


def _count(value: int | None) -> int | None:
    return None if value is None else _whole(value)


def _limited(value: int, limit: int) -> int:
    """Return a number from 0 to a limit. Raises OverflowError, TypeError, ValueError."""
    found = int(value)
    if not 0 <= found <= limit:
        raise OverflowError(f"{found} is not between 0 and {limit}")
    return found


def _ship_mode(value: object) -> ShipMode:
    """Return a mode of shipping. Raises ValueError for one that the status does not have."""
    return SHIP_MODES[SHIP_MODES.index(value)]


def _text(value: str) -> str:
    """Return the text, truncated to the size that a status may hold."""
    return str(value)[:MAX_TEXT]


def _moment(time: float | None) -> float | None:
    """Round seconds since the epoch to the microsecond, as a status does; None for a time beyond the calendar."""
    return None if time is None or not 0 <= time < END_OF_TIME_S else round(time, 6)


def _read_verdicts(entries: Sequence[Mapping[str, Any]] | None) -> tuple[SlowRank, ...] | None:
    return None if entries is None else _in_bounds(tuple(_verdict(entry) for entry in entries[:MAX_VERDICTS]))


def _read_hung(ranks: Sequence[int] | None) -> tuple[int, ...] | None:
    return None if ranks is None else tuple(_whole(rank) for rank in ranks[:MAX_HUNG])


def _in_bounds(verdicts: tuple[SlowRank, ...]) -> tuple[SlowRank, ...]:
    """Return the first verdicts that together fit into a status."""
    sizes = itertools.accumulate(len(json.dumps(dataclasses.asdict(verdict))) for verdict in verdicts)
    return tuple(verdict for verdict, size in zip(verdicts, sizes, strict=True) if size <= MAX_VERDICT_BYTES)


def _verdict(entry: Mapping[str, Any]) -> SlowRank:
    subject, effect, since = entry["subject"], entry.get("effect") or {}, entry.get("since") or {}
    if not (name := _text(entry["id"])):
        raise ValueError("a verdict has an empty id")  # a status could not be read back
    return SlowRank(
        id=name,
        subject=_text(subject["type"]),
        ranks=tuple(_whole(rank) for rank in subject["ranks"][:MAX_HUNG]),
        cause=_text(entry["cause"]),
        state=_text(entry["state"]),
        sentence=_text(entry["sentence"]),
        worker=_count(subject.get("worker")),
        node=None if subject.get("node") is None else _text(subject["node"]),
        since_attempt=_count(since.get("attempt")),
        since_step=_count(since.get("step")),
        since_time=_moment(since.get("time")),
        slowdown=_finite(effect.get("slowdown")),
        seconds_per_step=_finite(effect.get("secondsPerStep")),
        gpu_hours=_finite(effect.get("gpuHours")),
        cost=_finite(effect.get("cost")),
    )
