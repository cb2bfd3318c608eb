"""Cost of a microbatch for the host: our trainer and plain megatron-core, in one process on the CPU.

    python bench/bench_host.py [--blocks N] [--implementation local|torch]

The tensors are so small that nearly all time is Python and torch's dispatch, as on a GPU that waits for its host. Both
train the same model on the same data with one intra-op thread, and take turns. Two figures: the torch operations per
microbatch, counted exactly, and processor time of a step, as ratios of neighbouring blocks.
"""

import argparse
import itertools
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from gpu_layouts import Samples, free_port, open_groups, ours
from plain_megatron import Layout, PlainTraining, Shape
from torch.utils._python_dispatch import TorchDispatchMode

from megatronapp_trainer.parallel.groups import destroy_groups

STEPS_OF_BLOCK = 2
WARM = 3


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call] # torch gives no types here
    """Counts what reaches torch's dispatcher below autograd: kernels, copies and views, backward passes included."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count: int = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        self.count += 1
        return function(*args, **(kwargs or {}))


def shape(layers: int, microbatches: int) -> Shape:
    return Shape(
        layers=layers, hidden=32, heads=4, sequence=16, vocabulary=128, microbatch=1, global_batch=microbatches
    )


def variants(layers: int, microbatches: int, implementation: str) -> dict[str, Callable[[], object]]:
    """Return a step of each trainer; they share only the process groups."""
    size = shape(layers, microbatches)
    samples = Samples(size)
    mine = ours(size, Layout(), implementation, samples, open_groups(size, Layout()))
    plain, steps = PlainTraining(size, Layout(), samples, "cpu"), itertools.count()
    return {"plain": lambda: plain.step(next(steps)), "ours": mine.step}


def operations(step: Callable[[], object]) -> int:
    """Operations of one step."""
    counted = Operations()
    with counted:
        step()
    return counted.count


def per_microbatch(layers: int, implementation: str) -> dict[str, float]:
    """Operations that each further microbatch of a step adds."""
    found: dict[int, dict[str, int]] = {}
    for microbatches in (16, 32):
        steps = variants(layers, microbatches, implementation)
        for step in steps.values():
            step()
        found[microbatches] = {name: operations(step) for name, step in steps.items()}
        destroy_groups()
    return {name: (found[32][name] - found[16][name]) / 16 for name in found[16]}


def block(step: Callable[[], object]) -> float:
    """Seconds of processor time of a step."""
    began_s = time.process_time()
    for _ in range(STEPS_OF_BLOCK):
        step()
    return (time.process_time() - began_s) / STEPS_OF_BLOCK


def alternating(steps: dict[str, Callable[[], object]], blocks: int) -> dict[str, list[float]]:
    """Seconds of each block, in turns."""
    for step in steps.values():
        for _ in range(WARM):
            step()
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(blocks):
        for name, step in steps.items():
            times[name].append(block(step))
    return times


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=40)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--implementation", choices=("local", "torch"), default="local")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    os.environ["MASTER_PORT"] = str(free_port())
    torch.set_num_threads(1)
    counts = per_microbatch(options.layers, options.implementation)
    times = alternating(variants(options.layers, options.microbatches, options.implementation), options.blocks)
    destroy_groups()
    for name, values in times.items():
        milliseconds = statistics.median(values) / options.microbatches * 1e3
        print(f"{name:6} {counts[name]:7.1f} operations, {milliseconds:6.3f} ms of processor time per microbatch")
    ratios = sorted(mine / theirs for mine, theirs in zip(times["ours"], times["plain"], strict=True))
    quarter = len(ratios) // 4
    middle = statistics.median(ratios)
    print(f"ours / plain: {middle:.3f} (half of the pairs {ratios[quarter]:.3f} to {ratios[-1 - quarter]:.3f})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
