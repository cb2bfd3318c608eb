"""Cost of captures of a training on GPUs: steps without captures, every 50 steps and every 5, and a paused training.

    python bench/gpu_capture_training.py --out gpu_capture_training.json
    torchrun --nproc-per-node 4 bench/gpu_capture_training.py --flags "--tensor-model-parallel-size 2"

One run of a GPT with random weights (1.2 billion parameters in bf16) trains on random tokens. Blocks of 50 steps take
turns: without captures, with a capture in one of the 50 steps, and with one in every fifth step; the order changes from
round to round, and each block is compared with the one without captures of the same round. Frames go through a Unix
socket to another process that reads them. Then the training is paused by an order as `megatronapp training JOB pause`
gives it; torch's profiler counts the kernels of the pause, and nvidia-smi reports the use of the GPU.

A small model on a CPU shows that the script works:
    python bench/gpu_capture_training.py --layers 2 --hidden 64 --heads 4 --length 64 --batch 4 --block 10 --rounds 6 \
        --pause 2
"""

import argparse
import datetime
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from typing import Any

import torch
from gpu_capture import reader
from gpu_generate import median_bounds

from megatronapp_common.control.orders import RUNNING
from megatronapp_common.names import Env
from megatronapp_common.scope.protocol import SOCKET
from megatronapp_trainer.config import TrainerConfig, parse
from megatronapp_trainer.device import prepare_device
from megatronapp_trainer.hooks.scheduled_capture import ScheduledCapture
from megatronapp_trainer.parallel.groups import destroy_groups, initialize_groups
from megatronapp_trainer.parallel.worlds import control_store
from megatronapp_trainer.scope.statistics.setup import open_capture
from megatronapp_trainer.training.build import (
    TrainingRun,
    build_iterators,
    build_run,
    build_schedule,
    layout_of,
    with_overlap,
)
from megatronapp_trainer.training.control.group import ControlGroup
from megatronapp_trainer.training.control.order_reader import OrderReader
from megatronapp_trainer.training.control.setup import RankSurroundings
from megatronapp_trainer.training.control.training_control import TrainingControl
from megatronapp_trainer.training.loop import Trainer
from megatronapp_trainer.training.signals import StopRequest

GOAL = 0.99
"""Least share of the speed that is left with a capture every 50 steps."""


def config_of(options: argparse.Namespace) -> TrainerConfig:
    """Return the configuration of the run."""
    precision = "--bf16" if torch.cuda.is_available() else ""
    text = (
        f"--num-layers {options.layers} --hidden-size {options.hidden} --num-attention-heads {options.heads} "
        f"--seq-length {options.length} --micro-batch-size {options.micro_batch} --global-batch-size {options.batch} "
        "--mock-data --vocab-size 32000 --swiglu --normalization RMSNorm --disable-bias-linear --lr 1e-4 "
        "--position-embedding-type rope --untie-embeddings-and-output-weights --attention-dropout 0 "
        f"--hidden-dropout 0 --eval-iters 0 --train-iters 1000000 {precision} {options.flags}"
    )
    return parse(text.split())


class Training:
    """A run of this rank whose captures are changed between blocks of steps."""

    def __init__(self, run: TrainingRun, options: argparse.Namespace) -> None:
        self.run = run
        self.block = options.block
        self.intervals = {"none": 0, "rare": options.block, "often": max(1, options.block // 10)}
        """Steps from one capture to the next, of each way to run a block."""
        config, layout, device = run.config, run.layout, run.device.torch_device
        # bf16 and fp32, the precisions of this run, do not scale the loss.
        self.capture = ScheduledCapture(
            lambda every: open_capture(config, layout, run.state.chunks, device, every=every, loss_scale=lambda: 1.0),
            every=0,
        )
        self.trainer = Trainer(
            run,
            build_iterators(config, layout, 0),
            build_schedule(run),
            stop_request=StopRequest(),
            capture=self.capture,
        )

    def seconds(self, way: str) -> float:
        """Run a block of steps; returns its length."""
        self.capture.order(self.intervals[way])
        self.wait()
        began_s = time.perf_counter()
        for _ in range(self.block):
            self.trainer.step()
        self.wait()
        return time.perf_counter() - began_s

    def wait(self) -> None:
        """Wait for the device, and for the other ranks."""
        if self.run.device.is_cuda:
            torch.cuda.synchronize()
        if self.run.layout.world_size > 1:
            torch.distributed.barrier()


def compare(training: Training, rounds: int) -> dict[str, Any]:
    """Run blocks of all ways in turn, each round in another order."""
    names = list(training.intervals)
    for name in names:  # allocators, connections, kernels
        training.seconds(name)
    blocks: dict[str, list[float]] = {name: [] for name in names}
    for place in range(rounds):
        shift = place % len(names)
        for name in names[shift:] + names[:shift]:
            blocks[name].append(training.seconds(name))
    row: dict[str, Any] = {"seconds_of_a_step": statistics.median(blocks["none"]) / training.block}
    for name in names[1:]:
        fractions = [none / own for none, own in zip(blocks["none"], blocks[name], strict=True)]
        low, high = median_bounds(fractions)
        row[name] = {
            "every": training.intervals[name],
            "speed_left": statistics.median(fractions),
            "low": low,
            "high": high,
        }
        extra_s = statistics.median(own - none for none, own in zip(blocks["none"], blocks[name], strict=True))
        row[name]["seconds_of_a_capture"] = extra_s * training.intervals[name] / training.block
    return row | {"goal_of_rare": GOAL, "blocks": blocks}


class PausePage:
    """Control page that shows a pause to rank 0, in place of the agent that writes it."""

    def read_new(self) -> dict[str, Any]:
        """Return a document with an order to pause."""
        return {"training": {"attempt": 0, "renewals": 0, "orders": [{"number": 1, "kind": "pause"}]}}


def pause(training: Training, seconds: float) -> dict[str, Any]:
    """Pause for some time; returns the kernels and the use of the GPU meanwhile."""
    run = training.run
    layout, timeout = run.layout, datetime.timedelta(minutes=run.config.parallel.distributed_timeout_minutes)
    control = TrainingControl(
        ControlGroup(control_store(), layout.global_rank, layout.global_world_size, timeout),
        OrderReader(PausePage(), attempt=0) if layout.global_rank == 0 else None,
        RankSurroundings(run.device, stop_requested=lambda: False),
        state=RUNNING,
        saves=False,
        resume_after_s=seconds,
    )
    control.at_boundary(run.state.iteration)  # posts the order
    training.trainer.step()
    training.wait()
    use: list[int] = []
    ended = threading.Event()
    watcher = threading.Thread(target=watch_gpu, args=(use, ended), daemon=True)
    watcher.start()
    activities = [torch.profiler.ProfilerActivity.CPU]
    if run.device.is_cuda:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    began_s = time.perf_counter()
    with torch.profiler.profile(activities=activities) as profile:
        control.at_boundary(run.state.iteration)
    length_s = time.perf_counter() - began_s
    ended.set()
    watcher.join()
    control.close()
    kernels = sum(event.device_type.name == "CUDA" for event in profile.events())
    return {"seconds": length_s, "kernels": kernels, "use_percent": use}


def watch_gpu(use: list[int], ended: threading.Event) -> None:
    """Note the use of this rank's GPU every second, as nvidia-smi reports it; nothing without one."""
    place = os.environ.get("LOCAL_RANK", "0")
    command = ["nvidia-smi", f"--id={place}", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits"]
    while torch.cuda.is_available() and not ended.wait(1.0):
        use.append(int(subprocess.run(command, capture_output=True, text=True, check=True).stdout))


def main() -> int:
    """Measure, print and write the result; returns 1 where the goal is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--layers", type=int, default=20)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--micro-batch", type=int, default=2)
    parser.add_argument("--batch", type=int, default=8, help="samples of a step")
    parser.add_argument("--block", type=int, default=50, help="steps of a block")
    parser.add_argument("--rounds", type=int, default=6, help="at least 6, for the bounds of medians")
    parser.add_argument("--pause", type=float, default=15.0, help="seconds of the pause")
    parser.add_argument("--flags", default="", help="further flags of the trainer, as the layout")
    parser.add_argument("--out", type=pathlib.Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    config = config_of(options)
    layout = layout_of(config)
    device = prepare_device(layout.local_rank, config.parallel.ranks_per_gpu)
    config = with_overlap(config, layout, device)
    initialize_groups(config, layout, device)
    result: dict[str, Any] = {"device": device.name, "ranks": layout.world_size, "arguments": " ".join(sys.argv[1:])}
    with tempfile.TemporaryDirectory() as name, reader(pathlib.Path(name) / SOCKET):
        os.environ |= {Env.RUN_DIR: name, Env.HUB_URL: "http://nowhere"}
        training = Training(build_run(config, layout, device, vocab_size=32000), options)
        result |= compare(training, options.rounds)
        result["pause"] = pause(training, options.pause)
        training.capture.close()
    destroy_groups()
    if layout.global_rank:
        return 0
    print(json.dumps({key: value for key, value in result.items() if key != "blocks"}, indent=1))
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    misses = result["rare"]["speed_left"] < GOAL or result["pause"]["kernels"] > 0
    return int(misses and device.is_cuda)


if __name__ == "__main__":
    sys.exit(main())
