"""Cost of tracing on GPUs: the tracer is removed and installed every ten steps, in the order ABBA.

    python bench/gpu_trace_cost.py --seconds 110 --out gpu_trace_cost.json
    python bench/gpu_trace_cost.py --layouts tp2pp2 --seconds 200    # four GPUs
    python bench/gpu_trace_cost.py --read gpu_trace_cost.json        # the table of stored results, without a device
    python bench/gpu_trace_cost.py --trace-flags "--trace-interval 1 --trace-granularity full"    # with layer spans

Two GPUs, CUDA_DEVICE_MAX_CONNECTIONS=1, one layout after the other: tensor parallelism with sequence parallelism, a
pipeline, and data parallelism with overlapped reduction. A GPT with random weights (1.2 billion parameters in bf16)
trains on random tokens. Between blocks of ten steps the trainer is built again: without a tracer (A), or with its ring,
its recorder and that recorder's thread, its timers and its transport (B). Three steps after that are not timed: in the
first ones CUDA graphs are captured. All ranks meet before and after a block, which is timed by rank 0, and its standard
error has the time of each block with and without its preparation.

Blocks are compared within groups of four, ABBA, so that a steady drift cancels out. The control compares A with A in
the same pattern, two groups at a time. Intervals are those of `bench/paired_blocks.py`: Student's t, and for the cost
from 30 groups on a bootstrap of whole groups. Where half of the control's 95 % interval is above 0.1 %, the difference
is not resolved, and the host's time for all spans of a step is given in its place: the measured cost of a span by the
number of records. A control whose interval does not contain zero is marked: something other than chance is in it.

A small model on a CPU shows that the script works:
    python bench/gpu_trace_cost.py --layouts one --layers 2 --hidden 64 --heads 4 --length 64 --batch 4 --seconds 20
"""

import argparse
import dataclasses
import gc
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from paired_blocks import compared

import megatronapp_native as native
from megatronapp_common.names import Env
from megatronapp_trainer import scan
from megatronapp_trainer.config import TrainerConfig, parse
from megatronapp_trainer.device import prepare_device
from megatronapp_trainer.parallel.groups import destroy_groups, initialize_groups
from megatronapp_trainer.pipeline.schedule import PipelineSchedule
from megatronapp_trainer.scan.observer import ScanObserver
from megatronapp_trainer.scan.run_context import RunContext
from megatronapp_trainer.training.build import TrainingRun, build_iterators, build_run, build_schedule, layout_of
from megatronapp_trainer.training.loop import Trainer
from megatronapp_trainer.training.signals import StopRequest

GOAL, BOUND_GOAL = 0.001, 0.002
"""Mean cost of tracing and upper end of its bounds, as parts of a step."""
PREFIX = "trace-cost"
HEADER = "| Layout | Step | Cost of tracing | Control (A against A) | Host, of a step |\n|---|---|---|---|---|"
WARM = 3
"""Steps of a new trainer that are not timed."""


@dataclasses.dataclass(frozen=True, slots=True)
class BenchLayout:
    """A layout: its flags, number of ranks, and samples of a step that make it last about 250 ms."""

    flags: str
    ranks: int
    batch: int


LAYOUTS = {
    "one": BenchLayout("", 1, 8),
    "tp2": BenchLayout("--tensor-model-parallel-size 2 --sequence-parallel", 2, 8),
    "pp2": BenchLayout("--pipeline-model-parallel-size 2", 2, 12),
    "tp2pp2": BenchLayout("--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2", 4, 16),
    "dp2": BenchLayout("--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather", 2, 16),
}


def config_of(options: argparse.Namespace, extra: str) -> TrainerConfig:
    """Return the configuration of the run."""
    layout = LAYOUTS[options.layout]
    text = (
        f"--num-layers {options.layers} --hidden-size {options.hidden} --num-attention-heads {options.heads} "
        f"--seq-length {options.length} --micro-batch-size {options.micro_batch} "
        f"--global-batch-size {options.batch or layout.batch} "
        "--mock-data --vocab-size 32000 --swiglu --normalization RMSNorm --disable-bias-linear --lr 1e-4 "
        "--position-embedding-type rope --untie-embeddings-and-output-weights --attention-dropout 0 "
        f"--hidden-dropout 0 --eval-iters 0 --train-iters 1000000 {layout.flags} {options.flags} {extra}"
    )
    return parse(text.split() + (["--bf16"] if torch.cuda.is_available() else []))


class AlternatingTraining:
    """A run of this rank whose tracer is removed and installed between blocks."""

    def __init__(self, run: TrainingRun, options: argparse.Namespace) -> None:
        self.run = run
        self.block = options.block
        self._traced_config = config_of(options, f"--trace {options.trace_flags}")
        self._iterators = build_iterators(run.config, run.layout, 0)
        self._gradient_norm = run.state.optimizer.get_grad_norm
        self.records = 0.0
        """Records of a traced step."""
        self.span_cost_ns = 0.0

    def seconds(self, is_traced: bool) -> float:
        """Run a block of steps with a new trainer; returns its length."""
        prepared_s = time.perf_counter()
        observer = self._observer() if is_traced else None
        schedule = self._schedule(observer)
        trainer = self._trainer(schedule, observer)
        gc.collect()
        for _ in range(WARM):
            trainer.step()
        self._meet()
        began_s = time.perf_counter()
        for _ in range(self.block):
            trainer.step()
        self._meet()
        length_s = time.perf_counter() - began_s
        if self.run.layout.global_rank == 0:
            arm = "traced" if is_traced else "not traced"
            print(f"{arm}: {length_s:.3f} s, prepared in {began_s - prepared_s:.1f} s", file=sys.stderr, flush=True)
        schedule.close()
        if observer is not None:
            observer.close()
            self._read_ring()
        return length_s

    def _schedule(self, observer: ScanObserver | None) -> PipelineSchedule:
        optimizer = self.run.state.optimizer
        optimizer.get_grad_norm = self._gradient_norm
        self.run.core_config.timers = optimizer.config.timers = None
        return build_schedule(self.run, observer)

    def _trainer(self, schedule: PipelineSchedule, observer: ScanObserver | None) -> Trainer:
        return Trainer(
            self.run,
            self._iterators,
            schedule,
            stop_request=StopRequest(),
            observer=observer,
        )

    def _observer(self) -> ScanObserver:
        microbatches = self.run.batches.num_microbatches(0)
        context = RunContext(
            config=self._traced_config,
            layout=self.run.layout,
            device_name=self.run.device.name,
            chunks=self.run.state.chunks,
            num_microbatches=microbatches,
        )
        return scan.start(context)

    def _read_ring(self) -> None:
        path = pathlib.Path(os.environ[Env.SHM_DIR]) / f"{PREFIX}.rank{self.run.layout.rank}.ring"
        reader = native.RingReader(str(path))
        info = reader.info()
        self.records = info.head / (self.block + WARM)
        self.span_cost_ns = float(json.loads(info.metadata)["recordCostNs"] or 0.0)
        reader.close()
        path.unlink()

    def _meet(self) -> None:
        if self.run.device.is_cuda:
            torch.cuda.synchronize()
        if self.run.layout.world_size > 1:
            torch.distributed.barrier()

    def agreed(self, value: bool) -> bool:
        """Return the value of rank 0."""
        if self.run.layout.world_size == 1:
            return value
        flag = torch.tensor([int(value)], device=self.run.device.torch_device)
        torch.distributed.broadcast(flag, 0)
        return bool(flag.item())


def measure(training: AlternatingTraining, seconds: float) -> list[list[float]]:
    """Return groups of four blocks, ABBA, for as long as the time lasts; an even number of groups, at least two."""
    for is_traced in (False, True):  # allocators, connections, kernels
        training.seconds(is_traced)
    began_s = time.perf_counter()
    groups: list[list[float]] = []
    while training.agreed(len(groups) < 2 or len(groups) % 2 == 1 or time.perf_counter() - began_s < seconds):
        groups.append([training.seconds(is_traced) for is_traced in (False, True, True, False)])
    return groups


def table_row(name: str, result: dict[str, Any]) -> str:
    """Return a row of the table in docs/benchmarks.md."""
    parts = (
        f"{name}",
        f"{result['seconds_of_a_step'] * 1e3:.0f} ms, {result['steps_of_an_arm']} steps",
        f"{result['cost']:+.3%} (95 % upper bound {result['cost_upper_95']:+.3%})",
        f"{result['control']:+.3%} ± {result['control_half_width']:.3%}"
        + ("" if result["control_is_zero"] else ", not zero")
        + ("" if result["resolved"] else ", **not resolved**"),
        f"{result['span_cost_ns']:.0f} ns x {result['records_of_a_step']:.0f} = {result['host_part']:.3%}",
    )
    return f"| {' | '.join(parts)} |"


def run_layout(options: argparse.Namespace) -> int:
    """Measure one layout on this rank; rank 0 prints the result as a line of JSON."""
    warnings.simplefilter("ignore")
    config = config_of(options, "")
    layout = layout_of(config)
    device = prepare_device(layout.local_rank, config.parallel.ranks_per_gpu)
    initialize_groups(config, layout, device)
    training = AlternatingTraining(build_run(config, layout, device, vocab_size=32000), options)
    gc.disable()
    groups = measure(training, options.seconds)
    destroy_groups()
    if layout.global_rank:
        return 0
    step_s = statistics.median(group[0] for group in groups) / options.block
    result = compared(groups) | {
        "layout": options.layout,
        "device": device.name,
        "connections": os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", ""),
        "seconds_of_a_step": step_s,
        "steps_of_an_arm": 2 * options.block * len(groups),
        "records_of_a_step": training.records,
        "span_cost_ns": training.span_cost_ns,
        "host_part": training.span_cost_ns * training.records * 1e-9 / step_s,
        "blocks": groups,
    }
    print("RESULT " + json.dumps(result), flush=True)
    return 0


def launched(name: str, arguments: list[str]) -> dict[str, Any]:
    """Run a layout on new ranks."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*torchrun, f"--nproc-per-node={LAYOUTS[name].ranks}", __file__, *arguments, "--layout", name]
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        environment = os.environ | {Env.SHM_DIR: folder, Env.SHM_PREFIX: PREFIX, "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    result: dict[str, Any] = json.loads(line.removeprefix("RESULT "))
    return result


def stored(path: pathlib.Path) -> dict[str, dict[str, Any]]:
    """Return the results of a file of --out, with intervals of today's kind."""
    results: dict[str, dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    return {name: row | compared(row["blocks"]) for name, row in results.items()}


def options_of(arguments: list[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    option: Callable[..., Any] = parser.add_argument
    option("--layouts", nargs="+", choices=list(LAYOUTS), default=["tp2", "pp2", "dp2"])
    option("--layout", choices=list(LAYOUTS), help="set by the script for its ranks")
    option("--seconds", type=float, default=110.0, help="seconds of each layout, without its start")
    option("--block", type=int, default=10, help="steps between two changes")
    option("--layers", type=int, default=20)
    option("--hidden", type=int, default=2048)
    option("--heads", type=int, default=16)
    option("--length", type=int, default=2048)
    option("--micro-batch", type=int, default=2)
    option("--batch", type=int, default=0, help="samples of a step; by default those of the layout")
    option("--flags", default="", help="further flags of the trainer")
    option("--trace-flags", default="", help="further flags of the trainer while it is traced, such as a level")
    option("--out", type=pathlib.Path)
    option("--read", nargs="+", type=pathlib.Path, default=[], metavar="FILE", help="print the table of these results")
    return parser.parse_args(arguments)


def main() -> int:
    """Measure all layouts, print JSON and a table; returns 1 where a resolved cost misses the goal."""
    arguments = sys.argv[1:]
    options = options_of(arguments)
    if options.layout is not None:
        return run_layout(options)
    if options.read:
        print(HEADER)
        print("\n".join(table_row(name, row) for path in options.read for name, row in stored(path).items()))
        return 0
    results: dict[str, dict[str, Any]] = {}
    for name in options.layouts:
        results[name] = launched(name, arguments)
        print(table_row(name, results[name]), flush=True)  # a later layout may be cut short
    brief = {name: {key: value for key, value in row.items() if key != "blocks"} for name, row in results.items()}
    print(json.dumps(brief, indent=1))
    print(HEADER)
    for name, result in results.items():
        print(table_row(name, result))
    if options.out is not None:
        options.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    missed = [row for row in results.values() if row["cost"] > GOAL or row["cost_upper_95"] > BOUND_GOAL]
    return int(torch.cuda.is_available() and any(row["resolved"] for row in missed))


if __name__ == "__main__":
    sys.exit(main())
