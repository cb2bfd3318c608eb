"""Decision of a rank on a device to launch its planned task, to wait, or to leave the plan.

On a device the host runs ahead: a task that is launched before its input is there waits on the device, which begins it
without the host's reaction time. A task that is launched cannot be taken back, so it is launched as late as the device
allows: until then an input that seems to be in time may turn out to be late.
"""

import dataclasses
import enum
import math
from collections.abc import Mapping

from megatronapp_trainer.pipeline.planning.tasks import Placement, Task, TaskKind


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PostedInput:
    """State of an input that its sender's host has launched, after the task that makes it."""

    tasks_left: int
    """Tasks that the sender's device has to finish, the one that makes the input included; 0: the transfer is left."""
    known_seconds: float
    """Seconds for which this rank has known of that number."""
    task_seconds: float
    """Usual length of the task that makes it, on the sender's device."""
    transfer_seconds: float
    """Usual time from the end of that task until its output is here."""

    def expected_seconds(self, tolerance_seconds: float) -> float:
        """Return in how many seconds the input will be there; infinity where it has taken longer than the tolerance.

        Tasks before the one that makes the input are taken to be as long as that one.
        """
        usual = self.task_seconds if self.tasks_left else self.transfer_seconds
        left = usual - self.known_seconds
        if left < -tolerance_seconds:
            return math.inf
        left = max(left, 0.0)
        if not self.tasks_left:
            return left
        return left + (self.tasks_left - 1) * self.task_seconds + self.transfer_seconds


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class OwnWork:
    """Work that this rank has launched and its device has not finished."""

    tasks: int
    seconds: float
    """Usual time until the device has finished them."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LaunchRule:
    """How far a rank decides before it must, and how late an input may be."""

    lead_seconds: float
    """Before its device runs dry a rank decides on what is not there: the time that the host needs to launch."""
    tolerance_seconds: float | None
    """A planned task is launched if its input is at most this late; None: only once the input is there."""
    most_tasks: int = 2
    """A rank decides on its next task only while its device has less tasks than this."""


class Decision(enum.Enum):
    """Action of a rank at the moment of its decision."""

    LAUNCH = enum.auto()
    """Launches the planned task, with a wait on the device if its input is not there."""
    HOLD = enum.auto()
    """Decides later; nothing is lost until then."""
    LEAVE = enum.auto()
    """Runs another task that has its input, if there is one."""


def decide(
    launch_rule: LaunchRule, own: OwnWork, *, is_complete: bool, posted: PostedInput | None, times_known: bool = True
) -> Decision:
    """Return what a rank does about its planned task.

    A planned task whose input is there is always launched once the device has room, so that a plan without deadlock
    stays without; one whose input is on its way and in time, when the device is about to run dry.

    Args:
        launch_rule: of this rank.
        own: work on its device.
        is_complete: whether the input of the planned task is there.
        posted: the input, if it is on its way; None also where there is no planned task.
        times_known: whether lengths have been measured; until then all that is on its way is taken to be in time.
    """
    if own.tasks >= launch_rule.most_tasks:
        return Decision.HOLD
    if is_complete:
        return Decision.LAUNCH
    if own.seconds > launch_rule.lead_seconds:
        return Decision.HOLD
    if posted is not None and launch_rule.tolerance_seconds is not None:
        expected = posted.expected_seconds(launch_rule.tolerance_seconds) if times_known else 0.0
        if expected <= own.seconds + launch_rule.tolerance_seconds:
            return Decision.LAUNCH
    return Decision.LEAVE


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class UsualTimes:
    """Measured lengths of the tasks of a pipeline's ranks, and of its transfers."""

    task_seconds: Mapping[tuple[int, TaskKind, int], float]
    """By (rank, kind, chunk)."""
    transfer_seconds: float
    """From the end of a task until its output is at the rank that takes it."""

    def of_rank(self, rank: int) -> dict[tuple[TaskKind, int], float]:
        """Return the lengths of one rank's tasks by kind and chunk."""
        return {(kind, chunk): value for (owner, kind, chunk), value in self.task_seconds.items() if owner == rank}


class SenderWatch:
    """Progress of the ranks that send to one rank, as it has seen it."""

    def __init__(self, placement: Placement, rank: int, usual: UsualTimes | None) -> None:
        """Take the usual times; None until they are measured."""
        self._placement = placement
        self._rank = rank
        self._usual = usual
        self._seen: dict[int, tuple[int, float]] = {}

    @property
    def times_known(self) -> bool:
        """Return whether lengths have been measured."""
        return self._usual is not None

    def see(self, sender: int, number: int, now: float) -> None:
        """Note the number of the last task that the device of a pipeline rank has finished."""
        if sender not in self._seen or self._seen[sender][0] != number:
            self._seen[sender] = number, now

    def posted_input(self, task: Task, number: int, now: float) -> PostedInput:
        """Return what is known of an input on its way, which task `number` of its sender makes."""
        source = self._placement.previous_task(self._rank, task)
        assert source is not None
        finished, since = self._seen.get(source.rank, (0, now))
        usual, key = self._usual, (source.rank, source.task.kind, source.task.chunk)
        return PostedInput(
            tasks_left=max(number - finished, 0),
            known_seconds=now - since,
            task_seconds=0.0 if usual is None else usual.task_seconds[key],
            transfer_seconds=0.0 if usual is None else usual.transfer_seconds,
        )
