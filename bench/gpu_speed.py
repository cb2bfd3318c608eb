"""Speed of our trainer on one GPU, part by part, next to megatron-core's local layers, alternating in one run.

    python bench/gpu_speed.py --out gpu_speed.json

Arms of one model take turns in blocks of steps on the same data: megatron-core's local layers with softmax in fp32 (its
default) and in bf16, our trainer with all kernels off, with each part added, up to its defaults, and in fp8. For
each arm: the median block, TFLOP/s by both counts of attention, the share of passes whose host was not ahead of the
device, device time by kernel class, and the losses. The deep model has the first and the last two of our arms alone.
An arm that fails is reported, and the others continue. Layouts of several GPUs are measured by `gpu_graph_layouts.py`.
"""

import argparse
import collections
import contextlib
import dataclasses
import functools
import gc
import itertools
import json
import os
import pathlib
import re
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch
from gpu_layouts import Losses, Samples, arguments, free_port
from plain_megatron import Layout, PlainTraining, Shape

from megatronapp_trainer.config import parse
from megatronapp_trainer.data.microbatches import DataIterators
from megatronapp_trainer.device import Device, prepare_device
from megatronapp_trainer.models.initial import initialize_weights
from megatronapp_trainer.parallel.groups import destroy_groups, initialize_groups
from megatronapp_trainer.training.build import build_run, build_schedule, layout_of
from megatronapp_trainer.training.loop import Trainer
from megatronapp_trainer.training.metrics import flops_per_token, flops_per_token_full_attention
from megatronapp_trainer.training.signals import StopRequest

WARM, ROUNDS, BLOCK = 6, 5, 5
OFF = {
    "attention": ["--attention-backend", "flash"],
    "loss": ["--no-cross-entropy-loss-fusion"],
    "weight gradients": ["--no-gradient-accumulation-fusion"],
    "graphs": ["--cuda-graph-impl", "none"],
    "activation and residual": ["--no-bias-gelu-fusion", "--no-bias-dropout-fusion"],
    "norm": ["--no-persist-layer-norm"],
}
"""Flags that turn a part off, in the order in which the parts are added. Until the graphs are on, the host may be what
limits an arm; its device time shows what the part saves then.
"""
FP8 = ["--fp8-format", "e4m3"]
PLAIN = {"megatron-core, softmax in fp32": True, "megatron-core, softmax in bf16": False}
CLASSES = {
    "attention": r"flash|fmha|sdpa|softmax|attention",
    "products": r"gemm|nvjet|cutlass|xmma|cublas|splitk",
    "loss": r"_loss_|cross_entropy|nll",
    "norm": r"norm",
    "activation": r"_activation_|gelu|silu",
    "residual": r"_residual_",
    "rounding to fp8": r"_quantize_",
    "bias sums": r"_column_|reduce_kernel",
    "optimizer": r"adam|multi_tensor|foreach",
    "embedding": r"embedding|index|gather|sort",
    "copies": r"memcpy|memset|fill|copy",
    "elementwise": r"elementwise|vectorized",
}
"""Kernel classes by their names; the first that fits counts."""


@dataclasses.dataclass(kw_only=True)
class Arm:
    """A training that is ready to step, and what was measured of it."""

    name: str
    step: Callable[[], object]
    losses: Callable[[], list[float]]
    blocks_s: list[float] = dataclasses.field(default_factory=list)
    found: dict[str, Any] = dataclasses.field(default_factory=dict)


class SpeedBench:
    """Arms of one model on one GPU."""

    def __init__(self, shape: Shape, device: Device, only: str = "") -> None:
        self.only = re.compile(only)
        self.shape = shape
        self.device = device
        self.samples = Samples(shape)
        self.arms: list[Arm] = []
        self.failed: dict[str, str] = {}

    def flags(self, *more: str) -> list[str]:
        return [*arguments(self.shape, Layout(), "torch", 10_000), *more]

    def add(self, name: str, build: Callable[[], Arm]) -> None:
        if self.only.search(name) is None:
            return
        with self.reporting(name):
            arm = build()
            block(arm, WARM)
            self.arms.append(arm)

    @contextlib.contextmanager
    def reporting(self, name: str) -> Iterator[None]:
        """Report what fails inside, and continue."""
        try:
            yield
        except Exception:
            self.failed[name] = traceback.format_exc()
            self.arms = [arm for arm in self.arms if arm.name != name]
            print(f"{name} failed:\n{self.failed[name]}", flush=True)
            gc.collect()
            torch.cuda.empty_cache()

    def ours(self, name: str, flags: list[str]) -> Arm:
        config = parse(self.flags(*flags))
        layout = layout_of(config)
        run = build_run(config, layout, self.device, vocab_size=self.shape.vocabulary)
        losses = Losses()
        iterators = DataIterators(train=self.samples.batches(1, 0), valid=None, test=None)
        trainer = Trainer(run, iterators, build_schedule(run), stop_request=StopRequest(), reporter=losses)  # type: ignore[arg-type]
        return Arm(name=name, step=trainer.step, losses=lambda: losses.values)

    def plain(self, name: str, *, softmax_in_fp32: bool) -> Arm:
        config = parse(self.flags())
        layout = layout_of(config)

        def initialize(model: Any) -> None:  # noqa: ANN401
            initialize_weights(model, config.model, seed=config.training.seed, layout=layout)

        training = PlainTraining(
            self.shape, Layout(), self.samples, softmax_in_fp32=softmax_in_fp32, initialize=initialize
        )
        steps, found = itertools.count(), list[torch.Tensor]()

        def step() -> None:
            reports = training.step(next(steps))
            found.append(torch.stack([report["loss"] for report in reports]).mean())

        return Arm(name=name, step=step, losses=lambda: [float(value) for value in found])

    def measure(self) -> None:
        for number in range(ROUNDS):
            for arm in self.arms if number % 2 else reversed(self.arms):
                with self.reporting(arm.name):
                    arm.blocks_s.append(block(arm, BLOCK))
        for arm in list(self.arms):
            with self.reporting(arm.name):
                arm.found["passes_host_not_ahead"] = idle_fraction(arm)
                arm.found["device_ms"] = device_times(arm)

    def results(self) -> dict[str, Any]:
        config = parse(self.flags())
        tokens = self.shape.global_batch * self.shape.sequence
        model, vocabulary = config.model, config.model.padded_vocab_size(self.shape.vocabulary)
        passes = self.shape.layers * self.shape.global_batch // self.shape.microbatch
        rows: dict[str, Any] = {}
        for arm in self.arms:
            seconds = statistics.median(arm.blocks_s)
            rows[arm.name] = {
                "step_ms": seconds * 1e3,
                "blocks_ms": [value * 1e3 for value in arm.blocks_s],
                "tflops": flops_per_token(model, vocabulary) * tokens / seconds / 1e12,
                "tflops_full_attention": flops_per_token_full_attention(model, vocabulary) * tokens / seconds / 1e12,
                **arm.found,
                "device_us_per_layer_and_microbatch": {
                    name: value * 1e3 / passes for name, value in arm.found.get("device_ms", {}).items()
                },
                "losses": arm.losses(),
            }
        return {"shape": dataclasses.asdict(self.shape), "arms": rows, "failed": self.failed}


def block(arm: Arm, steps: int) -> float:
    """Mean seconds of some steps in a row."""
    torch.cuda.synchronize()
    began_s = time.perf_counter()
    for _ in range(steps):
        arm.step()
    torch.cuda.synchronize()
    return (time.perf_counter() - began_s) / steps


def idle_fraction(arm: Arm, steps: int = 3) -> float:
    """Share of passes at whose launch the device had nothing left to do."""
    from megatron.core.pipeline_parallel import schedules

    from megatronapp_trainer.pipeline.graphs.graphed_step import MicrobatchGraph

    idle: list[bool] = []
    last: list[torch.cuda.Event] = []

    def probed(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*values: Any, **named: Any) -> Any:  # noqa: ANN401
            if last:
                idle.append(bool(last.pop().query()))  # type: ignore[no-untyped-call]
            result = function(*values, **named)
            last.append(torch.cuda.Event())  # type: ignore[no-untyped-call]
            last[-1].record()
            return result

        return call

    places: list[tuple[Any, str]] = [
        *((schedules, name) for name in ("forward_step", "backward_step")),
        *((MicrobatchGraph, name) for name in ("forward", "backward")),
    ]
    whole = [getattr(owner, name) for owner, name in places]
    try:
        for (owner, name), function in zip(places, whole, strict=True):
            setattr(owner, name, probed(function))
        block(arm, steps)
    finally:
        for (owner, name), function in zip(places, whole, strict=True):
            setattr(owner, name, function)
    return sum(idle) / max(len(idle), 1)


def device_times(arm: Arm, steps: int = 2) -> dict[str, float]:
    """Milliseconds of a step on the device by kernel class, and of all kernels."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        block(arm, steps)
    totals: collections.Counter[str] = collections.Counter()
    names: collections.Counter[str] = collections.Counter()
    for event in profiler.events():
        if event.device_type.name == "CUDA":
            totals[class_of(event.name)] += event.device_time_total / 1e3 / steps
            names[event.name] += event.device_time_total / 1e3 / steps
    arm.found["longest_kernels_ms"] = {name[:120]: round(value, 3) for name, value in names.most_common(30)}
    return {"all": sum(totals.values()), **dict(totals.most_common())}


def class_of(kernel: str) -> str:
    return next((name for name, pattern in CLASSES.items() if re.search(pattern, kernel, re.IGNORECASE)), "other")


def show(results: dict[str, Any]) -> None:
    rows = results["arms"]
    print(f"\n{results['shape']}")
    print(f"{'arm':38} {'ms':>8} {'TFLOP/s':>8} {'full':>6} {'idle':>5} {'device':>7} {'loss':>9}")
    for name, row in rows.items():
        print(
            f"{name:38} {row['step_ms']:8.1f} {row['tflops']:8.1f} {row['tflops_full_attention']:6.1f} "
            f"{row.get('passes_host_not_ahead', float('nan')):5.2f} {row.get('device_ms', {}).get('all', 0):7.1f} "
            f"{row['losses'][WARM + ROUNDS * BLOCK - 1]:9.5f}"
        )
        print("    " + "  ".join(f"{part} {value:.1f}" for part, value in row.get("device_ms", {}).items()))
    ours = rows.get("ours, defaults")
    for name in PLAIN:
        if ours is not None and name in rows:
            print(f"ours over {name}: {rows[name]['step_ms'] / ours['step_ms']:.2f}")
    if ours is not None and "ours, fp8" in rows:
        print(f"fp8 over bf16: {ours['step_ms'] / rows['ours, fp8']['step_ms']:.2f}")
    sys.stdout.flush()


def measure_parts(device: Device, shape: Shape, only: str) -> dict[str, Any]:
    bench = SpeedBench(shape, device, only)
    for name, in_fp32 in PLAIN.items():
        bench.add(name, lambda name=name, in_fp32=in_fp32: bench.plain(name, softmax_in_fp32=in_fp32))  # type: ignore[misc]
    parts = list(OFF)
    for count in range(len(parts) + 1):
        name = "ours, all off" if count == 0 else f"+ {parts[count - 1]}"
        name = "ours, defaults" if count == len(parts) else name
        flags = [flag for part in parts[count:] for flag in OFF[part]]
        bench.add(name, lambda name=name, flags=flags: bench.ours(name, flags))  # type: ignore[misc]
    bench.add("ours, fp8", lambda: bench.ours("ours, fp8", FP8))
    bench.measure()
    return bench.results()


def measure_deep(device: Device, shape: Shape, only: str) -> dict[str, Any]:
    bench = SpeedBench(shape, device, only)
    every = [flag for flags in OFF.values() for flag in flags]
    bench.add("ours, all off", lambda: bench.ours("ours, all off", every))
    bench.add("ours, defaults", lambda: bench.ours("ours, defaults", []))
    bench.add("ours, fp8", lambda: bench.ours("ours, fp8", FP8))
    bench.measure()
    return bench.results()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--hidden", type=int, default=2048, help="hidden size, in heads of 128 (%(default)s)")
    parser.add_argument("--deep", type=int, default=24, help="layers of the deep model; 0: leave it out")
    parser.add_argument("--only", default="", help="regular expression of the arms to measure")
    parser.add_argument("--only-deep", default="", help="the same for the deep model")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("gpu_speed.json"))
    options = parser.parse_args()
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    os.environ |= {"MASTER_PORT": str(free_port()), "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    device = prepare_device(0)
    shape = Shape(layers=options.layers, hidden=options.hidden, heads=options.hidden // 128, global_batch=8)
    config = parse(arguments(shape, Layout(), "torch", 1))
    initialize_groups(config, layout_of(config), device)
    found: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    measurements = {"parts": functools.partial(measure_parts, device, shape, options.only)}
    if options.deep:
        deep = dataclasses.replace(shape, layers=options.deep)
        measurements["deep"] = functools.partial(measure_deep, device, deep, options.only_deep)
    for name, measure in measurements.items():
        found[name] = measure()
        show(found[name])
        options.out.write_text(json.dumps(found, indent=1), encoding="utf-8")
        gc.collect()
        torch.cuda.empty_cache()
    destroy_groups()
    return 1 if any(found[name]["failed"] for name in measurements) else 0


if __name__ == "__main__":
    sys.exit(main())
