"""The executor of a step: runs on one rank the tasks that its policy names, as their inputs arrive."""

import dataclasses
import math
import time
from typing import Protocol

import torch

from megatronapp_trainer.errors import TransferTimeoutError
from megatronapp_trainer.pipeline.planning.lateness import Decision, LaunchRule, PostedInput, SenderWatch, decide
from megatronapp_trainer.pipeline.planning.policies import Policy
from megatronapp_trainer.pipeline.planning.progress import RankProgress
from megatronapp_trainer.pipeline.planning.tasks import Placement, Task, TaskKind
from megatronapp_trainer.pipeline.task_clocks import TaskClock
from megatronapp_trainer.pipeline.transport.task_transport import Posted, TaskTransport

POLL_S = 20e-6
"""Pause between two polls of a busy device: short against a task, and long enough for other threads of the process."""
IDLE_S = 1e-3
"""Longest wait of a rank without work and inputs until it looks for the deadline, and for inputs on their way."""


class Passes(Protocol):
    """Runs single tasks; see `TaskPasses`."""

    def announce(self, task: Task, *, early: bool) -> None:
        """Take the task that runs next; `early`: before its turn in the plan."""

    def forward(self, task: Task, received: torch.Tensor | None) -> torch.Tensor:
        """Return the output of the chunk."""

    def backward(self, task: Task, received: torch.Tensor | None) -> torch.Tensor | None:
        """Return the gradient of the chunk's input; None on the first stage."""

    def weight(self, task: Task) -> None:
        """Compute the gradients of the chunk's weights."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepTasks:
    """Tasks of a rank in a step, and the policy that orders them."""

    placement: Placement
    rank: int
    """Pipeline rank."""
    num_microbatches: int
    split: bool
    """Weight gradients are tasks of their own."""
    policy: Policy
    first_number: int
    """Number of the rank's first task of the step; numbers count on from step to step."""
    launch_rule: LaunchRule | None
    """On a device, whose host runs ahead; None: the host runs the tasks itself."""
    deadline_s: float = 600.0
    """Longest time in which a device finishes no task."""

    @property
    def tasks(self) -> int:
        """Return the number of the rank's tasks in the step."""
        return (3 if self.split else 2) * self.num_microbatches * self.placement.chunks


def run_tasks(
    plan: StepTasks, *, passes: Passes, transport: TaskTransport, clock: TaskClock, watch: SenderWatch
) -> None:
    """Run all tasks of a step on this pipeline rank; on a device, launch them.

    Waits only where the policy allows no task that has its input, and on a device while that has enough to do.

    Raises:
        PeerLostError: another rank is lost or takes too long; TransferTimeoutError is one of them.
    """
    _RunningStep(plan, passes, transport, clock, watch).run()


class _RunningStep:
    def __init__(
        self, plan: StepTasks, passes: Passes, transport: TaskTransport, clock: TaskClock, watch: SenderWatch
    ) -> None:
        self._plan = plan
        self._passes = passes
        self._transport = transport
        self._clock = clock
        self._watch = watch
        self._progress = RankProgress(plan.placement, plan.rank, plan.num_microbatches, split=plan.split)
        self._inputs: dict[Task, torch.Tensor] = {}
        self._received = set(_received_tasks(plan.placement, plan.rank, plan.num_microbatches))
        """Tasks whose inputs other ranks send."""
        self._posted: dict[Task, Posted] = {}
        """Inputs on their way, of planned tasks that may be launched."""
        self._taken: list[Task] = []
        """Tasks that were launched before their input was there, and whose copies have no times yet."""
        self._own_tasks = 0
        self._changed = time.perf_counter()
        """When the rank has launched a task or its device has finished one."""

    def run(self) -> None:
        self._transport.begin_step(self._received)
        number = self._plan.first_number
        while self._progress.remaining:
            self._receive()
            chosen = self._on_host() if self._plan.launch_rule is None else self._on_device(self._plan.launch_rule)
            if chosen is None:
                continue
            self._progress.run(chosen)
            self._passes.announce(chosen, early=self._plan.policy.early)
            self._launch(chosen, number)
            number += 1
        # The device ends the step without its host. It ends also if a peer is lost, with an input that is none: the
        # call that follows then raises.
        while not self._clock.has_inputs():
            self._pause(POLL_S)
            self._receive()
        self._receive()

    def _receive(self) -> None:
        arrived = self._transport.poll()
        self._inputs.update(arrived)
        for task in arrived:
            self._progress.receive(task)
        # Times of a copy are there until its slot is used again.
        self._taken = [task for task in self._taken if self._transport.copied_ns(task) is None]

    def _pause(self, seconds: float) -> None:
        """Let other threads run. Raises TransferTimeoutError if nothing has changed for the deadline."""
        now = time.perf_counter()
        own_tasks = self._clock.own_work().tasks
        if own_tasks != self._own_tasks:
            self._own_tasks, self._changed = own_tasks, now
        if now - self._changed > self._plan.deadline_s:
            raise TransferTimeoutError(
                f"the device has finished no task for {self._plan.deadline_s:g} s, with {own_tasks} in its queue; an "
                "input that was on its way has not arrived"
            )
        time.sleep(seconds)

    def _on_host(self) -> Task | None:
        """Return the task to run, or None after a wait for an input."""
        chosen = self._plan.policy.choose(self._progress)
        if chosen is None:
            self._transport.wait()
        return chosen

    def _on_device(self, launch_rule: LaunchRule) -> Task | None:
        """Return the task to launch, or None after a wait; the input of a planned task may be on its way."""
        policy, progress = self._plan.policy, self._progress
        planned = policy.planned(progress)
        is_complete = planned is not None and (planned in progress.ready or planned in progress.pending_weights)
        posted = None if planned is None or is_complete else self._transport.posted().get(planned)
        if posted is not None and planned is not None:
            self._posted[planned] = posted
        own = self._clock.own_work()
        if policy.is_fixed:
            decision = Decision.LAUNCH if posted is not None else Decision.LEAVE
        else:
            decision = decide(
                launch_rule,
                own,
                is_complete=is_complete,
                posted=None if posted is None or planned is None else self._posted_input(planned, posted),
                times_known=self._watch.times_known,
            )
        if decision is Decision.HOLD:
            self._pause(POLL_S)
            return None
        if decision is Decision.LAUNCH and posted is not None and planned is not None:
            progress.receive(planned)
        chosen = policy.choose(progress)
        if chosen is None and (own.tasks or posted is not None):
            self._pause(POLL_S)
        elif chosen is None:
            self._transport.wait(IDLE_S)
            self._pause(0.0)
        return chosen

    def _posted_input(self, task: Task, posted: Posted) -> PostedInput:
        now = time.perf_counter()
        self._watch.see(posted.sender, self._transport.sender_progress(task), now)
        return self._watch.posted_input(task, posted.number, now)

    def _launch(self, task: Task, number: int) -> None:
        """Run a task, and pass on its output."""
        received = self._inputs.pop(task, None)
        input_seconds = 0.0
        if received is None and task in self._received:
            input_seconds = self._posted_input(task, self._posted[task]).expected_seconds(math.inf)
            received = self._transport.take_posted(task)
            self._taken.append(task)
        self._changed = time.perf_counter()
        self._clock.begin(task, input_seconds=input_seconds)
        output = self._run_task(task, received)
        self._clock.end()
        self._transport.mark_progress(number)
        target = self._plan.placement.next_task(self._plan.rank, task)
        if target is not None and target.rank != self._plan.rank:
            assert output is not None
            self._transport.send(target, output)
        elif target is not None:
            if target.task.kind is task.kind:  # the last stage's backward pass begins from its own loss
                assert output is not None
                self._inputs[target.task] = output
            self._progress.receive(target.task)

    def _run_task(self, task: Task, received: torch.Tensor | None) -> torch.Tensor | None:
        if task.kind is TaskKind.FORWARD:
            return self._passes.forward(task, received)
        if task.kind is TaskKind.BACKWARD:
            return self._passes.backward(task, received)
        self._passes.weight(task)
        return None


def _received_tasks(placement: Placement, rank: int, num_microbatches: int) -> list[Task]:
    """Return the tasks of a rank whose inputs other ranks send."""
    kinds = (TaskKind.FORWARD, TaskKind.BACKWARD)
    tasks = (
        Task(kind, microbatch, chunk)
        for kind in kinds
        for chunk in range(placement.chunks)
        for microbatch in range(num_microbatches)
    )
    sources = ((task, placement.previous_task(rank, task)) for task in tasks)
    return [task for task, source in sources if source is not None and source.rank != rank]
