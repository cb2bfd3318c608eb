"""Step times and losses of our trainer and plain megatron-core, in one run on the GPUs of one host.

    python bench/gpu_layouts.py --out results.json

Starts one process per GPU. For each layout three variants take turns on the same data: plain megatron-core with its
local layers, our trainer with the same layers (--transformer-impl local), and our trainer with its own (torch). Then,
with one layout, tracing on against off in alternating blocks. CUDA_DEVICE_MAX_CONNECTIONS is 1 throughout.
"""

import argparse
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

from megatronapp_trainer.config import TrainerConfig, parse
from megatronapp_trainer.data.microbatches import DataIterators, HostMicrobatch
from megatronapp_trainer.data.mock_data import mock_sample
from megatronapp_trainer.device import prepare_device
from megatronapp_trainer.parallel.groups import destroy_groups, initialize_groups
from megatronapp_trainer.training.build import TrainingRun, build_run, build_schedule, layout_of
from megatronapp_trainer.training.loop import Trainer
from megatronapp_trainer.training.metrics import flops_per_token, flops_per_token_full_attention
from megatronapp_trainer.training.signals import StopRequest

WARM, MEASURED = 5, 10
BLOCKS, BLOCK_STEPS = 12, 10


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


def span_of_steps(step: Callable[[], object], count: int) -> float:
    """Mean seconds of `count` steps in a row."""
    dist.barrier()
    torch.cuda.synchronize()
    began_s = time.perf_counter()
    for _ in range(count):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - began_s) / count


def groups_for(config: TrainerConfig) -> tuple[Any, Any]:
    layout = layout_of(config)
    device = prepare_device(layout.local_rank)
    os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)
    initialize_groups(config, layout, device)
    return layout, device


def release() -> None:
    destroy_groups()
    gc.collect()
    torch.cuda.empty_cache()


def ours(config: TrainerConfig, samples: Samples) -> tuple[TrainingRun, Trainer, Losses, StopRequest]:
    layout, device = groups_for(config)
    run = build_run(config, layout, device, vocab_size=samples.shape.vocabulary)
    feed = samples.batches(layout.data_size, layout.data_rank)
    losses, stop_request = Losses(), StopRequest()
    iterators = DataIterators(train=feed, valid=None, test=None)
    trainer = Trainer(run, iterators, build_schedule(run), stop_request=stop_request, reporter=losses)  # type: ignore[arg-type]
    return run, trainer, losses, stop_request


def measure_ours(shape: Shape, layout: Layout, implementation: str, samples: Samples) -> dict[str, Any]:
    config = parse(arguments(shape, layout, implementation, WARM + MEASURED))
    run, trainer, losses, _ = ours(config, samples)
    span_of_steps(trainer.step, WARM)
    seconds = span_of_steps(trainer.step, MEASURED)
    tokens = shape.global_batch * shape.sequence
    model, vocabulary = run.config.model, run.padded_vocab_size
    scale = tokens / seconds / run.layout.world_size / 1e12
    tflops = flops_per_token(model, vocabulary) * scale
    tflops_full_attention = flops_per_token_full_attention(model, vocabulary) * scale
    del run, trainer
    release()
    return {
        "step_ms": seconds * 1e3,
        "tflops_per_gpu": tflops,
        "tflops_per_gpu_full_attention": tflops_full_attention,
        "loss": losses.values,
    }


def measure_plain(shape: Shape, layout: Layout, samples: Samples) -> dict[str, Any]:
    groups_for(parse(arguments(shape, layout, "local", WARM + MEASURED)))
    seconds = time_plain(PlainTraining(shape, layout, samples))
    release()
    return {"step_ms": seconds * 1e3}


def time_plain(training: PlainTraining) -> float:
    """Mean seconds of a step; what it trained dies with this frame."""
    steps = itertools.count()
    span_of_steps(lambda: training.step(next(steps)), WARM)
    return span_of_steps(lambda: training.step(next(steps)), MEASURED)


def measure_tracing(shape: Shape, layout: Layout, samples: Samples) -> dict[str, Any]:
    """Seconds per step with the tracer and without, in alternating blocks of one run."""
    from megatronapp_trainer import scan
    from megatronapp_trainer.scan.run_context import RunContext

    config = parse([*arguments(shape, layout, "torch", 10_000), "--trace"])
    run, plain, _, stop_request = ours(config, samples)
    off = switches(run)
    context = RunContext(
        config=config,
        layout=run.layout,
        device_name=run.device.name,
        chunks=run.state.chunks,
        num_microbatches=shape.global_batch,
    )
    observer = scan.start(context)
    iterators = DataIterators(train=samples.batches(run.layout.data_size, run.layout.data_rank), valid=None, test=None)
    traced = Trainer(run, iterators, build_schedule(run, observer), stop_request=stop_request, observer=observer)
    on = switches(run)
    span_of_steps(traced.step, WARM)
    switch(run, off)
    span_of_steps(plain.step, WARM)
    blocks: dict[str, list[float]] = {"off": [], "on": []}
    for block in range(2 * BLOCKS):
        name, trainer, values = ("on", traced, on) if block % 2 else ("off", plain, off)
        switch(run, values)
        blocks[name].append(span_of_steps(trainer.step, BLOCK_STEPS))
    observer.close()
    ratios = [on_s / off_s for on_s, off_s in zip(blocks["on"], blocks["off"], strict=True)]
    release()
    return {"blocks_ms": {name: [s * 1e3 for s in values] for name, values in blocks.items()}, "on_over_off": ratios}


def switches(run: TrainingRun) -> tuple[Any, ...]:
    """Return the places of observers: megatron-core's timers and the timed gradient norm."""
    return run.core_config.timers, run.state.optimizer.config.timers, run.state.optimizer.get_grad_norm


def switch(run: TrainingRun, values: tuple[Any, ...]) -> None:
    run.core_config.timers, run.state.optimizer.config.timers, run.state.optimizer.get_grad_norm = values


def work(options: argparse.Namespace) -> None:
    """One rank: all measurements in the same order as its peers."""
    shape = Shape(layers=options.layers, hidden=options.hidden, sequence=options.sequence)
    samples = Samples(shape)
    results: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "layouts": {}}
    for layout in layouts(options.gpus):
        row = {
            "plain local": measure_plain(shape, layout, samples),
            "ours local": measure_ours(shape, layout, "local", samples),
            "ours torch": measure_ours(shape, layout, "torch", samples),
        }
        results["layouts"][layout.name] = row
        show(options.out, layout.name, results)
    results["tracing"] = measure_tracing(shape, Layout(pipeline=options.gpus), samples)
    if int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
        ratio = statistics.median(results["tracing"]["on_over_off"])
        print(f"tracing on over off: median of {BLOCKS} pairs of blocks {ratio:.5f}", flush=True)
        options.out.write_text(json.dumps(results, indent=1), encoding="utf-8")


def show(out: pathlib.Path, name: str, results: dict[str, Any]) -> None:
    """Print a layout's figures and keep all so far; the reporting rank, which knows the losses, is the last."""
    row = results["layouts"][name]
    if int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
        out.write_text(json.dumps(results, indent=1), encoding="utf-8")
        figures = "  ".join(f"{variant} {value['step_ms']:8.1f} ms" for variant, value in row.items())
        print(f"{name:10} {figures}  loss {row['ours torch']['loss'][-1]:.4f}", flush=True)


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
