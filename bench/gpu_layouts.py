"""Step times and losses of our trainer and plain megatron-core, in one run on the GPUs of one host.

    python bench/gpu_layouts.py --out results.json

Starts one process per GPU. For each layout three trainings exist in the same processes and take turns in blocks of
steps on the same data: plain megatron-core with its local layers, our trainer with the same layers (--transformer-impl
local), and our trainer with its own (torch). Prints the median block of each, and the ratio of our local layers to
plain's in each round, by which a host whose speed changes is not taken for a difference. CUDA_DEVICE_MAX_CONNECTIONS is
1 throughout. `gpu_trace_cost.py` measures what tracing costs.
"""

import argparse
import dataclasses
import gc
import itertools
import json
import os
import pathlib
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from plain_megatron import Layout, PlainTraining, Shape

from megatronapp_trainer.config import parse
from megatronapp_trainer.data.microbatches import DataIterators, HostMicrobatch
from megatronapp_trainer.data.mock_data import mock_sample
from megatronapp_trainer.device import Device, prepare_device
from megatronapp_trainer.parallel.groups import destroy_groups, initialize_groups
from megatronapp_trainer.training.build import build_run, build_schedule, layout_of, with_overlap
from megatronapp_trainer.training.loop import Trainer
from megatronapp_trainer.training.metrics import flops_per_token, flops_per_token_full_attention
from megatronapp_trainer.training.signals import StopRequest

WARM, ROUNDS, BLOCK = 6, 7, 3
PLAIN, LOCAL, TORCH, RATIO = "plain local", "ours local", "ours torch", "ours local over plain"


def layouts(gpus: int) -> list[Layout]:
    found = [
        Layout(pipeline=gpus),
        Layout(pipeline=gpus, chunks=2),
        Layout(pipeline=gpus, chunks=3),
        Layout(tensor=gpus),
        Layout(),
        Layout(tensor=2, pipeline=gpus // 2),
    ]
    possible = (layout for layout in found if layout.pipeline > 1 or (layout.pipeline == 1 and layout.chunks == 1))
    return [layout for layout in dict.fromkeys(possible) if gpus % layout.tensor == 0]


def arguments(shape: Shape, layout: Layout, implementation: str, steps: int) -> list[str]:
    flags: dict[str, Any] = {
        "--num-layers": shape.layers,
        "--hidden-size": shape.hidden,
        "--num-attention-heads": shape.heads,
        "--seq-length": shape.sequence,
        "--vocab-size": shape.vocabulary,
        "--micro-batch-size": shape.microbatch,
        "--global-batch-size": shape.global_batch,
        "--train-iters": steps,
        "--lr": 1e-4,
        "--min-lr": 1e-4,
        "--weight-decay": 0.01,
        "--attention-dropout": 0.0,
        "--hidden-dropout": 0.0,
        "--eval-iters": 0,
        "--tensor-model-parallel-size": layout.tensor,
        "--pipeline-model-parallel-size": layout.pipeline,
        "--transformer-impl": implementation,
    }
    if layout.chunks > 1:
        per_chunk = shape.layers // layout.pipeline // layout.chunks
        flags["--num-layers-per-virtual-pipeline-stage"] = per_chunk
    values = [str(argument) for flag in flags.items() for argument in flag]
    return [*values, "--mock-data", "--bf16", "--use-distributed-optimizer", "--untie-embeddings-and-output-weights"]


class Samples:
    """The tokens of a global sample, made once: making them is not what is measured."""

    def __init__(self, shape: Shape) -> None:
        rows = [mock_sample(f"bench:{index}", shape.vocabulary, shape.sequence + 1) for index in range(2 * 16)]
        self.rows = torch.stack(rows)
        self.shape = shape
        self.loss_mask = torch.ones(shape.microbatch, shape.sequence)
        self.positions = torch.arange(shape.sequence).expand(shape.microbatch, -1)

    def __call__(self, sample: int) -> torch.Tensor:
        return self.rows[sample % len(self.rows)].unsqueeze(0)

    def batches(self, replicas: int, mine: int) -> Iterator[HostMicrobatch]:
        size = self.shape.microbatch
        for first in itertools.count(mine * size, replicas * size):
            tokens = torch.cat([self(sample) for sample in range(first, first + size)])
            yield {
                "tokens": tokens[:, :-1].contiguous(),
                "labels": tokens[:, 1:].contiguous(),
                "loss_mask": self.loss_mask,
                "position_ids": self.positions,
            }


class Losses:
    """Replacement of the reporter that stores the loss of every step."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def step(self, metrics: Any, **_rest: Any) -> None:  # noqa: ANN401 - StepMetrics
        self.values.append(metrics.loss)

    def state(self, _state: str) -> None:
        return None


@dataclasses.dataclass(kw_only=True)
class LayoutTraining:
    """A training that is ready to step, and what was measured of it."""

    step: Callable[[], object]
    close: Callable[[], None] = lambda: None
    losses: Losses | None = None
    tera_per_gpu: dict[str, float] = dataclasses.field(default_factory=dict)
    """Floating-point operations of a step, by the name of the rate that follows from it."""
    blocks_s: list[float] = dataclasses.field(default_factory=list)

    def block(self, steps: int) -> float:
        """Return the mean seconds of some steps in a row, begun by all ranks together."""
        torch.cuda.synchronize()
        dist.barrier()
        began_s = time.perf_counter()
        for _ in range(steps):
            self.step()
        torch.cuda.synchronize()
        return (time.perf_counter() - began_s) / steps

    def results(self) -> dict[str, Any]:
        seconds = statistics.median(self.blocks_s)
        return {
            "step_ms": seconds * 1e3,
            "blocks_ms": [value * 1e3 for value in self.blocks_s],
            **{name: tera / seconds for name, tera in self.tera_per_gpu.items()},
            "loss": [] if self.losses is None else self.losses.values,
        }


def open_groups(shape: Shape, layout: Layout) -> Device:
    """Initialize the process groups of a layout, which all arms share. Returns the device of this rank."""
    config = parse(arguments(shape, layout, "local", 1))
    rank_layout = layout_of(config)
    device = prepare_device(rank_layout.local_rank)
    os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)
    initialize_groups(config, rank_layout, device)
    return device


def ours(shape: Shape, layout: Layout, implementation: str, samples: Samples, device: Device) -> LayoutTraining:
    config = parse(arguments(shape, layout, implementation, 10_000))
    rank_layout = layout_of(config)
    config = with_overlap(config, rank_layout, device)
    run = build_run(config, rank_layout, device, vocab_size=shape.vocabulary)
    losses, schedule = Losses(), build_schedule(run)
    iterators = DataIterators(
        train=samples.batches(rank_layout.data_size, rank_layout.data_rank), valid=None, test=None
    )
    trainer = Trainer(run, iterators, schedule, stop_request=StopRequest(), reporter=losses)  # type: ignore[arg-type]
    model, vocabulary = config.model, run.padded_vocab_size
    tokens_tera = shape.global_batch * shape.sequence / rank_layout.world_size / 1e12
    return LayoutTraining(
        step=trainer.step,
        close=schedule.close,
        losses=losses,
        tera_per_gpu={
            "tflops_per_gpu": flops_per_token(model, vocabulary) * tokens_tera,
            "tflops_per_gpu_full_attention": flops_per_token_full_attention(model, vocabulary) * tokens_tera,
        },
    )


def plain(shape: Shape, layout: Layout, samples: Samples) -> LayoutTraining:
    training, steps = PlainTraining(shape, layout, samples), itertools.count()
    return LayoutTraining(step=lambda: training.step(next(steps)))


def measure(shape: Shape, layout: Layout, samples: Samples) -> dict[str, Any]:
    """Measure the arms of a layout on this rank, in the same order as its peers."""
    device = open_groups(shape, layout)
    arms = {
        PLAIN: plain(shape, layout, samples),
        LOCAL: ours(shape, layout, "local", samples, device),
        TORCH: ours(shape, layout, "torch", samples, device),
    }
    for arm in arms.values():
        arm.block(WARM)
    for number in range(ROUNDS):
        for arm in arms.values() if number % 2 else reversed(arms.values()):
            arm.blocks_s.append(arm.block(BLOCK))
    for arm in arms.values():
        arm.close()
    pairs = zip(arms[LOCAL].blocks_s, arms[PLAIN].blocks_s, strict=True)
    ratios = sorted(local_s / plain_s for local_s, plain_s in pairs)
    results = {name: arm.results() for name, arm in arms.items()}
    arms.clear()
    destroy_groups()
    gc.collect()
    torch.cuda.empty_cache()
    return results | {RATIO: {"median": statistics.median(ratios), "rounds": ratios}}


def work(options: argparse.Namespace) -> None:
    """Measure all layouts on this rank, in the same order as its peers; the last rank, which has the losses, prints."""
    shape = Shape(layers=options.layers, hidden=options.hidden, sequence=options.sequence)
    samples = Samples(shape)
    results: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "layouts": {}}
    for layout in layouts(options.gpus):
        row = results["layouts"][layout.name] = measure(shape, layout, samples)
        if int(os.environ["RANK"]) == options.gpus - 1:
            options.out.write_text(json.dumps(results, indent=1), encoding="utf-8")
            show(layout.name, row)


def show(name: str, row: dict[str, Any]) -> None:
    figures = "  ".join(f"{arm} {row[arm]['step_ms']:7.1f} ms" for arm in (PLAIN, LOCAL, TORCH))
    ratio = row[RATIO]
    print(
        f"{name:10} {figures}  {RATIO} {ratio['median']:.3f} ({ratio['rounds'][0]:.3f} to {ratio['rounds'][-1]:.3f})  "
        f"{TORCH} {row[TORCH]['tflops_per_gpu_full_attention']:.0f} TFLOP/s per GPU, loss {row[TORCH]['loss'][-1]:.4f}",
        flush=True,
    )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=torch.cuda.device_count())
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--sequence", type=int, default=2048)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("gpu_layouts.json"))
    options = parser.parse_args()
    if "RANK" in os.environ:
        work(options)
        return 0
    port = free_port()
    world = {"WORLD_SIZE": str(options.gpus), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    shared = os.environ | world | {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "OMP_NUM_THREADS": "4"}
    ranks = [
        subprocess.Popen([sys.executable, *sys.argv], env=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(options.gpus)
    ]
    return max(abs(rank.wait()) for rank in ranks)


if __name__ == "__main__":
    sys.exit(main())
