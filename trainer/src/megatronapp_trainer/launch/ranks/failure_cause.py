"""The cause of a worker's end: the end of a rank, or the notice of another worker. Pure functions."""

import dataclasses
import enum
import signal
from collections.abc import Sequence

from megatronapp_common.names import ExitCode
from megatronapp_trainer.launch.rendezvous.messages import EndNotice


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RankEnd:
    """End of a rank of this worker: with an exit code, or by a signal."""

    rank: int
    local_rank: int
    code: int = 0
    signal: int | None = None
    killed_by_us: bool = False
    """True if the launcher killed it because of an earlier event."""

    @property
    def early(self) -> bool:
        """Return True if it was stopped, by others, before it could answer."""
        return self.signal is not None and not self.killed_by_us

    def orderly(self, *, stop_requested: bool) -> bool:
        """Return True if this end needs no explanation. A rank that was asked to stop may have had no handler yet."""
        if self.signal is not None:
            return stop_requested and self.signal == signal.SIGTERM
        return self.code in (ExitCode.OK, ExitCode.PREEMPTED)


Event = RankEnd | EndNotice


class FailureState(enum.Enum):
    """Conclusion of a worker from the events so far."""

    FINE = enum.auto()
    ENDING = enum.auto()
    """Ranks, here or elsewhere, were stopped on request before they could answer: the others wait for them in vain."""
    SUSPICIOUS = enum.auto()
    """A rank lost a peer that has not been identified yet."""
    CERTAIN = enum.auto()
    """The first failure of this worker, or the notice of one, is known."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FailureCause:
    """State of a worker, with the failure that this worker ends for in `reason`."""

    standing: FailureState
    reason: Event | None = None


def judge(events: Sequence[Event], *, stop_requested: bool) -> FailureCause:
    """Return the first event that is a failure in itself; a lost peer only indicates a failure elsewhere.

    Where ranks were stopped before they could answer, they are the peers that were lost.
    """
    troubles = [event for event in events if _is_failure(event, stop_requested=stop_requested)]
    for event in troubles:
        if event.code != ExitCode.PEER_LOST:
            return FailureCause(standing=FailureState.CERTAIN, reason=event)
    if stop_requested and any(event.early for event in events):
        return FailureCause(standing=FailureState.ENDING)
    if troubles:
        return FailureCause(standing=FailureState.SUSPICIOUS, reason=troubles[0])
    return FailureCause(standing=FailureState.FINE)


def _is_failure(event: Event, *, stop_requested: bool) -> bool:
    if isinstance(event, EndNotice):
        return not event.orderly
    return not event.killed_by_us and not event.orderly(stop_requested=stop_requested)


def preempted(ends: Sequence[RankEnd]) -> bool:
    """Return True if orderly ends mean that the job was asked to stop, and not that it is complete."""
    return any(end.code == ExitCode.PREEMPTED for end in ends) or stopped_before_boundary(ends)


def stopped_before_boundary(ends: Sequence[RankEnd]) -> bool:
    """Return True if one of these ranks did not reach a step boundary."""
    return any(end.code == ExitCode.PEER_LOST or end.signal is not None for end in ends)
