"""Steps of MegaDPP's schedules next to megatron-core's, on two GPUs of one host, in alternating blocks of one run.

    python bench/gpu_dpp.py --out gpu_dpp.json
    python bench/gpu_dpp.py --one-gpu --layers 12 --hidden 1024      # both stages on one GPU: correctness, not speed

PP2 with 1, 2 and 3 chunks of the same layers: megatron-core's 1F1B and interleaved schedules over NCCL, the same orders
and ZB-H1 over the native transport, and `auto`. In each block all of them take turns, undisturbed, with rank 0's passes
1.3 times as long (a busy kernel after each), and with one transfer in twenty late by up to three forward passes (a
busy kernel before its copy; over NCCL before all transfers that one call starts). A step is all passes and the
reduction of the gradients, from a meeting of both hosts to the later device's end, without the optimizer. `auto` has
chosen its plan in steps under the same disturbance before. `predicted_ms` is the simulation's; medians over the blocks.
"""

import argparse
import contextlib
import dataclasses
import itertools
import json
import pathlib
import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from gpu_layouts import Samples
from gpu_ranks import give_up_after, run_ranks
from plain_megatron import Shape

from megatronapp_common.trace import RecordKind
from megatronapp_trainer.config import TrainerConfig, parse
from megatronapp_trainer.data.microbatches import StepFeed
from megatronapp_trainer.device import Device, prepare_device
from megatronapp_trainer.models.registry import model_family
from megatronapp_trainer.parallel.groups import initialize_groups
from megatronapp_trainer.parallel.transport import PostedTransfers, Transport
from megatronapp_trainer.pipeline.planning.tasks import RankTask
from megatronapp_trainer.scan.stall import DeviceStall
from megatronapp_trainer.training.build import TrainingRun, build_run, build_schedule, layout_of

RANKS = 2
DISTURBANCES = ("none", "slow", "late")
SLOWER, LATE_FRACTION, LATE_FORWARDS = 0.3, 0.05, 3.0
PASSES = (RecordKind.FORWARD, RecordKind.BACKWARD, RecordKind.WEIGHT)
WARM = 2
CHOOSING = 6
"""Steps until `auto` has chosen: two of warm-up, three measured, and one that begins with the choice."""


@dataclasses.dataclass(frozen=True)
class Variant:
    """A schedule with a number of chunks on each rank; `auto` is another one under each disturbance."""

    name: str
    chunks: int
    flags: str
    disturbance: str | None = None
    """The one under which it runs; None: all."""

    @property
    def is_native(self) -> bool:
        """Return whether tensors go over the native transport."""
        return "--use-dpp" in self.flags


def variants(chunks: list[int], disturbances: list[str], *, nccl: bool) -> list[Variant]:
    """Return what is measured."""
    found = []
    for count in chunks:
        order = "1F1B" if count == 1 else f"interleaved {count}"
        if nccl:
            found.append(Variant(f"{order}, NCCL", count, ""))
        found.append(Variant(f"{order}, native", count, "--use-dpp --dpp-schedule static"))
        if count == 1:
            found.append(Variant("ZB-H1, native", count, "--use-dpp --dpp-schedule zero-bubble"))
        found += [Variant(f"auto {count}", count, "--use-dpp", disturbance) for disturbance in disturbances]
    return found


def arguments(options: argparse.Namespace, variant: Variant) -> list[str]:
    """Return the trainer's command line."""
    values: dict[str, Any] = {
        "--num-layers": options.layers,
        "--hidden-size": options.hidden,
        "--num-attention-heads": options.heads,
        "--seq-length": options.sequence,
        "--vocab-size": options.vocabulary,
        "--micro-batch-size": 1,
        "--global-batch-size": max(options.microbatches),
        "--train-iters": 1000,
        "--lr": 1e-4,
        "--attention-dropout": 0.0,
        "--hidden-dropout": 0.0,
        "--eval-iters": 0,
        "--pipeline-model-parallel-size": RANKS,
    }
    if variant.chunks > 1:
        values["--num-virtual-stages-per-pipeline-rank"] = variant.chunks
    if options.one_gpu:
        values |= {"--ranks-per-gpu": RANKS, "--distributed-backend": "gloo"}
    flags = [str(part) for flag in values.items() for part in flag]
    return [*flags, "--mock-data", "--bf16", "--untie-embeddings-and-output-weights", *variant.flags.split()]


class Disturber:
    """A `StepObserver` that measures passes, and makes those of one rank longer."""

    def __init__(self, stall: DeviceStall, rank: int) -> None:
        self.transfers = IgnoredTransfers()
        self.disturbance = "none"
        self.draw = random.Random(0)
        self.measures = False
        self.usual_s: dict[tuple[RecordKind, int], float] = {}
        self._stall = stall
        self._rank = rank
        self._events: list[tuple[tuple[RecordKind, int], Any, Any]] = []
        self._side = torch.cuda.Stream()  # type: ignore[no-untyped-call] # torch's own gap
        self._open: tuple[tuple[RecordKind, int], Any] | None = None

    def begin(self, kind: RecordKind, chunk: int, microbatch: int, *, early: bool = False) -> None:
        """Begin a pass, and its measurement if there is one."""
        if kind in PASSES:
            self._open = (kind, chunk), _recorded_event() if self.measures else None

    def end(self, kind: RecordKind) -> None:
        """End a span: a slow rank's device stays busy for a share of its usual length."""
        if kind not in PASSES:
            return
        assert self._open is not None
        key, begun = self._open
        if self.measures:
            self._events.append((key, begun, _recorded_event()))
        if self.disturbance == "slow" and self._rank == 0:
            self._stall(round(1e9 * SLOWER * self.usual_s[key]))

    def learn(self) -> None:
        """Take the median length of each pass of the measured steps."""
        torch.cuda.synchronize()
        lengths = defaultdict(list)
        for key, begun, ended in self._events:
            lengths[key].append(1e-3 * begun.elapsed_time(ended))
        self.usual_s = {key: statistics.median(values) for key, values in lengths.items()}
        self._events, self.measures = [], False

    @contextlib.contextmanager
    def transfer(self, tensor: torch.Tensor | None, unit_s: float) -> Iterator[None]:
        """Within the context a transfer of the tensor begins, which may be late."""
        late = self.disturbance == "late" and tensor is not None and self.draw.random() < LATE_FRACTION
        if tensor is None or not late:
            yield
            return
        current = torch.cuda.current_stream()
        self._side.wait_stream(current)
        with torch.cuda.stream(self._side):
            self._stall(round(1e9 * LATE_FORWARDS * self.draw.random() * unit_s))
            yield
        tensor.record_stream(self._side)

    def wrap_transport(self, transport: Transport) -> Transport:
        """Return a transport over NCCL whose transfers may be late."""
        return LatePosts(transport, self)

    def step_begin(self, _step: int) -> None:
        """Ignore the event, which no figure needs."""

    def step_end(self, _metrics: object) -> None:
        """Ignore the event, which no figure needs."""

    def validation(self, _loss: float) -> None:
        """Ignore the event, which no figure needs."""

    def close(self) -> None:
        """Ignore the event, which no figure needs."""


UNIT_S = {"forward": 0.0}
"""Length of the forward pass of a stage with one chunk, by which transfers are late."""


class LatePosts:
    """megatron-core's transfers; all that a late call starts begin later."""

    def __init__(self, transport: Transport, disturber: Disturber) -> None:
        self._transport = transport
        self._disturber = disturber

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - of the transport
        return getattr(self._transport, name)

    def post(self, **transfers: Any) -> PostedTransfers:  # noqa: ANN401 - of the transport
        sent = transfers["send_next"] if transfers["send_next"] is not None else transfers["send_prev"]
        with self._disturber.transfer(sent, UNIT_S["forward"]):
            return self._transport.post(**transfers)


class LateSends:
    """The native transport; a late message begins later."""

    def __init__(self, transport: Any, disturber: Disturber) -> None:  # noqa: ANN401 - of the schedule
        self._transport = transport
        self._disturber = disturber

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - of the transport
        return getattr(self._transport, name)

    def send(self, target: RankTask, tensor: torch.Tensor) -> None:
        with self._disturber.transfer(tensor, UNIT_S["forward"]):
            self._transport.send(target, tensor)


class IgnoredTransfers:
    """A `TransferObserver` that records nothing."""

    def sending(self, *_transfer: object) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def waiting(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def withholds(self, _source: int) -> bool:
        return False

    def release_ns(self, copy: Any) -> int:  # noqa: ANN401 - ObservedCopy
        return int(copy.end_ns)

    def arrived(self, *_message: object) -> None:
        return None

    def part_arrived(self, *_message: object) -> None:
        return None

    def take(self, _target: object) -> None:
        return None


def _recorded_event() -> Any:  # noqa: ANN401 - torch leaves its events untyped
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


@dataclasses.dataclass
class Subject:
    """A variant that is ready to run."""

    variant: Variant
    run: TrainingRun
    schedule: Any
    disturber: Disturber
    plans: list[Any] = dataclasses.field(default_factory=list)

    def step(self, samples: Samples, count: int, disturbance: str, seed: str) -> dict[str, float]:
        """Run one step; returns begin and end in host seconds, and the memory beyond what was allocated before."""
        from megatron.core import parallel_state

        chunks = self.variant.chunks
        parallel_state.set_virtual_pipeline_model_parallel_world_size(chunks if chunks > 1 else None)
        self.disturber.disturbance, self.disturber.draw = disturbance, random.Random(seed)
        for chunk in self.run.state.chunks:
            chunk.zero_grad_buffer()
        source = model_family(self.run.config).batch_source(self.run.config, self.run.layout, self.run.device)
        feed = StepFeed(source, samples.batches(1, 0), count, observer=None)
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        begun = time.perf_counter()
        self.schedule.train(feed, count)
        torch.cuda.synchronize()
        ended = time.perf_counter()
        return {"begun": begun, "ended": ended, "bytes": torch.cuda.max_memory_allocated() - before}


def build(options: argparse.Namespace, device: Device) -> list[Subject]:
    """Build all variants: a model for megatron-core's schedule and one for ours with each number of chunks."""
    from megatron.core import parallel_state

    from megatronapp_trainer.pipeline import dynamic

    stall = DeviceStall()
    stall.calibrate()
    models: dict[tuple[int, bool], tuple[TrainingRun, Disturber]] = {}
    subjects = []
    patched: Any = dynamic
    connect: Callable[..., Any] = patched._connect
    for variant in variants(options.chunks, options.disturbances, nccl=not options.one_gpu):
        config = parse(arguments(options, variant))
        layout = layout_of(config)
        chunks = variant.chunks
        parallel_state.set_virtual_pipeline_model_parallel_world_size(chunks if chunks > 1 else None)
        key = (chunks, variant.is_native)
        if key not in models:
            run = build_run(config, layout, device, vocab_size=options.vocabulary)
            models[key] = run, Disturber(stall, layout.rank)
        run, disturber = models[key]
        run = dataclasses.replace(run, config=config)
        patched._connect = lambda *parts, disturber=disturber: LateSends(connect(*parts), disturber)
        plans: list[Any] = []
        schedule = build_schedule(run, disturber, publish_plan=plans.append)
        subjects.append(Subject(variant, run, schedule, disturber, plans))
    return subjects


def warm_up(options: argparse.Namespace, subjects: list[Subject], samples: Samples) -> None:
    """Measure lengths undisturbed, and let `auto` choose its plans under its disturbance."""
    most = max(options.microbatches)
    for subject in subjects:
        for _ in range(WARM):
            subject.step(samples, most, "none", "warm")
        if not subject.disturber.usual_s:
            subject.disturber.measures = True
            subject.step(samples, most, "none", "warm")
            subject.disturber.learn()
            if subject.variant.chunks == min(options.chunks):
                UNIT_S["forward"] = subject.variant.chunks * subject.disturber.usual_s[RecordKind.FORWARD, 0]
    unit = [UNIT_S["forward"]]
    dist.broadcast_object_list(unit, src=0)
    UNIT_S["forward"] = unit[0]
    for subject in subjects:
        if subject.variant.disturbance is None:
            continue
        for count in (most, *options.microbatches):
            for step in range(CHOOSING):
                subject.step(samples, count, subject.variant.disturbance, f"choose {step} {dist.get_rank()}")


def measure(options: argparse.Namespace, subjects: list[Subject], samples: Samples) -> list[dict[str, Any]]:
    """Run the blocks until the time is over. Returns a record for each step."""
    ends = time.monotonic() + options.seconds
    records: list[dict[str, Any]] = []
    for block in range(options.blocks):
        for count, disturbance in itertools.product(options.microbatches, options.disturbances):
            running = [subject for subject in subjects if subject.variant.disturbance in {None, disturbance}]
            running = running[block % len(running) :] + running[: block % len(running)]
            for subject in running:
                seed = f"{block} {count} {subject.variant.chunks} {dist.get_rank()}"
                times = subject.step(samples, count, disturbance, seed)
                key = {"schedule": subject.variant.name, "microbatches": count, "disturbance": disturbance}
                records.append({**key, "block": block, **times})
        over = [time.monotonic() > ends]
        dist.broadcast_object_list(over, src=0)
        if over[0]:
            break
    return records


def predictions(subjects: list[Subject]) -> dict[str, float]:
    """Return simulated milliseconds by schedule, microbatches and disturbance; static orders from `auto`'s times."""
    found = {}
    for subject in subjects:
        for plan in subject.plans:
            if not plan.is_chosen:
                continue
            chunks = subject.variant.chunks
            order = "1F1B" if chunks == 1 else f"interleaved {chunks}"
            where = f"{plan.microbatches} {subject.variant.disturbance}"
            found[f"{subject.variant.name} {where}"] = 1e3 * plan.simulated_seconds
            found[f"{order}, native {where}"] = 1e3 * plan.static_seconds
            found[f"plan of {subject.variant.name} {where}"] = plan.plan
    return found


def table(gathered: list[list[dict[str, Any]]], predicted: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a row for each schedule, number of microbatches and disturbance."""
    steps = defaultdict(list)
    for both in zip(*gathered, strict=True):
        seconds = max(record["ended"] for record in both) - min(record["begun"] for record in both)
        key = (both[0]["microbatches"], both[0]["disturbance"], both[0]["schedule"])
        steps[key].append((1e3 * seconds, max(record["bytes"] for record in both)))
    rows = []
    for (count, disturbance, schedule), values in sorted(steps.items()):
        where = f"{schedule} {count} {disturbance}"
        rows.append(
            {
                "microbatches": count,
                "disturbance": disturbance,
                "schedule": schedule,
                "ms": round(statistics.median(ms for ms, _ in values), 2),
                "blocks": len(values),
                "MiB": round(max(size for _, size in values) / 2**20),
                "predicted_ms": None if where not in predicted else round(predicted[where], 2),
                "plan": predicted.get(f"plan of {where}"),
            }
        )
    for row in rows:
        same = [other for other in rows if all(other[name] == row[name] for name in ("microbatches", "disturbance"))]
        for name, ending in (("over_best_nccl", "NCCL"), ("over_best_native_order", "native")):
            best = min((other["ms"] for other in same if other["schedule"].endswith(ending)), default=None)
            row[name] = None if best is None else round(best / row["ms"], 3)
    return rows


def work(options: argparse.Namespace) -> None:
    """Run all measurements on one rank; the first one prints the rows."""
    give_up_after(options.seconds + 400)
    config: TrainerConfig = parse(arguments(options, Variant("groups", 1, "")))
    layout = layout_of(config)
    device = prepare_device(layout.local_rank, config.parallel.ranks_per_gpu)
    initialize_groups(config, layout, device)
    shape = Shape(
        layers=options.layers, hidden=options.hidden, sequence=options.sequence, vocabulary=options.vocabulary
    )
    samples = Samples(shape)
    subjects = build(options, device)
    warm_up(options, subjects, samples)
    records = measure(options, subjects, samples)
    gathered: list[Any] = [None] * RANKS
    dist.all_gather_object(gathered, records)
    predicted = {} if options.one_gpu else predictions(subjects)  # the ranks take each other's time on one device
    for subject in subjects:
        subject.schedule.close()
    if layout.rank == 0:
        rows = table(gathered, predicted)
        for row in rows:
            print(json.dumps(row), flush=True)
        notes = {"device": device.name, "torch": torch.__version__, "one_gpu": options.one_gpu, "rows": rows}
        options.out.write_text(json.dumps(notes, indent=1), encoding="utf-8")


def numbers(text: str) -> list[int]:
    """Return the numbers of a list with commas."""
    return [int(part) for part in text.split(",")]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in {"layers": 24, "hidden": 2048, "heads": 16, "sequence": 2048, "vocabulary": 32768}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--microbatches", type=numbers, default=[4, 8, 16])
    parser.add_argument("--chunks", type=numbers, default=[1, 2, 3])
    parser.add_argument("--disturbances", type=lambda text: text.split(","), default=list(DISTURBANCES))
    parser.add_argument("--blocks", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=240.0, help="no block begins later")
    parser.add_argument("--one-gpu", action="store_true", help="both ranks on one GPU, without NCCL")
    parser.add_argument("--rank-of-bench", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("gpu_dpp.json"))
    options = parser.parse_args()
    if options.rank_of_bench:
        work(options)
        return 0
    found = torch.cuda.device_count()
    if found < (1 if options.one_gpu else RANKS):
        print(f"skipped: {found} GPUs; two are needed, or one with --one-gpu")
        return 0
    if options.one_gpu:
        print("NCCL rows skipped: NCCL does not let two ranks share a GPU", flush=True)
        print(
            "no predictions: tasks of ranks that share a GPU take turns, and times show an order of magnitude",
            flush=True,
        )
    run_ranks([*sys.argv, "--rank-of-bench"], RANKS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
