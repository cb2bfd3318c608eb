"""Cost of a traced step for the thread that trains, on a rank with tensor parallelism.

    python bench/bench_trace_host.py [--layers 20] [--microbatches 4]

The observer of the trainer, with its ring and the native recorder on a simulated driver, gets the calls of a step, with
ten collectives of each layer and microbatch, which here do nothing. Compared are blocks of steps with the observer and
without, in turns; processor time of the thread, medians. A GPU adds two calls of its driver to each span.
"""

import argparse
import json
import pathlib
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.tensor_parallel import layers as tensor_layers

from megatronapp_common.shared_documents import DocumentReader, DocumentWriter
from megatronapp_common.trace import NO_MICROBATCH, RecordKind
from megatronapp_native import DeviceRecorder, RingReader, RingWriter, StopMeter, monotonic_ns, run_queue_ns
from megatronapp_trainer.hooks.step_observer import StepMetrics
from megatronapp_trainer.parallel.layout import Layout
from megatronapp_trainer.scan.device import DeviceRecorder as TrainerRecorder
from megatronapp_trainer.scan.faults import FaultPlan
from megatronapp_trainer.scan.garbage import GarbageListener
from megatronapp_trainer.scan.metadata import Communicator
from megatronapp_trainer.scan.observer import ScanObserver
from megatronapp_trainer.scan.windows.layer_spans import LayerSpans
from megatronapp_trainer.scan.windows.plan import WindowPlan
from megatronapp_trainer.scan.windows.recorder import WindowRecorder
from megatronapp_trainer.scan.windows.tensor_collectives import TensorCollectives

ROOT = pathlib.Path(__file__).resolve().parent.parent
BLOCKS = 40
STEPS = 25
"""Steps of a block; their spans are fewer than the queue of the recorder holds."""
FORWARD_CALLS, BACKWARD_CALLS = 4, 6
"""Collectives of a layer with sequence parallelism."""
METRICS = StepMetrics(
    iteration=1,
    loss=1.0,
    learning_rate=1e-4,
    grad_norm=1.0,
    tokens_per_second=1.0,
    tflops_per_gpu=1.0,
    mfu=None,
    consumed_samples=1,
    skipped=False,
)
AFTER_PASSES = (RecordKind.EMBED_REDUCE, RecordKind.GRAD_NORM, RecordKind.OPTIMIZER, RecordKind.LOSS_REDUCE)


class TracedRank:
    """A rank's observer and ring, without a training."""

    def __init__(self, folder: pathlib.Path, group: Any) -> None:  # noqa: ANN401 - compared by identity alone
        library = folder / "libsimulated_cuda.so"
        source = ROOT / "tests" / "support" / "training" / "simulated_cuda.c"
        subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", library, source, "-lpthread"], check=True)
        self.ring = RingWriter(str(folder / "ring"), 65536, 0, b"{}")
        self.reader = RingReader(str(folder / "ring"))
        plan = FaultPlan(0, [])
        recorder = TrainerRecorder(
            self.ring,
            native=DeviceRecorder(self.ring, 0, str(library)),
            current_stream=lambda: 0,
            monotonic_ns=monotonic_ns,
            run_queue_ns=run_queue_ns,
            on_length=lambda kind, _flags, own_ns: plan.observe(kind, own_ns),
        )
        page = folder / "control"
        DocumentWriter(page).write({})
        self.observer = ScanObserver(
            recorder=recorder,
            table=[Communicator(slot=0, kind="tp", members=(0, 1))],
            plan=plan,
            control=DocumentReader(page),
            stall=lambda _ns: None,
            host_stall=lambda _ns: None,
            layout=Layout(rank=0, world_size=2, local_rank=0, tensor_size=2, pipeline_size=1, virtual_size=1),
            stops=StopMeter(),
            garbage=GarbageListener(monotonic_ns=monotonic_ns),
            windows=WindowRecorder(
                WindowPlan([0, 1], None),
                collectives=TensorCollectives(recorder, group, 0),
                layers=LayerSpans(recorder, []),
            ),
        )


def step(observer: ScanObserver | None, number: int, microbatches: int, layers: int, call: Callable[[], None]) -> None:
    """Run the calls of a step."""
    if observer is None:
        for _ in range(microbatches * layers * (FORWARD_CALLS + BACKWARD_CALLS)):
            call()
        return
    observer.step_begin(number)
    for microbatch in range(microbatches):
        observer.begin(RecordKind.DATA, 0, microbatch)
        observer.end(RecordKind.DATA)
        for kind, calls in ((RecordKind.FORWARD, FORWARD_CALLS), (RecordKind.BACKWARD, BACKWARD_CALLS)):
            observer.begin(kind, 0, microbatch)
            for _ in range(layers * calls):
                call()
            observer.end(kind)
    for kind in AFTER_PASSES:
        observer.begin(kind, 0, NO_MICROBATCH)
        observer.end(kind)
    observer.step_end(METRICS)


def block_ns(
    observer: ScanObserver | None, options: argparse.Namespace, layers: int, call: Callable[[], None]
) -> float:
    """Return the processor time of a step in ns."""
    began_ns = time.thread_time_ns()
    for number in range(STEPS):
        step(observer, number, options.microbatches, layers, call)
    return (time.thread_time_ns() - began_ns) / STEPS


def measure(options: argparse.Namespace, folder: pathlib.Path) -> dict[str, float]:
    """Return medians in ns, and the records of a step."""
    group, tensor = object(), torch.zeros(8)
    original = tensor_layers.dist_all_gather_func
    tensor_layers.dist_all_gather_func = lambda *_arguments, **_named: None

    def call() -> None:
        tensor_layers.dist_all_gather_func(tensor, tensor, group=group)

    without = [block_ns(None, options, options.layers, call) for _ in range(BLOCKS)]
    rank = TracedRank(folder, group)
    traced: dict[int, list[float]] = {options.layers: [], 1: []}
    for _ in range(BLOCKS):
        for layers, blocks in traced.items():
            before = rank.reader.info().head
            blocks.append(block_ns(rank.observer, options, layers, call))
            while rank.reader.info().head == before:
                time.sleep(0.001)
            time.sleep(0.01)
    records = rank.reader.info().head / (2 * BLOCKS * STEPS)
    rank.observer.close()
    tensor_layers.dist_all_gather_func = original
    calls = statistics.median(without)
    step_ns = statistics.median(traced[options.layers]) - calls
    return {
        "records_of_a_step": records,
        "traced_step_us": round(step_ns / 1e3, 2),
        "of_it_spans_us": round((statistics.median(traced[1]) - calls / options.layers) / 1e3, 2),
        "untraced_collective_ns": round(calls / options.microbatches / options.layers / 10, 1),
    }


def main() -> None:
    """Print one JSON line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--layers", type=int, default=20)
    parser.add_argument("--microbatches", type=int, default=4)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        print(json.dumps(measure(options, pathlib.Path(folder))))


if __name__ == "__main__":
    main()
