"""Simulation of a step on devices: hosts that launch ahead of them, and decide by what they know of their inputs."""

import collections
import dataclasses
import heapq
import itertools
from collections.abc import Sequence

from megatronapp_trainer.pipeline.planning.lateness import (
    Decision,
    LaunchRule,
    OwnWork,
    PostedInput,
    SenderWatch,
    UsualTimes,
    decide,
)
from megatronapp_trainer.pipeline.planning.policies import Policy
from megatronapp_trainer.pipeline.planning.progress import RankProgress
from megatronapp_trainer.pipeline.planning.simulator import DeadlockError, Duration, Simulation, TaskSpan
from megatronapp_trainer.pipeline.planning.tasks import Placement, Task, TaskKind

EPSILON_S = 1e-6
"""Added to the time of a later decision, so that rounding does not repeat it at the same moment."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DeviceModel:
    """Hosts of a pipeline's devices."""

    launch_rule: LaunchRule
    reaction_seconds: float
    """From a decision until an idle device begins the task."""
    usual: UsualTimes | None
    """Lengths of tasks and transfers that the hosts assume; None: not measured yet."""


def simulate_devices(
    placement: Placement,
    num_microbatches: int,
    policies: Sequence[Policy],
    *,
    split: bool,
    model: DeviceModel,
    task_seconds: Duration,
    transfer_seconds: Duration,
) -> Simulation:
    """Run one step of all pipeline ranks with the policies and the decisions of the product.

    The transfers of one kind from one rank follow each other, as copies on one stream do.

    Raises:
        DeadlockError: tasks are left that no policy runs.
    """
    ranks = [
        _Rank(
            RankProgress(placement, rank, num_microbatches, split=split),
            policy,
            SenderWatch(placement, rank, model.usual),
        )
        for rank, policy in enumerate(policies)
    ]
    return _DeviceStep(placement, ranks, model, task_seconds, transfer_seconds).run()


@dataclasses.dataclass(slots=True)
class _Launched:
    task: Task
    at: float
    input_at: float
    """When the host expects its input."""


@dataclasses.dataclass(slots=True)
class _Rank:
    progress: RankProgress
    policy: Policy
    watch: SenderWatch
    queue: collections.deque[_Launched] = dataclasses.field(default_factory=collections.deque)
    """Tasks that the device has not finished; it runs the first one, or waits for its input."""
    is_running: bool = False
    finished: int = 0
    launched: int = 0
    free_at: float = 0.0
    """When the device finished its last task."""
    posted: dict[Task, int] = dataclasses.field(default_factory=dict)
    """Inputs on their way, and the number of the task that makes each."""
    awaited: set[Task] = dataclasses.field(default_factory=set)
    """Launched tasks whose input is not there."""
    decides_at: float = 0.0
    """Next moment at which the host decides if nothing happens before."""
    spans: list[TaskSpan] = dataclasses.field(default_factory=list)
    peak: int = 0


class _DeviceStep:
    def __init__(
        self,
        placement: Placement,
        ranks: Sequence[_Rank],
        model: DeviceModel,
        task_seconds: Duration,
        transfer_seconds: Duration,
    ) -> None:
        self._placement = placement
        self._ranks = ranks
        self._model = model
        self._task_seconds = task_seconds
        self._transfer_seconds = transfer_seconds
        self._channel_free: dict[tuple[int, TaskKind], float] = {}
        self._events: list[tuple[float, int, str, int, Task | None]] = []
        self._numbers = itertools.count()

    def run(self) -> Simulation:
        for rank in range(len(self._ranks)):
            self._schedule(0.0, "decide", rank)
        while self._events:
            now, _, event, rank, task = heapq.heappop(self._events)
            if event == "end":
                self._end(rank, now)
            elif task is not None:
                self._arrive(rank, task)
            self._start(rank, now)
            self._decide(rank, now)
        left = {rank: state.progress.remaining for rank, state in enumerate(self._ranks) if state.progress.remaining}
        if left:
            raise DeadlockError(f"tasks that no policy runs, by rank: {left}")
        return Simulation(
            tuple(tuple(state.spans) for state in self._ranks), tuple(state.peak for state in self._ranks)
        )

    def _arrive(self, rank: int, task: Task) -> None:
        state = self._ranks[rank]
        del state.posted[task]
        if task in state.awaited:
            state.awaited.remove(task)
        else:
            state.progress.receive(task)

    def _start(self, rank: int, now: float) -> None:
        """Let an idle device begin the first task of its queue, if the input is there."""
        state = self._ranks[rank]
        if state.is_running or not state.queue or state.queue[0].task in state.awaited:
            return
        head = state.queue[0]
        begin = max(now, head.at + self._model.reaction_seconds)
        end = begin + self._task_seconds(rank, head.task)
        state.is_running = True
        state.spans.append(TaskSpan(head.task, begin, end))
        self._schedule(end, "end", rank)

    def _end(self, rank: int, now: float) -> None:
        """Send the output of the task that the device has finished."""
        state = self._ranks[rank]
        task = state.queue.popleft().task
        state.is_running, state.free_at = False, now
        state.finished += 1
        target = self._placement.next_task(rank, task)
        if target is None or target.rank == rank:
            return
        channel = (rank, task.kind)
        end = max(now, self._channel_free.get(channel, 0.0)) + self._transfer_seconds(rank, task)
        self._channel_free[channel] = end
        self._schedule(end, "arrive", target.rank, target.task)

    def _decide(self, rank: int, now: float) -> None:
        """Let the host launch what it may at this moment."""
        state, ahead = self._ranks[rank], self._model.launch_rule
        while state.progress.remaining:
            own, planned = self._own_work(state, now), state.policy.planned(state.progress)
            is_complete = planned is not None and (
                planned in state.progress.ready or planned in state.progress.pending_weights
            )
            number = None if planned is None or is_complete else state.posted.get(planned)
            posted, expected = None, 0.0
            if planned is not None and number is not None:
                posted = self._posted_input(rank, planned, number, now)
                expected = posted.expected_seconds(ahead.tolerance_seconds or 0.0)
            if state.policy.is_fixed:
                decision = Decision.LAUNCH if posted is not None else Decision.LEAVE
            else:
                known = state.watch.times_known
                decision = decide(ahead, own, is_complete=is_complete, posted=posted, times_known=known)
            if decision is Decision.LAUNCH and posted is not None and planned is not None:
                state.progress.receive(planned)
            chosen = None if decision is Decision.HOLD else state.policy.choose(state.progress)
            if chosen is None:
                self._decide_later(rank, now, own, expected)
                return
            self._launch(rank, chosen, now)

    def _posted_input(self, rank: int, task: Task, number: int, now: float) -> PostedInput:
        source = self._placement.previous_task(rank, task)
        assert source is not None
        state, sender = self._ranks[rank], self._ranks[source.rank]
        state.watch.see(source.rank, sender.finished, sender.free_at)
        return state.watch.posted_input(task, number, now)

    def _own_work(self, state: _Rank, now: float) -> OwnWork:
        free = state.free_at
        for launched in state.queue:
            usual = 0.0 if self._model.usual is None else self._usual(state, launched.task)
            free = max(free, launched.at, launched.input_at) + usual
        return OwnWork(tasks=len(state.queue), seconds=max(free - now, 0.0) if state.queue else 0.0)

    def _usual(self, state: _Rank, task: Task) -> float:
        assert self._model.usual is not None
        return self._model.usual.task_seconds[state.progress.rank, task.kind, task.chunk]

    def _decide_later(self, rank: int, now: float, own: OwnWork, expected: float) -> None:
        """Decide again when the device is about to run dry, and then when a late input is in time after all.

        While the device works, an input that is late stays so: both times get shorter alike.
        """
        rule, state = self._model.launch_rule, self._ranks[rank]
        moment = own.seconds - rule.lead_seconds
        if moment <= EPSILON_S:
            moment = expected - (rule.tolerance_seconds or 0.0)
        if EPSILON_S < moment < float("inf") and not now < state.decides_at <= now + moment + EPSILON_S:
            state.decides_at = now + moment + EPSILON_S
            self._schedule(state.decides_at, "decide", rank)

    def _launch(self, rank: int, task: Task, now: float) -> None:
        state = self._ranks[rank]
        input_at = now
        if task in state.posted:
            state.awaited.add(task)
            input_at += self._posted_input(rank, task, state.posted[task], now).expected_seconds(float("inf"))
        state.progress.run(task)
        state.peak = max(state.peak, state.progress.activations)
        state.launched += 1
        state.queue.append(_Launched(task, now, input_at))
        target = self._placement.next_task(rank, task)
        if target is not None and target.rank == rank:
            state.progress.receive(target.task)
        elif target is not None:
            self._ranks[target.rank].posted[target.task] = state.launched
            self._schedule(now, "decide", target.rank)
        self._start(rank, now)

    def _schedule(self, time: float, event: str, rank: int, task: Task | None = None) -> None:
        heapq.heappush(self._events, (time, next(self._numbers), event, rank, task))
