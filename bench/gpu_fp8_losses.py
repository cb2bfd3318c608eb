"""Losses of a GPT in fp8 next to bf16, from the same weights and on the same data, on one GPU.

    python bench/gpu_fp8_losses.py --steps 2000 --out gpu_fp8_losses.json

The data are the bytes of Python's own standard library, which every machine has. Prints the mean loss of each hundred
steps, and that of the last tenth.
"""

import argparse
import gc
import json
import os
import pathlib
import random
import statistics
import sys
import sysconfig
from collections.abc import Iterator
from typing import Any

import torch
from gpu_layouts import Samples, arguments, free_port
from gpu_speed import SpeedBench
from plain_megatron import Layout, Shape

from megatronapp_trainer.config import parse
from megatronapp_trainer.device import prepare_device
from megatronapp_trainer.parallel.groups import destroy_groups, initialize_groups
from megatronapp_trainer.training.build import layout_of

ARMS: dict[str, list[str]] = {
    "bf16": [],
    "fp8": ["--fp8-format", "e4m3"],
    "fp8, first and last layer in bf16": ["--fp8-format", "e4m3", "--first-last-layers-bf16"],
}
SHAPE = Shape(layers=8, hidden=1024, heads=8, sequence=1024, vocabulary=256, microbatch=8, global_batch=8)
EVERY = 100


class SourceText(Samples):
    """Samples of source code, drawn in the same order each time."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        files = sorted(pathlib.Path(sysconfig.get_path("stdlib")).glob("*.py"))
        self.text = torch.frombuffer(bytearray(b"\0".join(file.read_bytes() for file in files)), dtype=torch.uint8)

    def __call__(self, sample: int) -> torch.Tensor:
        length = self.shape.sequence + 1
        start = random.Random(sample).randrange(len(self.text) - length)
        return self.text[start : start + length].long().unsqueeze(0)


def losses_of(bench: SpeedBench, name: str, flags: list[str], steps: int) -> list[float]:
    arm = bench.ours(name, flags)
    for _ in range(steps):
        arm.step()
    return arm.losses()


def means(losses: list[float]) -> Iterator[float]:
    for start in range(0, len(losses), EVERY):
        yield statistics.mean(losses[start : start + EVERY])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("gpu_fp8_losses.json"))
    options = parser.parse_args()
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    os.environ |= {"MASTER_PORT": str(free_port()), "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    device = prepare_device(0)
    config = parse(arguments(SHAPE, Layout(), "torch", 1))
    initialize_groups(config, layout_of(config), device)
    found: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "losses": {}}
    for name, flags in ARMS.items():
        bench = SpeedBench(SHAPE, device)
        bench.samples = SourceText(SHAPE)
        losses = found["losses"][name] = losses_of(bench, name, flags, options.steps)
        options.out.write_text(json.dumps(found), encoding="utf-8")
        print(f"{name}: " + " ".join(f"{value:.4f}" for value in means(losses)), flush=True)
        del bench
        gc.collect()
        torch.cuda.empty_cache()
    tails = {name: statistics.mean(losses[-max(options.steps // 10, 1) :]) for name, losses in found["losses"].items()}
    for name, tail in tails.items():
        print(f"{name}: {tail:.4f} over the last tenth, {tail / tails['bf16'] - 1:+.2%} of bf16")
    destroy_groups()
    return 0


if __name__ == "__main__":
    sys.exit(main())
