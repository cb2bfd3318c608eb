"""Cost of capturing: tokens per second of our decode loop without MegaScope, with it idle, and capturing, on one GPU.

    python bench/gpu_capture.py --out gpu_capture.json

One engine generates with random weights of a model of Llama's shape (1.26 billion parameters in bf16), sampling, always
from the same prompts. Blocks of one call each take turns; each block is compared with that of the same round
without a watcher, and the ratios are judged. Frames go through a Unix socket to another process that reads them. Before
that it is shown that no forward pass waits for the device while it is captured, and that the tokens are the same.

    none     no watcher
    idle     armed: the session is attached, and no page is open
    lite     preset lite
    summary  preset default: pixels, norms, all heads' measures, PCA
    pinned   the same and attention rows of 8 heads
    at once  with --at-once, summary and pinned again: nothing is deferred to the waits of steps
    parts    with --parts, summary again: "unsent" builds and sends no frames, "unreduced" computes no reductions of
             decode steps either, so that hooks, bookkeeping and copies are left

Shares are given of whole calls, which are judged, and of their two parts: up to the first tokens, and from there on.

A small model on a CPU shows that the script works:
    python bench/gpu_capture.py --layers 2 --hidden 64 --heads 4 --key-heads 2 --ffn 128 --vocabulary 512 --new 16 \
        --prompt 32 --rounds 6
"""

import argparse
import contextlib
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from gpu_generate import WAITS, Bench, flags, median_bounds, options_of, prompts_of

from megatronapp_common.frames import FrameType
from megatronapp_common.scope.protocol import SOCKET, Tensor, build_frame
from megatronapp_common.scope.protocol_requests import CaptureSettings
from megatronapp_trainer.config import parse
from megatronapp_trainer.device import prepare_device
from megatronapp_trainer.hooks.forward_observer import Segment
from megatronapp_trainer.inference.build import build_model, generation_layout
from megatronapp_trainer.inference.engine import Engine
from megatronapp_trainer.inference.events import TokenEvent
from megatronapp_trainer.inference.gc_freeze import freeze_gc
from megatronapp_trainer.inference.request import GenerationRequest
from megatronapp_trainer.inference.step_plan import OutputRequest, StepPlan
from megatronapp_trainer.inference.worker_group import WorkerGroup
from megatronapp_trainer.parallel.groups import destroy_groups, initialize_groups
from megatronapp_trainer.scope.assemble import RankScope, open_scope
from megatronapp_trainer.scope.capture.commands import BeginRun, EndRun
from megatronapp_trainer.scope.coordinator import CaptureCoordinator
from megatronapp_trainer.scope.transfer.device_copy import PackedBuffer
from megatronapp_trainer.serve.scope.capture_controller import CaptureController

GOALS = {"idle": 0.995, "lite": 0.95, "summary": 0.95, "pinned": 0.90}
"""Least share of tokens per second that is left."""
AT_ONCE = {f"{way} at once": GOALS[way] for way in ("summary", "pinned")}
PARTS = {f"summary {part}": GOALS["summary"] for part in ("unsent", "unreduced")}
READER = """
import socket, sys
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
listener.listen()
print("ready", flush=True)
total = 0
peer, _ = listener.accept()
while data := peer.recv(1 << 20):
    total += len(data)
print(total, flush=True)
"""


class Ways:
    """One engine, and the ways to generate with it."""

    def __init__(self, bench: Bench, batch: int, folder: pathlib.Path) -> None:
        self.bench = bench
        self.batch = batch
        self.gang: WorkerGroup
        self.engine: Engine
        self.gang, self.engine = bench.open(batch)
        self.scope: RankScope = open_scope(self.gang, folder, attempt=0)
        self.leader = CaptureCoordinator(self.engine, self.scope.capture, self.scope.publisher.post)
        self.controller = CaptureController(self.leader, self.engine.defer)
        self.leader.set_basis(self._basis())
        self.prompts = prompts_of(bench.options, batch).tolist()
        self._count = 0
        self._first_s = 0.0
        self._reduced: PackedBuffer | None = None
        self._replay = self.scope.capture._replay_reductions

    def captures(self) -> dict[str, CaptureSettings]:
        options = self.bench.options
        heads = [{"layer": index * options.layers // 8, "head": index % options.heads} for index in range(8)]
        unique = [dict(pair) for pair in {tuple(head.items()): None for head in heads}]
        pinned = CaptureSettings.model_validate({"pinned": unique})
        return {"lite": CaptureSettings(preset="lite"), "summary": CaptureSettings(), "pinned": pinned}

    def generate(self, way: str) -> list[int]:
        """Tokens of one call."""
        is_at_once = way in AT_ONCE or not self.bench.device.is_cuda
        self.scope.capture._deferred.set_scheduler(None if is_at_once else self.gang.idle_window.defer)
        self._leave_out(way)
        way = way.removesuffix(" at once") if way not in PARTS else "summary"
        self.gang.runner.observer = None if way == "none" else self.scope.capture
        requests = [
            GenerationRequest(id=str(place), prompt=tuple(ids), max_new_tokens=self.bench.options.new, seed=place)
            for place, ids in enumerate(self.prompts)
        ]
        if way in (captures := self.captures()):
            self._count += 1
            requests = self.leader.begin_run(f"{self._count:012x}", captures[way], requests)
        for request in requests:
            self.engine.submit(request)
        tokens: list[int] = []
        while self.engine.is_busy:
            events = self.engine.step()
            if way not in {"none", "idle"}:
                self.controller.observe(events)
            tokens += [event.token for event in events if isinstance(event, TokenEvent)]
            if len(tokens) <= self.batch:
                self._first_s = time.perf_counter()
        assert len(tokens) == self.batch * self.bench.options.new
        return tokens

    def _leave_out(self, way: str) -> None:
        """Let the capture send nothing, or reduce nothing as well, where the way says so."""
        capture: Any = self.scope.capture
        capture._sink = (lambda _job: None) if way in PARTS else self.scope.publisher.post
        if way != "summary unreduced":
            self._reduced = None
            capture._replay_reductions = self._replay
            return

        def first(*arguments: Any) -> PackedBuffer:  # noqa: ANN401
            self._reduced = self._reduced or self._replay(*arguments)
            return self._reduced

        capture._replay_reductions = first

    def seconds(self, way: str) -> tuple[float, float]:
        """Return the seconds up to the first tokens, and from there on."""
        self.bench.wait()
        began_s = time.perf_counter()
        self.generate(way)
        self.bench.wait()
        return self._first_s - began_s, time.perf_counter() - self._first_s

    def _basis(self) -> Any:  # noqa: ANN401 - Frame
        layers, hidden = self.bench.options.layers, self.bench.options.hidden
        source = np.random.default_rng(0)
        mean = source.standard_normal((layers, hidden), dtype=np.float32)
        axes = source.standard_normal((layers, 8, hidden), dtype=np.float32)
        header = {"version": 1, "layers": list(range(layers))}
        return build_frame(FrameType.SCOPE_BASIS, header, [Tensor("mean", "f32", mean), Tensor("basis", "f32", axes)])


@contextlib.contextmanager
def reader(path: pathlib.Path) -> Iterator["subprocess.Popen[str]"]:
    """Another process that reads all frames."""
    with subprocess.Popen([sys.executable, "-c", READER, str(path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        try:
            yield process
        finally:
            process.terminate()


def check_no_waits(ways: Ways, way: str) -> dict[str, int]:
    """Decode steps and chunks of prompts where torch raises if the host waits, and a profile of decode steps."""
    bench, batch, session = ways.bench, ways.batch, ways.scope.capture
    length, run = bench.options.prompt, f"{way:f>12}"
    session.commands.handle(BeginRun(run=run, capture=ways.captures()[way], lengths=(length,) * batch))
    ways.gang.runner.observer = session
    prompts = tuple(
        Segment(slot=slot, start=0, tokens=tuple(ids), request_id=f"{run}-{slot}")
        for slot, ids in enumerate(ways.prompts)
    )
    reading = StepPlan(segments=prompts, outputs=(OutputRequest(row=0),), decode=False)
    newest = [Segment(slot=slot, start=length, tokens=(1,), request_id=f"{run}-{slot}") for slot in range(batch)]
    plan = StepPlan(segments=tuple(newest), outputs=tuple(OutputRequest(row=row) for row in range(batch)), decode=True)
    for mode in (reading, plan, plan):
        ways.gang.runner.run(mode)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for mode in (reading, *[plan] * 5):
            ways.gang.runner.run(mode)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    bench.wait()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile, torch.profiler.record_function("steps"):
        for _ in range(5):
            ways.gang.runner.run(plan)
    session.commands.handle(EndRun(run=run))
    events = list(profile.events())
    (span,) = [event.time_range for event in events if event.name == "steps" and event.device_type.name == "CPU"]
    inside = [event for event in events if span.start <= event.time_range.start < span.end]
    waits = sum(event.name in WAITS for event in inside)
    assert waits == 0, f"{way}: {waits} waits inside of 5 forward passes"
    return {"forward_passes": 5, "waits": waits, "graph_launches": sum(e.name == "cudaGraphLaunch" for e in inside)}


def compare(ways: Ways, rounds: int, goals: dict[str, float]) -> dict[str, Any]:
    """Blocks of all ways in turn, each round in another order."""
    names = ["none", *goals]
    expected = ways.generate("none")
    for name in [*names, *names]:  # graphs, compilation
        assert ways.generate(name) == expected, f"{name}: other tokens"
    freeze_gc()
    blocks: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for place in range(rounds):
        shift = place % len(names)
        for name in (names[shift:] + names[:shift])[:: 1 if place % 2 else -1]:
            blocks[name].append(ways.seconds(name))
    tokens = ways.batch * ways.bench.options.new
    speeds = {name: tokens / statistics.median(map(sum, times)) for name, times in blocks.items()}
    row: dict[str, Any] = {"tokens_per_s": speeds}
    for name, goal in goals.items():
        pairs = list(zip(blocks["none"], blocks[name], strict=True))
        fractions = [sum(none) / sum(way) for none, way in pairs]
        low, high = median_bounds(fractions)
        prompts, decode = (statistics.median(none[part] / way[part] for none, way in pairs) for part in (0, 1))
        row[name] = {"share_left": statistics.median(fractions), "low": low, "high": high, "goal": goal}
        row[name] |= {"prompts": prompts, "decode": decode}
    return row | {"seconds": blocks}


def goals_of(options: argparse.Namespace) -> dict[str, float]:
    """Return the goals of the measurements to run."""
    return GOALS | (AT_ONCE if options.at_once else {}) | (PARTS if options.parts else {})


def measure(bench: Bench, batch: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        with reader(folder / SOCKET) as process:
            ways = Ways(bench, batch, folder)
            row: dict[str, Any] = {}
            if bench.device.is_cuda:
                row["waits"] = {way: check_no_waits(ways, way) for way in ways.captures()}
                print(f"batch {batch}, waits: {json.dumps(row['waits'])}", flush=True)
            row |= compare(ways, bench.options.rounds, goals_of(bench.options))
            row["dropped_frames"] = ways.scope.publisher.dropped
            row["failures"] = list(ways.scope.publisher.failures)
            ways.scope.publisher.close(timeout_s=10)
            assert process.stdout is not None
            row["sent_bytes"] = int(process.stdout.readline())
    return row


def work(options: argparse.Namespace) -> dict[str, Any]:
    device = prepare_device(0)
    config = parse(flags(options, bf16=device.is_cuda))
    layout = generation_layout(config)
    initialize_groups(config, layout, device)
    model = build_model(config, layout, device, vocab_size=options.vocabulary)
    bench = Bench(options=options, config=config, layout=layout, device=device, model=model, theirs=None)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    results: dict[str, Any] = {"device": device.name, "torch": torch.__version__, "parameters": parameters}
    print(f"{device.name}: {parameters / 1e9:.2f} billion parameters", flush=True)
    for batch in options.batches:
        results[f"batch {batch}"] = row = measure(bench, batch)
        options.out.write_text(json.dumps(results, indent=1), encoding="utf-8")
        print(f"batch {batch}: {row['tokens_per_s']['none']:.1f} tokens/s without a watcher", flush=True)
        for name in goals_of(options):
            measured = row[name]
            bounds = f"(95 %: {measured['low']:.4f} to {measured['high']:.4f})"
            parts = f"prompts {measured['prompts']:.3f}, decode {measured['decode']:.4f}"
            left = f"{measured['share_left']:.4f} {bounds}, goal {measured['goal']}; {parts}"
            print(f"batch {batch}, {name}: {left}", flush=True)
        print(f"batch {batch}: {row['sent_bytes']} bytes sent, {row['dropped_frames']} frames dropped", flush=True)
    destroy_groups()
    return results


def main() -> int:
    options = options_of(__doc__, "rounds", "gpu_capture.json", "--at-once", "--parts")
    warnings.filterwarnings("ignore", category=FutureWarning)
    work(options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
