"""Steps of MegaDPP's schedules next to megatron-core's on CPU ranks, in alternating blocks of one run.

    python bench/bench_dpp.py [--blocks 5] [--steps 4]

Each pass lasts for a fixed time: the rank computes a tiny model and sleeps for the rest, as a host does while
a device computes. So four ranks need no four processors, and orders are compared, not machines. F, B and W of a stage
take 20 ms each, a whole backward pass 40; with chunks each its part. All variants take turns in each block:
undisturbed, with the passes of one stage 1.3 times as long, and with one message in twenty withheld by up to three
forward passes (over the native transport alone). A step is the time from the first pass to the last one of any rank,
without the optimizer; medians. `predicted` is the product's simulator with the same times, the mean of 20 draws where
messages are late.
"""

import argparse
import contextlib
import dataclasses
import functools
import pathlib
import random
import statistics
import sys
import tempfile
import time
import warnings
from collections import defaultdict
from typing import Any

from bench_layouts import fork_server

MICROBATCHES, WARM, PASS_S = 8, 7, 20e-3
SLOWER, LATE_FRACTION, LATE_FORWARDS = 1.3, 0.05, 3.0
MODEL = (
    "--num-layers 4 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --micro-batch-size 1 --train-iters 1000 "
    f"--global-batch-size {MICROBATCHES} --lr 1e-3 --mock-data --vocab-size 64 --attention-dropout 0 "
    "--hidden-dropout 0 --eval-iters 0"
)
LAYOUTS = {"PP2": (2, 1), "PP2, 2 chunks": (2, 2), "PP4": (4, 1)}
DISTURBANCES = ("none", "slow stage", "late messages")
SCHEDULES = {
    "megatron-core, gloo": "",
    "static": "--use-dpp --dpp-schedule static",
    "zero-bubble": "--use-dpp --dpp-schedule zero-bubble",
    "auto": "--use-dpp",
}
Figure = tuple[str, str, float, float]
"""Schedule, disturbance, measured and predicted seconds of a step."""


@dataclasses.dataclass
class PacedPasses:
    """A `StepObserver` that lets passes last for their time, withholds messages, and notes begin and end of steps."""

    rank: int
    seconds: dict[int, float]
    """By kind of pass."""
    late: bool
    transfers: Any = None
    collectives: None = None
    begun_ns: int = 0
    ended_ns: int = 0

    def __post_init__(self) -> None:
        self.transfers = self
        self._draw = random.Random(self.rank)
        self._open_ns = 0

    def begin(self, kind: int, chunk: int, microbatch: int, *, early: bool = False) -> None:
        """Note when a pass begins."""
        if kind in self.seconds:
            self._open_ns = time.monotonic_ns()
            self.begun_ns = self.begun_ns or self._open_ns

    def end(self, kind: int) -> None:
        """End a pass when its time is over."""
        if kind in self.seconds:
            left_s = self.seconds[kind] - 1e-9 * (time.monotonic_ns() - self._open_ns)
            time.sleep(max(left_s, 0.0))
            self.ended_ns = time.monotonic_ns()

    def withholds(self, _source: int) -> bool:
        return self.late

    def release_ns(self, copy: Any) -> int:  # noqa: ANN401 - ObservedCopy
        return int(copy.end_ns + 1e9 * (late_seconds(self._draw) if self.late else 0.0))

    def announcement(self) -> tuple[float, ...]:
        return ()

    def agreed(self, _sums: object) -> None:
        return None

    def wrap_transport(self, transport: Any) -> Any:  # noqa: ANN401 - Transport
        return transport

    def sending(self, *_transfer: object) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def waiting(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def arrived(self, *_message: object) -> None:
        """Ignore the event, which no figure needs, as those below."""

    def step_begin(self, _step: int) -> None:
        self.begun_ns = 0

    def step_end(self, _metrics: object) -> None:
        return None

    def validation(self, _loss: float) -> None:
        return None

    def heartbeat(self) -> None:
        return None

    def close(self) -> None:
        return None


def late_seconds(draw: random.Random) -> float:
    """Return how late a message is."""
    return LATE_FORWARDS * PASS_S * draw.random() if draw.random() < LATE_FRACTION else 0.0


@dataclasses.dataclass
class PacedSchedule:
    """A schedule under a disturbance, ready to run."""

    schedule_name: str
    disturbance: str
    trainer: Any
    schedule: Any
    observer: PacedPasses
    seconds: list[float] = dataclasses.field(default_factory=list)

    def step(self) -> float:
        """Run one step. Returns its seconds over all ranks; collective."""
        import torch
        import torch.distributed as dist

        dist.barrier()
        self.trainer.step()
        ends = torch.tensor([-self.observer.begun_ns, self.observer.ended_ns])
        dist.all_reduce(ends, op=dist.ReduceOp.MAX)
        return 1e-9 * int(ends.sum())


def build(name: str, disturbance: str, pipeline: int, chunks: int) -> PacedSchedule:
    """Build a schedule, its model and its observer."""
    from megatronapp_common.trace import RecordKind
    from megatronapp_trainer.config import parse
    from megatronapp_trainer.device import prepare_device
    from megatronapp_trainer.parallel.groups import initialize_groups
    from megatronapp_trainer.training.build import build_iterators, build_run, build_schedule, layout_of, vocab_size_of
    from megatronapp_trainer.training.loop import Trainer
    from megatronapp_trainer.training.signals import StopRequest

    flags = f"{MODEL} --pipeline-model-parallel-size {pipeline} {SCHEDULES[name]}"
    config = parse([*flags.split(), *(["--num-virtual-stages-per-pipeline-rank", str(chunks)] if chunks > 1 else [])])
    layout = layout_of(config)
    device = prepare_device(layout.local_rank)
    if not _is_initialized():
        initialize_groups(config, layout, device)
    run = build_run(config, layout, device, vocab_size=vocab_size_of(config))
    pace = PASS_S / chunks * (SLOWER if disturbance == "slow stage" and layout.rank == 0 else 1.0)
    split = name in {"auto", "zero-bubble"}
    seconds = {RecordKind.FORWARD: pace, RecordKind.BACKWARD: pace * (1 if split else 2), RecordKind.WEIGHT: pace}
    observer: Any = PacedPasses(
        layout.rank, {int(kind): value for kind, value in seconds.items()}, "late" in disturbance
    )
    schedule = build_schedule(run, observer)
    trainer = Trainer(run, build_iterators(config, layout, 0), schedule, stop_request=StopRequest(), observer=observer)
    return PacedSchedule(name, disturbance, trainer, schedule, observer)


def _is_initialized() -> bool:
    import torch.distributed as dist

    return dist.is_initialized()


def predicted(subject: PacedSchedule, pipeline: int, chunks: int) -> float:
    """Return the simulated seconds of a step; those of plain static orders are the same as megatron-core's."""
    from megatronapp_trainer.pipeline.planning.orders import interleaved
    from megatronapp_trainer.pipeline.planning.policies import Static
    from megatronapp_trainer.pipeline.planning.simulator import simulate
    from megatronapp_trainer.pipeline.planning.tasks import Placement, Task, TaskKind

    placement, late = Placement(pipeline, chunks), "late" in subject.disturbance
    split = subject.schedule_name in {"auto", "zero-bubble"}
    draw = random.Random(0)

    def task_seconds(rank: int, task: Task) -> float:
        whole = 2 if task.kind is TaskKind.BACKWARD and not split else 1
        return PASS_S / chunks * whole * (SLOWER if subject.disturbance == "slow stage" and rank == 0 else 1.0)

    def policies() -> list[Any]:
        if subject.schedule_name.startswith("megatron"):
            return [Static(interleaved(placement, MICROBATCHES, rank)) for rank in range(pipeline)]
        return [subject.schedule._plan.policy(rank, MICROBATCHES) for rank in range(pipeline)]

    steps = [
        simulate(
            placement,
            MICROBATCHES,
            policies(),
            split=split,
            task_seconds=task_seconds,
            transfer_seconds=lambda rank, task: late_seconds(draw) if late else 0.0,
        ).seconds
        for _ in range(20 if late else 1)
    ]
    return statistics.mean(steps)


def measure(pipeline: int, chunks: int, blocks: int, steps: int) -> list[Figure]:
    """Measure all schedules of a layout in turns on this rank; the figures are those of all ranks."""
    warnings.simplefilter("ignore")
    subjects = [
        build(name, disturbance, pipeline, chunks)
        for name in SCHEDULES
        for disturbance in DISTURBANCES
        if not (chunks > 1 and name == "zero-bubble") and not ("late" in disturbance and name.startswith("megatron"))
    ]
    for subject in subjects:
        for _ in range(WARM):
            subject.step()
    for _ in range(blocks):
        for subject in subjects:
            subject.seconds += [subject.step() for _ in range(steps)]
    figures = [
        (each.schedule_name, each.disturbance, statistics.median(each.seconds), predicted(each, pipeline, chunks))
        for each in subjects
    ]
    for subject in subjects:
        subject.schedule.close()
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--blocks", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4)
    options = parser.parse_args()
    print("| layout | disturbance | schedule | ms | against static | predicted ms | measured / predicted |")
    print("|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        server = fork_server(pathlib.Path(directory))
        stack.callback(server.stop)
        run = functools.partial(server.run, timeout_s=1200)
        for layout, (pipeline, chunks) in LAYOUTS.items():
            figures = run(pipeline, measure, pipeline, chunks, options.blocks, options.steps)[0]
            static = {disturbance: seconds for name, disturbance, seconds, _ in figures if name == "static"}
            rows = defaultdict(list)
            for name, disturbance, seconds, simulated in figures:
                against = seconds / static[disturbance]
                rows[disturbance].append(
                    f"| {layout} | {disturbance} | {name} | {1e3 * seconds:.0f} | {against:.2f} "
                    f"| {1e3 * simulated:.0f} | {seconds / simulated:.2f} |"
                )
            for disturbance in DISTURBANCES:
                print("\n".join(rows[disturbance]), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
