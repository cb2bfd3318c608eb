"""State of every rank: training, silent, hung or ended. Pure: the caller gives the time.

silent: the rank's agent has not reported for STATUS_TIMEOUT_S, or the rank itself has made no progress for much longer
than its steps last. Which of several silent ranks holds up the others is for the detector to decide; the rank that it
names is `hung`.
"""

import dataclasses
import enum
import functools
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from megatronapp_analyzer.errors import ProtocolError
from megatronapp_analyzer.model import CurrentSpan, RankLiveness
from megatronapp_common.shared_memory_space import SharedMemorySpace
from megatronapp_common.trace import NO_MICROBATCH, RecordKind

STATUS_TIMEOUT_S = 5.0
SILENT_STEPS = 8.0
"""Number of usual step times without progress after which a rank is silent."""
SILENT_MIN_S = 3.0
SILENT_FIRST_S = 120.0
"""The same before the first step is finished: start-up and compilation take long."""
NS = 1_000_000_000
PAUSES = {"evaluating": RecordKind.EVALUATE, "saving": RecordKind.CHECKPOINT, "paused": RecordKind.PAUSE}
"""States of the progress document in which ranks are quiet for long."""


class RankState(enum.StrEnum):
    """Activity of a rank, as far as the hub knows."""

    TRAINING = "training"
    SILENT = "silent"
    HUNG = "hung"
    ENDED = "ended"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RankStatus:
    """The newest STATUS entry of one rank; `received_ns` is on the hub's monotonic clock."""

    liveness: RankLiveness
    lost: int
    received_ns: int

    @property
    def ended(self) -> bool:
        """Return true if its ring was closed or its process has ended."""
        return self.liveness.closed or not self.liveness.alive

    @property
    def open_span_age_s(self) -> float:
        """Return seconds from the open span's begin to the status; 0 without one."""
        span = self.liveness.open_span
        return max(0, self.liveness.now_ns - span.start_ns) / NS if span else 0.0


def _open_span(entry: Mapping[str, Any] | None) -> CurrentSpan | None:
    if entry is None:
        return None
    microbatch = entry.get("microbatch")
    return CurrentSpan(
        kind=int(entry["kind"]),
        step=int(entry["step"]),
        microbatch=NO_MICROBATCH if microbatch is None else int(microbatch),
        start_ns=int(entry["startNs"]),
    )


def parse_status(entry: Mapping[str, Any], received_ns: int, attempt: int | None = None) -> RankStatus:
    """Return one entry of a STATUS frame's `rings`. Raises ProtocolError if a field is missing or garbled."""
    try:
        liveness = RankLiveness(
            rank=int(entry["rank"]),
            alive=bool(entry["alive"]),
            closed=bool(entry["closed"]),
            heartbeat_ns=int(entry["heartbeatNs"]),
            now_ns=int(entry["nowNs"]),
            open_span=_open_span(entry["openSpan"]),
            device_span=_open_span(entry.get("deviceSpan")),
            process_state=entry.get("processState"),
            attempt=attempt,
        )
        return RankStatus(liveness=liveness, lost=int(entry["lost"]), received_ns=received_ns)
    except (KeyError, TypeError, ValueError) as error:
        raise ProtocolError("bad-status", f"STATUS frame: {type(error).__name__}: {error}") from error


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class AgentStatus:
    """Content of a STATUS frame."""

    ranks: list[RankStatus]
    progress: Mapping[str, Any] | None
    shared_memory: SharedMemorySpace | None
    """Shared memory of the worker; None if the agent does not report it."""


def parse_agent_status(header: Mapping[str, Any], received_ns: int, attempt: int | None = None) -> AgentStatus:
    """Parse a STATUS frame; the worker's own ring contains nothing about ranks. Raises ProtocolError."""
    rings, progress = header.get("rings"), header.get("progress")
    if not isinstance(rings, list) or not all(isinstance(entry, dict) and "rank" in entry for entry in rings):
        raise ProtocolError("bad-status", "STATUS frame: rings is not a list of maps with a rank")
    if not isinstance(progress, dict | None):
        raise ProtocolError("bad-status", "STATUS frame: progress is not a map")
    room = header.get("sharedMemory")
    try:
        found = None if room is None else SharedMemorySpace.from_json(room)
    except (KeyError, TypeError, ValueError) as error:
        raise ProtocolError("bad-status", f"STATUS frame: sharedMemory: {error!r}") from error
    entries = [parse_status(entry, received_ns, attempt) for entry in rings if entry["rank"] is not None]
    return AgentStatus(ranks=entries, progress=progress, shared_memory=found)


@functools.lru_cache(maxsize=256)  # a kind is a byte
def kind_name(kind: int) -> str:
    """Return the lower-case name of a kind; its number if a newer release wrote it."""
    try:
        return RecordKind(kind).name.lower()
    except ValueError:
        return f"kind-{kind}"


def silent_after_s(usual_step_s: float | None) -> float:
    """Return seconds without progress after which a rank is silent."""
    return max(SILENT_MIN_S, SILENT_STEPS * usual_step_s) if usual_step_s else SILENT_FIRST_S


def rank_state(
    status: RankStatus | None, *, now_ns: int, usual_step_s: float | None, hung: Collection[int]
) -> RankState:
    """Return the state of one rank at `now_ns` of the hub's monotonic clock."""
    if status is None:
        return RankState.SILENT
    if status.ended:
        return RankState.ENDED
    if status.liveness.rank in hung:
        return RankState.HUNG
    unheard_s = (now_ns - status.received_ns) / NS
    idle_s = (status.liveness.now_ns - status.liveness.heartbeat_ns) / NS
    if unheard_s > STATUS_TIMEOUT_S or idle_s > silent_after_s(usual_step_s):
        return RankState.SILENT
    return RankState.TRAINING


def in_pause(heard: Iterable[RankLiveness], state: str | None) -> list[RankLiveness]:
    """Return the ranks; those without an open span get one of what the job does according to the progress document.

    Evaluation and checkpoints take long without a record, and their spans may enclose others or be shown by none.
    """
    kind = PAUSES.get(state or "")
    if kind is None:
        return list(heard)
    return [
        rank
        if rank.open_span is not None
        else dataclasses.replace(
            rank, open_span=CurrentSpan(kind=kind, step=0, microbatch=NO_MICROBATCH, start_ns=rank.heartbeat_ns)
        )
        for rank in heard
    ]


def fresh(statuses: Mapping[int, RankStatus], now_ns: int) -> list[RankLiveness]:
    """Return what the detector may judge: ranks whose agent has reported lately."""
    return [
        status.liveness
        for _, status in sorted(statuses.items())
        if now_ns - status.received_ns <= STATUS_TIMEOUT_S * NS
    ]
