"""Trainings on CPU ranks whose passes are replayed in slots, by recorders that compute again."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import late_inputs
import small_training
from recording_reporter import RecordingReporter

LOCAL = "--cuda-graph-impl local"
NONE = "--cuda-graph-impl none"


@dataclasses.dataclass(frozen=True)
class Trained:
    """Figures of a training on a rank."""

    losses: list[float]
    norms: list[float]
    """Both without figures on ranks that do not report."""
    forwards: list[int]
    """Forward passes that were replayed, by step."""
    weights: int
    """Passes of weight gradients that were replayed."""
    slots: tuple[int, ...]
    """Recordings by chunk, after the last step."""


def compare(plain: str, replayed: str, seed: int | None = None) -> tuple[Trained, Trained]:
    """Train without recordings, then again with them, in the same groups; with a seed inputs of the latter are late."""
    expected = train(f"{plain} {NONE}")
    if seed is not None:
        import torch.distributed as dist

        late_inputs.install(seed + dist.get_rank())
    return expected, train(f"{replayed} {LOCAL}")


def train(flags: str, *, before_step: Callable[[Any, int], None] | None = None) -> Trained:
    """Train to the end. `before_step` takes the run and the number of each step before it begins."""
    from megatronapp_trainer.pipeline.graphs import choice, recorders

    choice.recorders_of = lambda device, collectives: recorders.RepeatingRecorders(collectives)
    run = small_training.prepare(flags)
    recorder = RecordingReporter()
    with counting(run, before_step) as counted:
        small_training.trainer_of(run, reporter=recorder).train()
    return Trained(recorder.losses, recorder.grad_norms, counted.forwards, counted.weights, counted.slots)


@dataclasses.dataclass
class ReplayCounts:
    """Numbers of passes that were replayed, and of recordings."""

    forwards: list[int] = dataclasses.field(default_factory=list)
    weights: int = 0
    slots: tuple[int, ...] = ()


@contextlib.contextmanager
def counting(run: Any, before_step: Callable[[Any, int], None] | None) -> Iterator[ReplayCounts]:
    """Count what is replayed in this process within the context."""
    from megatronapp_trainer.pipeline.graphs.graphed_step import GraphedStep, MicrobatchGraph
    from megatronapp_trainer.pipeline.graphs.pass_slot import PassSlot
    from megatronapp_trainer.pipeline.graphs.replayed_passes import ReplayedPasses

    counted = ReplayCounts()
    forward, weights, begin = PassSlot.forward, PassSlot.weights, ReplayedPasses._begin
    whole_forward, whole_train = MicrobatchGraph.forward, GraphedStep.train

    def counting_forward(slot: Any, *arguments: Any) -> Any:
        counted.forwards[-1] += 1
        return forward(slot, *arguments)

    def counting_weights(slot: Any) -> None:
        counted.weights += 1
        weights(slot)

    def counting_begin(passes: Any, *arguments: Any) -> None:
        if before_step is not None:
            before_step(run, len(counted.forwards))
        counted.forwards.append(0)
        begin(passes, *arguments)
        counted.slots = tuple(map(len, passes._slots))

    def counting_whole_forward(graph: Any, batch: Any) -> Any:
        counted.forwards[-1] += 1
        return whole_forward(graph, batch)

    def counting_train(step: Any, *arguments: Any) -> Any:
        counted.forwards.append(0)
        reports = whole_train(step, *arguments)
        counted.slots = (len(step._graphs),)
        return reports

    with (
        mock.patch.object(MicrobatchGraph, "forward", counting_whole_forward),
        mock.patch.object(GraphedStep, "train", counting_train),
        mock.patch.object(PassSlot, "forward", counting_forward),
        mock.patch.object(PassSlot, "weights", counting_weights),
        mock.patch.object(ReplayedPasses, "_begin", counting_begin),
    ):
        yield counted
