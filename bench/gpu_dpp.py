"""Steps of MegaDPP's schedules next to megatron-core's, on the GPUs of one host, in alternating blocks of one run.

    . bench/gpu_setup.sh; python3 bench/gpu_dpp.py --out gpu_dpp.json                          # PP2: two GPUs
    python3 bench/gpu_dpp.py --pipeline 4 --microbatches 8,16 --out gpu_dpp_pp4.json           # PP4: four GPUs
    python3 bench/gpu_dpp.py --tensor 2 --microbatches 8,16 --chunks 1,2 --out gpu_dpp_tp2.json   # TP2 x PP2: four
    python3 bench/gpu_dpp.py --one-gpu --layers 12 --hidden 1024    # both stages on one GPU: correctness, not speed
    python bench/gpu_dpp.py --cpu --tiny                            # whether it runs, on CPU ranks over gloo

Order of runs where device time is short: `tests/gpu/test_dpp.py` (2 minutes), `gpu_transport.py` (1.5), then this
script: some 60 s for the start, 90 s until `auto` has chosen its plans, and the time of --seconds (estimates; with PP2
a block of all variants takes some 20 s). The file has the rows of all finished blocks after each block.

1, 2 and 3 chunks of the same layers: megatron-core's 1F1B and interleaved schedules over NCCL, the same orders, ZB-H1
and (2 chunks) ZB-V over the native transport, and `auto`, with 2 chunks also in a vee (`auto V`). In each block all of
them take turns, undisturbed, with the first stage's passes 1.3 times as long (a busy kernel after each), and with one
transfer in twenty late by up to three forward passes (a busy kernel before its copy; over NCCL before all transfers
that one call starts). A step is all passes and the reduction of the gradients, from a meeting of all hosts to the last
device's end, without the optimizer.
`auto` has chosen its plan in steps under the same disturbance before. `predicted_ms` is the simulation's, and
`over_predicted` the measurement over it; `own_work_ms` is the slow stage's own passes,
`most_work_ms` those of the rank with the longest ones where no stage is slow: no order can undercut them. `MiB` is the
memory of torch beyond that before the step, without the transport's inboxes. Medians over the blocks.
"""

import argparse
import dataclasses
import itertools
import json
import os
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
from bench_device import BenchDevice
from gpu_dpp_disturber import SLOWER, UNIT_S, Disturber, LateSends
from gpu_layouts import Samples
from gpu_ranks import give_up_after, run_ranks
from plain_megatron import Shape

from megatronapp_common.trace import RecordKind
from megatronapp_trainer.config import TrainerConfig, parse
from megatronapp_trainer.data.microbatches import StepFeed
from megatronapp_trainer.device import Device, prepare_device
from megatronapp_trainer.launch.ranks.connections import CONNECTIONS, device_connections
from megatronapp_trainer.models.registry import model_family
from megatronapp_trainer.parallel.groups import initialize_groups
from megatronapp_trainer.scan.stall import DeviceStall, host_stall
from megatronapp_trainer.training.build import TrainingRun, build_run, build_schedule, layout_of

DISTURBANCES = ("none", "slow", "late")
WARM = 2
MEASURING, CHOOSING = 5, 9
"""Steps before `auto` chooses a plan, and until it has measured it against the order that is never left."""


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
        if count == 2:
            found.append(Variant("ZB-V, native", count, "--use-dpp --dpp-schedule zero-bubble"))
        found += [Variant(f"auto {count}", count, "--use-dpp", disturbance) for disturbance in disturbances]
        if count == 2:
            vee = "--use-dpp --dpp-placement vee"
            found += [Variant("auto V", count, vee, disturbance) for disturbance in disturbances]
    return found


def arguments(options: argparse.Namespace, variant: Variant) -> list[str]:
    """Return the trainer's command line."""
    values: dict[str, Any] = {
        "--num-layers": options.layers,
        "--hidden-size": options.hidden,
        "--num-attention-heads": options.heads,
        "--seq-length": options.sequence,
        "--vocab-size": options.vocabulary,
        "--micro-batch-size": options.micro_batch,
        "--global-batch-size": options.micro_batch * max(options.microbatches),
        "--train-iters": 1000,
        "--lr": 1e-4,
        "--attention-dropout": 0.0,
        "--hidden-dropout": 0.0,
        "--eval-iters": 0,
        "--pipeline-model-parallel-size": options.pipeline,
        "--tensor-model-parallel-size": options.tensor,
    }
    if variant.chunks > 1:
        values["--num-virtual-stages-per-pipeline-rank"] = variant.chunks
    if options.one_gpu:
        values |= {"--ranks-per-gpu": options.pipeline, "--distributed-backend": "gloo"}
    flags = [str(part) for flag in values.items() for part in flag]
    if options.tensor > 1:
        flags.append("--sequence-parallel")
    return [*flags, "--mock-data", "--bf16", "--untie-embeddings-and-output-weights", *variant.flags.split()]


@dataclasses.dataclass
class Subject:
    """A variant that is ready to run."""

    variant: Variant
    run: TrainingRun
    schedule: Any
    disturber: Disturber
    device: BenchDevice
    plans: list[Any] = dataclasses.field(default_factory=list)
    usual_s: dict[Any, float] = dataclasses.field(default_factory=dict)
    """Usual length of each kind of pass of a chunk; backward passes with and without W differ."""

    def step(self, samples: Samples, count: int, disturbance: str, seed: str) -> dict[str, float]:
        """Run one step; returns begin and end in host seconds, and the memory beyond what was allocated before."""
        from megatron.core import parallel_state

        chunks = self.variant.chunks
        parallel_state.set_virtual_pipeline_model_parallel_world_size(chunks if chunks > 1 else None)
        self.disturber.disturbance, self.disturber.draw = disturbance, random.Random(seed)
        self.disturber.usual_s = self.usual_s
        for chunk in self.run.state.chunks:
            chunk.zero_grad_buffer()
        source = model_family(self.run.config).batch_source(self.run.config, self.run.layout, self.run.device)
        feed = StepFeed(source, samples.batches(1, 0), count, observer=None)
        self.device.synchronize()
        dist.barrier()
        self.device.reset_peak()
        before, begun = self.device.allocated(), time.perf_counter()
        self.schedule.train(feed, count)
        self.device.synchronize()
        return {"begun": begun, "ended": time.perf_counter(), "bytes": self.device.peak() - before}

    def learn(self, samples: Samples, count: int) -> None:
        """Measure the passes of an undisturbed step."""
        self.disturber.measures = True
        self.step(samples, count, "none", "warm")
        self.disturber.learn()
        self.usual_s = self.disturber.usual_s


def build(options: argparse.Namespace, device: Device) -> list[Subject]:
    """Build all variants; those with the same chunks and placement share a model, but for megatron-core's schedule."""
    from megatron.core import parallel_state

    from megatronapp_trainer.pipeline import dynamic

    install_stores_once()
    bench_device = BenchDevice(device.torch_device)
    stall = stall_of(bench_device)
    models: dict[tuple[int, bool, bool], tuple[TrainingRun, Disturber]] = {}
    subjects = []
    patched: Any = dynamic
    connect: Callable[..., Any] = patched._connect
    for variant in variants(options.chunks, options.disturbances, nccl=not options.one_gpu):
        config = parse(arguments(options, variant))
        layout = layout_of(config)
        chunks = variant.chunks
        parallel_state.set_virtual_pipeline_model_parallel_world_size(chunks if chunks > 1 else None)
        key = (chunks, variant.is_native, layout.is_vee)
        if key not in models:
            run = build_run(config, layout, device, vocab_size=options.vocabulary)
            models[key] = run, Disturber(bench_device, stall, layout.pipeline_rank)
        run, disturber = models[key]
        run = dataclasses.replace(run, config=config)
        patched._connect = lambda *parts, disturber=disturber: LateSends(connect(*parts), disturber)
        plans: list[Any] = []
        schedule = build_schedule(run, disturber, publish_plan=plans.append)
        subjects.append(Subject(variant, run, schedule, disturber, bench_device, plans))
    return subjects


def install_stores_once() -> None:
    """Let the schedules of a model share its stores of weight gradients, which a second installation would replace."""
    from megatronapp_trainer.pipeline import task_passes

    patched: Any = task_passes
    install: Callable[..., Any] = patched.install_split_backward
    stores: dict[int, Any] = {}

    def install_once(chunks: list[Any]) -> Any:  # noqa: ANN401 - stores
        key = id(chunks[0])
        if key not in stores:
            stores[key] = install(chunks)
        return stores[key]

    patched.install_split_backward = install_once


def stall_of(device: BenchDevice) -> Callable[[int], None]:
    """Return a function that keeps the device busy for some nanoseconds; a CPU rank sleeps."""
    if not device.is_cuda:
        return host_stall
    stall = DeviceStall()
    stall.calibrate()
    return stall


def warm_up(options: argparse.Namespace, subjects: list[Subject], samples: Samples) -> None:
    """Measure lengths undisturbed, and let `auto` choose its plans under its disturbance."""
    most = max(options.microbatches)
    for subject in subjects:
        for _ in range(WARM):
            subject.step(samples, most, "none", "warm")
        subject.learn(samples, most)
        if subject.variant.chunks == min(options.chunks) and UNIT_S["forward"] == 0.0:
            UNIT_S["forward"] = subject.variant.chunks * subject.usual_s[RecordKind.FORWARD, 0]
    unit = [UNIT_S["forward"]]
    dist.broadcast_object_list(unit, src=0)
    UNIT_S["forward"] = unit[0]
    for subject in subjects:
        if subject.variant.disturbance is None:
            continue
        for step in range(MEASURING):
            subject.step(samples, most, subject.variant.disturbance, f"measure {step} {dist.get_rank()}")
        for count in options.microbatches:
            for step in range(CHOOSING):
                subject.step(samples, count, subject.variant.disturbance, f"choose {step} {dist.get_rank()}")


def measure(options: argparse.Namespace, subjects: list[Subject], samples: Samples) -> Iterator[list[dict[str, Any]]]:
    """Run the blocks until the time is over. Yields the records of each block: one for each step."""
    ends = time.monotonic() + options.seconds
    for block in range(options.blocks):
        records: list[dict[str, Any]] = []
        for count, disturbance in itertools.product(options.microbatches, options.disturbances):
            running = [subject for subject in subjects if subject.variant.disturbance in {None, disturbance}]
            running = running[block % len(running) :] + running[: block % len(running)]
            for subject in running:
                seed = f"{block} {count} {subject.variant.chunks} {dist.get_rank()}"
                times = subject.step(samples, count, disturbance, seed)
                key = {"schedule": subject.variant.name, "microbatches": count, "disturbance": disturbance}
                records.append({**key, "block": block, **times})
        yield records
        over = [time.monotonic() > ends]
        dist.broadcast_object_list(over, src=0)
        if over[0]:
            return


def predictions(subjects: list[Subject]) -> dict[str, float]:
    """Return simulated milliseconds by schedule, microbatches and disturbance; static orders from `auto`'s times."""
    found = {}
    for subject in subjects:
        for plan in subject.plans:
            if not plan.is_chosen:
                continue
            chunks = subject.variant.chunks
            order = "1F1B" if chunks == 1 else f"interleaved {chunks}"
            if "vee" in subject.variant.flags:
                order = "ZB-V"
            where = f"{plan.microbatches} {subject.variant.disturbance}"
            found[f"{subject.variant.name} {where}"] = 1e3 * plan.simulated_seconds
            found[f"{order}, native {where}"] = 1e3 * plan.static_seconds
            found[f"plan of {subject.variant.name} {where}"] = plan.plan
    return found


def table(
    gathered: list[list[dict[str, Any]]], predicted: dict[str, Any], own_s: list[dict[str, float]]
) -> list[dict[str, Any]]:
    """Return a row for each schedule, number of microbatches and disturbance.

    `own_s`: by rank and schedule, the length of its undisturbed passes of a microbatch.
    """
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
        if row["predicted_ms"]:
            row["over_predicted"] = round(row["ms"] / row["predicted_ms"], 3)
        if row["disturbance"] == "slow":
            row["own_work_ms"] = round(1e3 * (1 + SLOWER) * row["microbatches"] * own_s[0][row["schedule"]], 2)
            row["over_own_work"] = round(row["ms"] / row["own_work_ms"], 3)
        else:
            most = max(seconds[row["schedule"]] for seconds in own_s)
            row["most_work_ms"] = round(1e3 * row["microbatches"] * most, 2)
            row["over_most_work"] = round(row["ms"] / row["most_work_ms"], 3)
        same = [other for other in rows if all(other[name] == row[name] for name in ("microbatches", "disturbance"))]
        for name, ending in (("over_best_nccl", "NCCL"), ("over_best_native_order", "native")):
            best = min((other["ms"] for other in same if other["schedule"].endswith(ending)), default=None)
            row[name] = None if best is None else round(best / row["ms"], 3)
    return rows


def work(options: argparse.Namespace) -> None:
    """Run all measurements on one rank; the first one writes the rows of all blocks so far."""
    os.environ[CONNECTIONS] = device_connections(["--use-dpp", "--tensor-model-parallel-size", str(options.tensor)])
    give_up_after(options.seconds + 400)
    config: TrainerConfig = parse(arguments(options, Variant("groups", 1, "")))
    layout = layout_of(config)
    device = prepare_device(layout.local_rank, config.parallel.ranks_per_gpu)
    initialize_groups(config, layout, device)
    shape = Shape(
        layers=options.layers,
        hidden=options.hidden,
        sequence=options.sequence,
        vocabulary=options.vocabulary,
        microbatch=options.micro_batch,
    )
    samples = Samples(shape)
    subjects = build(options, device)
    warm_up(options, subjects, samples)
    predicted = {} if options.one_gpu else predictions(subjects)  # the ranks take each other's time on one device
    own_s: list[Any] = [None] * layout.world_size
    dist.all_gather_object(own_s, {subject.variant.name: sum(subject.usual_s.values()) for subject in subjects})
    records: list[list[dict[str, Any]]] = [[] for _ in range(layout.world_size)]
    rows: list[dict[str, Any]] = []
    for block in measure(options, subjects, samples):
        gathered: list[Any] = [None] * layout.world_size
        dist.all_gather_object(gathered, block)
        for known, new in zip(records, gathered, strict=True):
            known.extend(new)
        if layout.rank == 0:
            rows = table(records, predicted, own_s)
            notes = {"device": device.name, "torch": torch.__version__, "arguments": sys.argv[1:], "rows": rows}
            options.out.write_text(json.dumps(notes, indent=1), encoding="utf-8")
            print(f"block {rows[0]['blocks']} of {options.blocks}", file=sys.stderr, flush=True)
    for row in rows:
        print(json.dumps(row), flush=True)
    for subject in subjects:
        subject.schedule.close()


def numbers(text: str) -> list[int]:
    """Return the numbers of a list with commas."""
    return [int(part) for part in text.split(",")]


TINY: dict[str, Any] = {
    "layers": 12,
    "hidden": 32,
    "heads": 4,
    "sequence": 16,
    "vocabulary": 120,
    "microbatches": [4],
    "blocks": 2,
}


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in {"layers": 24, "hidden": 2048, "heads": 16, "sequence": 2048, "vocabulary": 32768}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--microbatches", type=numbers, default=[4, 8, 16])
    parser.add_argument("--micro-batch", type=int, default=1, metavar="N", help="samples of a microbatch (default: 1)")
    parser.add_argument("--chunks", type=numbers, default=[1, 2, 3])
    parser.add_argument("--pipeline", type=int, default=2, metavar="N", help="stages (default: 2)")
    parser.add_argument("--tensor", type=int, default=1, metavar="N", help="ranks of a tensor group (default: 1)")
    parser.add_argument("--disturbances", type=lambda text: text.split(","), default=list(DISTURBANCES))
    parser.add_argument("--blocks", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=240.0, help="no block begins later")
    parser.add_argument("--one-gpu", action="store_true", help="all stages on one GPU, without NCCL")
    parser.add_argument("--cpu", action="store_true", help="CPU ranks, with gloo in the place of NCCL")
    parser.add_argument("--tiny", action="store_true", help="a toy model, and two blocks")
    parser.add_argument("--rank-of-bench", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("gpu_dpp.json"))
    options = parser.parse_args()
    if options.tiny:
        vars(options).update(TINY)
    return options


def main() -> int:
    options = parsed()
    if options.rank_of_bench:
        work(options)
        return 0
    ranks = options.pipeline * options.tensor
    found = torch.cuda.device_count()
    if options.cpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    elif found < (1 if options.one_gpu else ranks):
        print(f"skipped: {found} GPUs; {ranks} are needed, or one with --one-gpu, or none with --cpu")
        return 0
    if options.one_gpu:
        print("NCCL rows skipped: NCCL does not let two ranks share a GPU", flush=True)
        print(
            "no predictions: tasks of ranks that share a GPU take turns, and times show an order of magnitude",
            flush=True,
        )
    run_ranks([*sys.argv, "--rank-of-bench"], ranks)
    return 0


if __name__ == "__main__":
    sys.exit(main())
