"""Values that ingest, alignment, graph and detection exchange: the job's layout, one finished step, a verdict.

Everything here is pure data. Times are nanoseconds of the recording node's monotonic clock.
"""

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatronapp_analyzer.errors import LayoutError
from megatronapp_common.topology import Coordinates, RankRole, Topology
from megatronapp_common.trace import RECORD

RANK_RECORD = np.dtype([*RECORD.descr, ("rank", "<i4")])
"""A trace record with the global rank that wrote it."""

RankRecords = NDArray[np.void]
"""Array of RANK_RECORD."""


def select_rows(records: RankRecords, rows: NDArray[np.int64] | NDArray[np.bool_]) -> RankRecords:
    """Return rows of records by number or mask; some 20 times as fast as NumPy, which copies field by field."""
    selected: RankRecords = _opaque(records)[rows].view(records.dtype)
    return selected


def copy_rows(records: RankRecords) -> RankRecords:
    """Return a copy of records; as fast in relation to NumPy's as `select_rows`."""
    copied: RankRecords = _opaque(records).copy().view(records.dtype)
    return copied


def _opaque(records: RankRecords) -> RankRecords:
    return records.view(np.dtype((np.void, records.dtype.itemsize)))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class JobLayout:
    """Coordinates, worker and node of each rank. Tuples are indexed by global rank."""

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    dp: int = 1
    cp: int = 1
    ep: int = 1
    coordinates: tuple[Coordinates, ...]
    workers: tuple[int, ...]
    """Worker index of each rank."""
    nodes: tuple[str, ...]
    """Node name of each rank."""
    is_vee: bool = False
    """True if the first rank of a pipeline holds both ends of the model (docs/megadpp.md, ZB-V)."""
    roles: tuple[RankRole, ...] = ()
    """Role of each rank with MegaFBD, where sizes are those of the backward ranks; empty: all run both passes."""
    devices: int = 0
    """Number of GPUs that the ranks use, or of ranks where none uses a GPU; 0: not known."""

    def __post_init__(self) -> None:
        grid = len(self.roles) or self.tp * self.cp * self.dp * self.pp
        if len({len(self.coordinates), len(self.workers), len(self.nodes), grid}) != 1 or not self.coordinates:
            raise LayoutError(
                f"layout tp {self.tp} x cp {self.cp} x dp {self.dp} x pp {self.pp} does not match "
                f"{len(self.coordinates)} coordinates, {len(self.workers)} workers and {len(self.nodes)} nodes; "
                "give one of each per rank"
            )

    @property
    def world(self) -> int:
        """Number of ranks in the job."""
        return len(self.coordinates)

    @property
    def stages(self) -> tuple[int, ...]:
        """Stage of each rank, whose ranks do the same work; stages of backward ranks follow those of forward ranks."""
        if not self.roles:
            return tuple(at.pp for at in self.coordinates)
        return tuple(
            at.pp + (self.pp if role is RankRole.BACKWARD else 0)
            for at, role in zip(self.coordinates, self.roles, strict=True)
        )

    @property
    def pipeline_places(self) -> tuple[tuple[int, int, int], ...]:
        """Tensor, context and data coordinate of each rank's pipeline: ranks of a pipeline differ in stage and role.

        With MegaFBD those of a forward rank are also those of the backward ranks that it serves: the ranks of a tensor
        group (merged forward ranks), or of several replicas.
        """
        own = tuple((at.tp, at.cp, at.dp) for at in self.coordinates)
        forward = [place for place, role in zip(own, self.roles, strict=False) if role is RankRole.FORWARD]
        if not forward:
            return own
        is_merged = max(tp for tp, _, _ in forward) + 1 < self.tp
        served = max(self.dp // (max(dp for _, _, dp in forward) + 1), 1)
        return tuple(
            (0 if is_merged else tp, cp, dp // served) if role is RankRole.BACKWARD else (tp, cp, dp)
            for (tp, cp, dp), role in zip(own, self.roles, strict=True)
        )

    @property
    def loss_stages(self) -> tuple[int, ...]:
        """Stages of the ranks with the output layer and the loss; one of each role."""
        last = 0 if self.is_vee else self.pp - 1
        return (last, last + self.pp) if self.roles else (last,)

    @classmethod
    def grid(
        cls,
        *,
        tp: int = 1,
        pp: int = 1,
        vpp: int = 1,
        dp: int = 1,
        cp: int = 1,
        ranks_per_worker: int | None = None,
        ranks_per_node: int | None = None,
    ) -> "JobLayout":
        """Build a layout in Megatron's default order (TP fastest, then CP, DP, PP); workers and nodes in rank order."""
        world = tp * cp * dp * pp
        per_worker = ranks_per_worker or world
        per_node = ranks_per_node or per_worker
        topology = Topology(tensor=tp, context=cp, data=dp, pipeline=pp)
        coordinates = tuple(topology.coordinates(rank) for rank in range(world))
        return cls(
            tp=tp,
            pp=pp,
            vpp=vpp,
            dp=dp,
            cp=cp,
            coordinates=coordinates,
            workers=tuple(r // per_worker for r in range(world)),
            nodes=tuple(f"node-{r // per_node}" for r in range(world)),
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Communicator:
    """A communicator as a ring's table lists it. A `p2p` one is directed: members = (source, destination)."""

    kind: str
    members: tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StepRecords:
    """All records of one step of one attempt.

    `records` (RANK_RECORD) holds the spans of every rank that reported, sorted by rank, then start; METRIC and COUNTER
    samples may be among them and are ignored by the analysis. `comms[rank][slot]` is that rank's communicator table.
    `boot_ids[rank]` names the clock of a rank (ranks of one boot id share CLOCK_MONOTONIC); all absent ranks are taken
    to share a clock. `lost` counts records that the ring overwrote around this step.
    """

    attempt: int
    step: int
    records: RankRecords
    comms: Mapping[int, Mapping[int, Communicator]]
    boot_ids: Mapping[int, str] = dataclasses.field(default_factory=dict)
    real_time_s: float = 0.0
    """Seconds since the epoch at which the step ended, for `since` and `until` of a verdict."""
    lost: int = 0

    @property
    def start_ns(self) -> int:
        """Earliest start of a record."""
        return int(self.records["start_ns"].min())

    @property
    def end_ns(self) -> int:
        """Latest end of a record."""
        return int((self.records["start_ns"] + self.records["duration"].astype(np.uint64) * np.uint64(8)).max())


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CurrentSpan:
    """The span a rank is inside of, from its ring's header. `kind` is a `trace.Kind`."""

    kind: int
    step: int
    microbatch: int
    start_ns: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RankLiveness:
    """State of one rank in an agent's STATUS; both times are of that rank's node."""

    rank: int
    alive: bool
    closed: bool
    heartbeat_ns: int
    now_ns: int
    open_span: CurrentSpan | None
    device_span: CurrentSpan | None = None
    """The span that the rank's device is inside of while it has work; the host may be ahead of it."""
    process_state: str | None = None
    """Letter of /proc/PID/stat where the agent can see it: `T` means stopped, `D` waiting for a device."""
    attempt: int | None = None
    """Attempt that the rank belongs to, if known."""


class SubjectType(enum.StrEnum):
    """Kind of subject that a verdict names."""

    RANK = "rank"
    LINK = "link"
    REPLICA = "replica"
    """All ranks of a data-parallel replica."""
    GROUP = "group"
    """Ranks whose collectives the links between them slow down."""
    WORKER = "worker"
    NODE = "node"
    STAGE = "stage"
    JOB = "job"


class Cause(enum.StrEnum):
    """Class of a slowness."""

    COMPUTE = "compute"
    HOST = "host"
    MEMORY = "memory"
    """Slow compute because other work uses the bandwidth of the device's memory."""
    LINK = "link"
    """The network between nodes, or the way between processes without devices."""
    NODE_LINK = "nvlink-pcie"
    """NVLink or PCIe between devices of one node."""
    DATA = "data"
    """Waits for its data loader."""
    DATA_IMBALANCE = "data-imbalance"
    """Gets more tokens, or longer sequences, than the other replicas."""
    REGRESSION = "regression"
    """All ranks are slower than before."""
    HANG = "hang"
    UNDETERMINED = "undetermined"


class Reason(enum.StrEnum):
    """Finer reason of a cause, as far as the records show it."""

    DOWN_CLOCK = "down-clock"
    """The clock of the device is lower than that of others, or than before."""
    CONTENTION = "contention"
    """Another process uses the device, whose clock is as high as that of others."""
    MEMORY_BOUND = "memory-bound"
    """Work that waits for the device's memory is slow."""
    GARBAGE_COLLECTION = "garbage-collection"
    CPU_CONTENTION = "cpu-contention"
    """Threads wait for a processor."""
    CPU_STEAL = "cpu-steal"
    """The hypervisor of the node gives its processors to others."""
    CPU_THROTTLED = "cpu-throttled"
    """The processor limit of the container stops its threads."""
    STOPPED = "stopped"
    """The process neither runs nor waits for a processor."""


LINK_CAUSES = frozenset({Cause.LINK, Cause.NODE_LINK})
"""Causes that lie between ranks, and not in any of them."""


class VerdictState(enum.StrEnum):
    """State in the life of a verdict."""

    SUSPECT = "suspect"
    CONFIRMED = "confirmed"
    RECOVERING = "recovering"
    CLEARED = "cleared"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class VerdictSubject:
    """Subject of a verdict. A link has ranks (source, destination), a group those of a communicator."""

    type: SubjectType
    ranks: tuple[int, ...]
    worker: int | None = None
    node: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form of docs/contracts.md."""
        return {"type": str(self.type), "ranks": list(self.ranks), "worker": self.worker, "node": self.node}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class JobMoment:
    """A moment of the job: attempt, step and real time in seconds since the epoch."""

    attempt: int
    step: int
    time: float

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form of docs/contracts.md."""
        return {"attempt": self.attempt, "step": self.step, "time": self.time}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """One finding, with a stable `id` over its whole life."""

    id: str
    subject: VerdictSubject
    cause: Cause
    state: VerdictState
    seconds_per_step: float
    """Seconds that each step would be shorter without it (what-if replay)."""
    seconds_lost: float
    """Sum of these over the steps in which it was active; 0 for a hang."""
    slowdown: float
    """How many times longer the subject takes than expected; 1 is healthy."""
    confidence: float
    """Between 0 and 1."""
    evidence_steps: tuple[int, ...]
    evidence_text: tuple[str, ...]
    since: JobMoment
    until: JobMoment | None = None
    sentence: str = ""
    reason: Reason | None = None
    """Finer reason of the cause; None where it is unknown, and for causes without one."""

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form (docs/contracts.md, section 7)."""
        return {
            "id": self.id,
            "subject": self.subject.to_json(),
            "cause": str(self.cause),
            "reason": None if self.reason is None else str(self.reason),
            "state": str(self.state),
            "effect": {
                "secondsPerStep": round(self.seconds_per_step, 6),
                "secondsLost": round(self.seconds_lost, 6),
                "slowdown": round(self.slowdown, 4),
            },
            "confidence": round(self.confidence, 4),
            "evidence": {"steps": list(self.evidence_steps), "text": list(self.evidence_text)},
            "since": self.since.to_json(),
            "until": self.until.to_json() if self.until else None,
            "sentence": self.sentence,
        }
