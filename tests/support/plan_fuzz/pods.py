"""Pods and nodes of the model."""

import dataclasses
import itertools

from megatronapp_common.save_request import SaveRequest
from megatronapp_operator.plan import Deletion, Worker, WorkerOutcome, WorkerPhase

LIVE = frozenset({WorkerPhase.PENDING, WorkerPhase.RUNNING})


@dataclasses.dataclass(slots=True, eq=False)
class Pod:
    """A worker's pod as the cluster knows it."""

    uid: str
    index: int
    attempt: int
    template: str
    created: float
    avoids: frozenset[str]
    """Nodes that it may not go to."""
    spare: bool = False
    """True while it waits to take the place of a worker."""
    name: str = ""
    checkpoint: bool = False
    """Its ranks have the order to end with the next checkpoint."""
    withdrawn: bool = False
    """Its ranks had that order, which was withdrawn; they may end all the same."""
    save_request: SaveRequest | None = None
    """Newest request to its ranks for a checkpoint."""
    gated: bool = False
    """A queue has not admitted its gang."""
    has_finalizer: bool = False
    """A queue's finalizer keeps it from going."""
    phase: WorkerPhase = WorkerPhase.PENDING
    node: str | None = None
    unplaced: bool = False
    started: float | None = None
    finished: float | None = None
    outcome: WorkerOutcome | None = None
    deletion: Deletion | None = None
    unreachable: float | None = None
    reachable_since: float | None = None
    disrupted: str | None = None
    waiting: str | None = None
    in_place: bool = False
    """Its launcher takes orders to continue with another attempt."""
    joined: int = 0
    """Attempt that its launcher runs; `attempt` is the one that its label orders."""
    end: WorkerOutcome | None = None
    """How its ranks ended while its launcher waits for another attempt."""
    ordered: float = 0.0
    """When it was ordered to continue."""
    stuck: bool = False
    """Its launcher follows no order any more."""
    preparing: bool = False
    prepared: float | None = None
    occupies: bool = False

    @property
    def live(self) -> bool:
        """Return whether its trainer may still run."""
        return self.phase in LIVE

    @property
    def runs(self) -> bool:
        """Return whether its ranks run, as far as the API server and its launcher know."""
        return self.phase is WorkerPhase.RUNNING and self.end is None

    def view(self, *, template: str, reported: bool) -> Worker:
        """The pod as the plan sees it. `reported`: worker 0 reports how ranks ended; `template`: that of new pods."""
        standby = (
            reported and self.end is not None and self.phase is WorkerPhase.RUNNING and self.joined == self.attempt
        )
        return Worker(
            index=self.index,
            attempt=self.attempt,
            phase=WorkerPhase.FAILED if standby else self.phase,
            started_at=self.started,
            finished_at=self.finished if standby or self.phase is not WorkerPhase.RUNNING else None,
            outcome=self.end if standby else self.outcome,
            standby=standby,
            reusable=self.in_place and self.template == template,
            deletion=self.deletion,
            node=self.node,
            uid=self.uid,
            name=self.name,
            spare=self.spare,
            ends_at_checkpoint=self.checkpoint,
            end_withdrawn=self.withdrawn,
            save_request=self.save_request,
            occupies=self.occupies or self.live,
            scheduled=self.node is not None,
            unplaced=self.unplaced,
            avoids=self.avoids,
            waiting=self.waiting,
            preparing=self.preparing,
            prepared_at=self.prepared,
            unreachable_since=self.unreachable,
            reachable_since=self.reachable_since,
            disrupted=self.disrupted,
            finalizers=("kueue.x-k8s.io/managed",) if self.has_finalizer and self.deletion is not None else (),
        )


@dataclasses.dataclass(slots=True)
class Node:
    """A machine with room for one worker."""

    name: str
    down_since: float | None = None
    """Time since which its kubelet does not report."""
    cordoned: bool = False
    """True while it is closed to new pods, and those on it are to be evicted."""
    starts_pods: bool = True
    """False: no container ever starts on it."""

    @property
    def up(self) -> bool:
        """Return whether its kubelet works."""
        return self.down_since is None


_UIDS = itertools.count()


def new_uid() -> str:
    """A uid that no other pod has."""
    return f"pod-{next(_UIDS)}"


def whole(seconds: float) -> float:
    """A time as the API server writes it."""
    return float(int(seconds))
