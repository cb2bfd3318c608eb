"""Speed of layouts with CUDA graphs and without, on the GPUs of one host, next to one GPU in the same run.

    python bench/gpu_graph_layouts.py TP2 TP2-SP --out tensor.json
    python bench/gpu_graph_layouts.py PP2 PP2x2 --out pipeline.json
    python bench/gpu_graph_layouts.py MegaDPP --out megadpp.json
    python bench/gpu_graph_layouts.py DP2 DP2-serial --out data.json

Each layout runs in new processes, first of all one GPU. Arms of a layout take turns in blocks of steps on the same
data: all parts of the trainer's speed off, all but the graphs, and all with `--cuda-graph-impl local`. (MegaDPP's arms
run one after another.) For each arm: the median block, TFLOP/s per GPU by both counts of attention, that rate over the
rate of one GPU with graphs, the same without the bubble of the static schedule, the share of passes whose host was not
ahead of the device, the memory reserved, and the losses. In a pipeline, devices that wait for
an input are among these, too. A layout that fails is reported, and the others continue.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

import torch
import torch.distributed as dist
from gpu_layouts import Losses, Samples, arguments, free_port
from gpu_speed import OFF, block, idle_fraction
from plain_megatron import Layout, Shape

from megatronapp_trainer.config import parse
from megatronapp_trainer.data.microbatches import DataIterators
from megatronapp_trainer.device import Device, prepare_device
from megatronapp_trainer.launch.ranks.connections import CONNECTIONS, device_connections
from megatronapp_trainer.parallel.groups import destroy_groups, initialize_groups
from megatronapp_trainer.pipeline.schedule import PipelineSchedule
from megatronapp_trainer.training.build import build_run, build_schedule, layout_of, with_overlap
from megatronapp_trainer.training.loop import Trainer
from megatronapp_trainer.training.metrics import flops_per_token, flops_per_token_full_attention
from megatronapp_trainer.training.signals import StopRequest

WARM, ROUNDS, BLOCK = 6, 5, 4
PATIENCE_S = 400.0
"""Longest time of the processes of a layout."""
SINGLE = "one GPU"
NO_GRAPHS, GRAPHS = "no graphs", "graphs"
ARMS = {
    "all off": [flag for flags in OFF.values() for flag in flags],
    NO_GRAPHS: ["--cuda-graph-impl", "none"],
    GRAPHS: ["--cuda-graph-impl", "local"],
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class GraphCase:
    """A layout, and flags besides."""

    layout: Layout = dataclasses.field(default_factory=Layout)
    gpus: int = 2
    flags: tuple[str, ...] = ()
    alternates: bool = True
    """Its arms exist in the same processes."""


CASES = {
    SINGLE: GraphCase(gpus=1),
    "TP2": GraphCase(layout=Layout(tensor=2)),
    "TP2-SP": GraphCase(layout=Layout(tensor=2), flags=("--sequence-parallel",)),
    "PP2": GraphCase(layout=Layout(pipeline=2)),
    "PP2x2": GraphCase(layout=Layout(pipeline=2, chunks=2)),
    "MegaDPP": GraphCase(layout=Layout(pipeline=2), flags=("--use-dpp",), alternates=False),
    "DP2": GraphCase(),
    "DP2-serial": GraphCase(flags=("--no-overlap-data-parallel",)),
}


class LayoutArm:
    """A training of a layout that is ready to step, and what was measured of it."""

    def __init__(self, name: str, shape: Shape, case: GraphCase, device: Device, samples: Samples) -> None:
        config = parse([*arguments(shape, case.layout, "torch", 10_000), *case.flags, *ARMS[name]])
        layout = layout_of(config)
        config = with_overlap(config, layout, device)
        before = torch.cuda.memory_reserved()
        run = build_run(config, layout, device, vocab_size=shape.vocabulary)
        self.name = name
        self.losses = Losses()
        self.schedule: PipelineSchedule = build_schedule(run)
        feed = samples.batches(layout.data_size, layout.data_rank)
        iterators = DataIterators(train=feed, valid=None, test=None)
        stop = StopRequest()
        trainer = Trainer(run, iterators, self.schedule, stop_request=stop, reporter=self.losses)  # type: ignore[arg-type]
        self.step = trainer.step
        self.blocks_s: list[float] = []
        self.found: dict[str, Any] = {}
        tokens, vocabulary = shape.global_batch * shape.sequence, run.padded_vocab_size
        self.tera_per_gpu = {
            "tflops_per_gpu": flops_per_token(config.model, vocabulary) * tokens / layout.world_size / 1e12,
            "tflops_per_gpu_full_attention": flops_per_token_full_attention(config.model, vocabulary)
            * tokens
            / layout.world_size
            / 1e12,
        }
        self.block(WARM)
        self.memory_bytes = torch.cuda.memory_reserved() - before

    def block(self, steps: int) -> float:
        """Return the mean seconds of some steps in a row, begun by all ranks together."""
        dist.barrier()
        return block(self, steps)  # type: ignore[arg-type] # it only steps

    def results(self) -> dict[str, Any]:
        seconds = statistics.median(self.blocks_s)
        return {
            "step_ms": seconds * 1e3,
            "blocks_ms": [value * 1e3 for value in self.blocks_s],
            **{name: value / seconds for name, value in self.tera_per_gpu.items()},
            "memory_gib": self.memory_bytes / 2**30,
            **self.found,
            "losses": self.losses.values,
        }


def work(options: argparse.Namespace) -> None:
    """Measure the arms of a case on this rank, in the same order as its peers; the last rank writes what it found."""
    case, shape = CASES[options.rank_of], shape_of(options)
    samples = Samples(shape)
    os.environ[CONNECTIONS] = device_connections([*arguments(shape, case.layout, "torch", 1), *case.flags])
    device = prepare_device(int(os.environ["LOCAL_RANK"]))
    config = parse([*arguments(shape, case.layout, "torch", 1), *case.flags])
    initialize_groups(config, layout_of(config), device)
    arms = [LayoutArm(name, shape, case, device, samples) for name in options.arms]
    for number in range(ROUNDS):
        for arm in arms if number % 2 else reversed(arms):
            arm.blocks_s.append(arm.block(BLOCK))
    for arm in arms:
        dist.barrier()
        arm.found["passes_host_not_ahead"] = idle_fraction(arm)  # type: ignore[arg-type] # it only steps
    if dist.get_rank() == dist.get_world_size() - 1:
        found = {arm.name: arm.results() for arm in arms}
        options.out.write_text(json.dumps({"device": torch.cuda.get_device_name(), "arms": found}), encoding="utf-8")
    for arm in arms:
        arm.schedule.close()
    arms.clear()
    destroy_groups()


def shape_of(options: argparse.Namespace) -> Shape:
    return Shape(layers=options.layers, global_batch=options.global_batch)


def measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run the ranks of a case. Returns its arms; raises RuntimeError if a rank fails or takes too long."""
    case = CASES[name]
    groups = [list(ARMS)] if case.alternates else [[arm] for arm in ARMS]
    found: dict[str, Any] = {}
    for arms in groups:
        with tempfile.TemporaryDirectory() as folder:
            out = pathlib.Path(folder, "arms.json")
            run_ranks(name, case.gpus, arms, out, options)
            result = json.loads(out.read_text(encoding="utf-8"))
        found |= result["arms"]
    return {"device": result["device"], "gpus": case.gpus, "efficiency": efficiency(case, options), "arms": found}


def run_ranks(name: str, gpus: int, arms: list[str], out: pathlib.Path, options: argparse.Namespace) -> None:
    world = {"WORLD_SIZE": str(gpus), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    shared = os.environ | world | {"OMP_NUM_THREADS": "4"}
    command = [sys.executable, __file__, "--rank-of", name, "--out", str(out), "--arms", *arms]
    command += ["--layers", str(options.layers), "--global-batch", str(options.global_batch)]
    ranks = [
        subprocess.Popen(command, env=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(gpus)
    ]
    deadline = time.monotonic() + PATIENCE_S
    while any(rank.poll() is None for rank in ranks):
        if time.monotonic() > deadline or any(rank.poll() for rank in ranks):
            for rank in ranks:
                rank.kill()
        time.sleep(0.2)
    codes = [rank.wait() for rank in ranks]
    if any(codes):
        raise RuntimeError(f"{name} {arms}: the ranks ended with {codes}")


def efficiency(case: GraphCase, options: argparse.Namespace) -> float:
    """Return the share of a step in which a rank of the static schedule has passes to run."""
    stages, chunks = case.layout.pipeline, case.layout.chunks
    passes: int = chunks * options.global_batch // shape_of(options).microbatch
    return passes / (passes + stages - 1)


def show(name: str, found: dict[str, Any], single: dict[str, Any] | None) -> None:
    print(f"\n{name}, {found['gpus']} x {found['device']}")
    print("arm              ms  TFLOP/s   full of one -bubble  idle    GiB      loss")
    for arm, row in found["arms"].items():
        ratio = float("nan")
        if single is not None:
            ratio = row["tflops_per_gpu"] / single["arms"][GRAPHS]["tflops_per_gpu"]
        print(
            f"{arm:10} {row['step_ms']:8.1f} {row['tflops_per_gpu']:8.1f} {row['tflops_per_gpu_full_attention']:6.1f} "
            f"{ratio:6.3f} {ratio / found['efficiency']:7.3f} {row['passes_host_not_ahead']:5.2f} "
            f"{row['memory_gib']:6.1f} {row['losses'][WARM + ROUNDS * BLOCK - 1]:9.5f}"
        )
    off, on = (found["arms"][arm]["step_ms"] for arm in (NO_GRAPHS, GRAPHS))
    print(f"graphs over no graphs: {off / on:.3f}", flush=True)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=[], metavar="LAYOUT", help=f"of {', '.join(CASES)}; default: all")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--global-batch", type=int, default=16)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("gpu_graph_layouts.json"))
    parser.add_argument("--rank-of", choices=CASES, help=argparse.SUPPRESS)
    parser.add_argument("--arms", nargs="*", default=list(ARMS), choices=ARMS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if unknown := set(options.cases) - set(CASES):
        parser.error(f"there is no layout {', '.join(sorted(unknown))}; take some of: {', '.join(CASES)}")
    return options


def main() -> int:
    options = parsed()
    if options.rank_of is not None:
        work(options)
        return 0
    cases = [name for name in options.cases or CASES if name != SINGLE]
    found: dict[str, Any] = {"torch": torch.__version__, "shape": dataclasses.asdict(shape_of(options)), "cases": {}}
    failed = []
    for name in (SINGLE, *cases):
        try:
            found["cases"][name] = measure(name, options)
        except RuntimeError as error:
            failed.append(name)
            print(error, flush=True)
        else:
            show(name, found["cases"][name], found["cases"].get(SINGLE))
        options.out.write_text(json.dumps(found, indent=1), encoding="utf-8")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
