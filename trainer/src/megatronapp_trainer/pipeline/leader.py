"""One order of tasks for all ranks of a tensor group: the first rank chooses, the others follow.

The ranks of a tensor group meet in the collectives of each layer, so that they must run the same tasks in the same
order. Those that share a sequence meet in its attention, and are with the group here. Inputs arrive at different times;
the leader decides by its own, and publishes each task as it begins.
"""

from typing import Protocol

from megatronapp_trainer.pipeline.planning.policies import Policy
from megatronapp_trainer.pipeline.planning.progress import RankProgress
from megatronapp_trainer.pipeline.planning.tasks import Task

EARLY = 1 << 40
"""Bit of an entry above those of the task, which runs before its turn in the leader's plan."""


class DecisionLog(Protocol):
    """A log from the leader of a tensor group to its followers; no entry is lost, and none overtakes another."""

    def append(self, entry: int) -> None:
        """Publish an entry of 64 bits."""

    def poll_entry(self) -> int | None:
        """Return the next entry of the leader, if it is there."""


class Leading:
    """Publishes the tasks that a policy chooses."""

    def __init__(self, policy: Policy, log: DecisionLog) -> None:
        self._policy = policy
        self._log = log

    @property
    def early(self) -> bool:
        """Return whether the task that was chosen last runs before its turn in a plan."""
        return self._policy.early

    @property
    def is_fixed(self) -> bool:
        """Return whether the policy runs its planned task next, however late that is."""
        return self._policy.is_fixed

    def planned(self, progress: RankProgress) -> Task | None:
        """Return the planned task of the policy."""
        return self._policy.planned(progress)

    def choose(self, progress: RankProgress) -> Task | None:
        """Return the task that the policy chooses; the followers run it too."""
        task = self._policy.choose(progress)
        if task is not None:
            self._log.append(task.pack() | EARLY * self._policy.early)
        return task


class Following:
    """Runs the tasks of the leader, each as soon as its input is here."""

    is_fixed = True

    def __init__(self, log: DecisionLog) -> None:
        self._log = log
        self._next: Task | None = None
        self.early = False

    def planned(self, progress: RankProgress) -> Task | None:
        """Return the leader's next task, or None while it is not known."""
        if self._next is None:
            entry = self._log.poll_entry()
            if entry is not None:
                self._next, self.early = Task.unpack(entry), bool(entry & EARLY)
        return self._next

    def choose(self, progress: RankProgress) -> Task | None:
        """Return the leader's next task, or None while the task or its input has not arrived."""
        self.planned(progress)
        if self._next is None:
            return None
        if self._next not in progress.ready and self._next not in progress.pending_weights:
            return None
        task, self._next = self._next, None
        return task
