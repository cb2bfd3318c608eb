"""The executor of a step: runs on one rank the tasks that its policy names, as their inputs arrive."""

import time
from typing import Protocol

import torch

from megatronapp_trainer.pipeline.planning.policies import Policy
from megatronapp_trainer.pipeline.planning.progress import RankProgress
from megatronapp_trainer.pipeline.planning.tasks import Placement, Task, TaskKind
from megatronapp_trainer.pipeline.step_times import StepTimes
from megatronapp_trainer.pipeline.transport.task_transport import TaskTransport


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


def run_tasks(
    placement: Placement,
    rank: int,
    num_microbatches: int,
    *,
    split: bool,
    policy: Policy,
    passes: Passes,
    transport: TaskTransport,
) -> StepTimes:
    """Run all tasks of a step on this pipeline rank. Returns how long each took on the host.

    Waits only where the policy allows no task that has its input. `split`: weight gradients are tasks of their own.

    Raises:
        PeerLostError: another rank is lost or takes too long.
    """
    progress = RankProgress(placement, rank, num_microbatches, split=split)
    inputs: dict[Task, torch.Tensor] = {}
    times = StepTimes(begun=time.perf_counter())
    transport.begin_step(_received_tasks(placement, rank, num_microbatches))
    while progress.remaining:
        arrived = transport.poll()
        inputs.update(arrived)
        for task in arrived:
            progress.receive(task)
        del arrived  # a tensor's memory is the sender's again once nothing refers to it
        chosen = policy.choose(progress)
        if chosen is None:
            transport.wait()
            continue
        progress.run(chosen)
        passes.announce(chosen, early=policy.early)
        started = time.perf_counter()
        output = _run_task(chosen, inputs.pop(chosen, None), passes)
        times.ended = time.perf_counter()
        times.tasks.append((chosen, times.ended - started))
        target = placement.next_task(rank, chosen)
        if target is not None and target.rank != rank:
            assert output is not None
            transport.send(target, output)
        elif target is not None:
            if target.task.kind is chosen.kind:  # the last stage's backward pass begins from its own loss
                assert output is not None
                inputs[target.task] = output
            progress.receive(target.task)
        del output
    times.transfers = transport.received_seconds()
    return times


def _run_task(task: Task, received: torch.Tensor | None, passes: Passes) -> torch.Tensor | None:
    if task.kind is TaskKind.FORWARD:
        return passes.forward(task, received)
    if task.kind is TaskKind.BACKWARD:
        return passes.backward(task, received)
    passes.weight(task)
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
