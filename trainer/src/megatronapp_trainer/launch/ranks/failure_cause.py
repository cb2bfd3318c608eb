"""Which end of a rank, or which notice of another worker, is the reason why this worker ends. Pure."""

import dataclasses
import enum
import signal
from collections.abc import Sequence

from megatronapp_common.names import ExitCode
from megatronapp_trainer.launch.rendezvous.messages import EndNotice


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RankEnd:
    """How a rank of this worker ended: with an exit code, or by a signal."""

    rank: int
    local_rank: int
    code: int = 0
    signal: int | None = None
    killed_by_us: bool = False
    """The launcher killed it because of something that had happened before."""

    @property
    def early(self) -> bool:
        """Whether it was stopped, and not by us, before it could answer."""
        return self.signal is not None and not self.killed_by_us

    def orderly(self, *, asked_to_stop: bool) -> bool:
        """Whether this end needs no explanation. A rank that was asked to stop may not have had a handler yet."""
        if self.signal is not None:
            return asked_to_stop and self.signal == signal.SIGTERM
        return self.code in (ExitCode.OK, ExitCode.PREEMPTED)


Event = RankEnd | EndNotice


class FailureState(enum.Enum):
    """What the events so far mean for this worker."""

    FINE = enum.auto()
    ENDING = enum.auto()
    """Ranks, here or elsewhere, were stopped, as asked, before they could answer: the others wait for them in vain."""
    SUSPICIOUS = enum.auto()
    """Somebody lost a peer; who that was is not known yet."""
    CERTAIN = enum.auto()
    """The first own failure, or the notice of one, is known."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FailureCause:
    """`reason` is the failure that this worker ends for."""

    standing: FailureState
    reason: Event | None = None


def judge(events: Sequence[Event], *, asked_to_stop: bool) -> FailureCause:
    """The first event that is a failure in itself counts; a lost peer only says that there is one elsewhere.

    Where ranks were stopped before they could answer, they are the peers that were lost.
    """
    troubles = [event for event in events if _is_failure(event, asked_to_stop=asked_to_stop)]
    for event in troubles:
        if event.code != ExitCode.PEER_LOST:
            return FailureCause(standing=FailureState.CERTAIN, reason=event)
    if asked_to_stop and any(event.early for event in events):
        return FailureCause(standing=FailureState.ENDING)
    if troubles:
        return FailureCause(standing=FailureState.SUSPICIOUS, reason=troubles[0])
    return FailureCause(standing=FailureState.FINE)


def _is_failure(event: Event, *, asked_to_stop: bool) -> bool:
    if isinstance(event, EndNotice):
        return not event.orderly
    return not event.killed_by_us and not event.orderly(asked_to_stop=asked_to_stop)


def preempted(ends: Sequence[RankEnd]) -> bool:
    """Whether orderly ends mean that the job was asked to stop and not that it is complete."""
    return any(end.code == ExitCode.PREEMPTED for end in ends) or stopped_before_boundary(ends)


def stopped_before_boundary(ends: Sequence[RankEnd]) -> bool:
    """Whether a rank of those did not get to a step border."""
    return any(end.code == ExitCode.PEER_LOST or end.signal is not None for end in ends)
