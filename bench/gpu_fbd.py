"""MegaFBD next to plain training on the GPUs of one host, in alternating blocks of one run.

    . bench/gpu_setup.sh; python3 bench/gpu_fbd.py --out gpu_fbd.json                  # all that the GPUs allow
    python3 bench/gpu_fbd.py --only pair,equal --out pair.json                         # most important first
    python3 bench/gpu_fbd.py --only cpu --layers 4 ... --out cpu.json                  # see below
    python bench/gpu_fbd.py --cpu --tiny --gpus 4                                      # whether it runs, on CPU ranks

Experiments, in this order; each starts its gangs (processes that stay, and wait while another gang has its turn),
prints its rows as JSON as soon as it has them, and ends the gangs. One that fails is noted, and the others still run.

    pair      a forward and a backward GPU: time of a microbatch over the larger of forward and backward alone (plain
              training on each GPU); the forward pass with shipping over that without; host time of shipping a layer;
              memory of the backward GPU with more microbatches. Goals 1.06, 1.03, 0.1 ms, no growth
    equal     losses, gradient norms and gradients of the pair and of plain training in deterministic mode
    plain     whole steps of the pair, and of the same two GPUs in plain data parallelism without, with selective and
              with full recomputation
    ships     whole steps and passes of the pair with each --fbd-ship; `auto` next to `saved` in a second turn
    shared    one forward GPU for two backward ranks that share the other GPU, next to the pair: shares of the passes
              against the model, in which the shared GPU runs both backward passes in turns (and so takes 2 B for two
              microbatches, of which forward takes 2 F)
    halved    the pair and plain data parallelism while a process on the forward GPU computes all the time
    cpu       (1 GPU; only if named) forward passes on the CPU, with all its cores but two, and backward passes on the
              GPU, next to plain training with full recomputation: passes, memory, and the advice of the run. A CPU is
              slow: --layers 4 --hidden 1024 --sequence 512 --micro-batch 1 --batch 8 --counts 4,8 --blocks 5 --warm 4
    merged    (3 GPUs) one forward rank for a tensor group of two, next to plain TP2 with its three recomputations
    replicas  (3 GPUs) one forward rank for two replicas, next to plain DP3 with its three recomputations
    stages    (4 GPUs) two pairs as PP2, next to plain DP2 x PP2 with its three recomputations

`per_gpu` is samples of a step per second and GPU; `over` names ratios of it. A step is all of it: weights to the
forward rank, passes, optimizer. `passes` are those of one step without the optimizer; `microbatch_ms` is the slope
between two numbers of microbatches, which leaves out the beginning and the end of a step. Medians over blocks.
On H100 an experiment starts in 9 s and takes 12 to 17 s with 7 blocks (`pair` 38); `plain`, `merged`, `replicas` and
`stages` are three experiments each, so that there is room for the shipments next to one plain gang.
"""

import argparse
import dataclasses
import json
import pathlib
import statistics
import sys
import tempfile
from collections.abc import Callable
from typing import Any

from gpu_fbd_gangs import GangBench, RunningGang
from gpu_fbd_ranks import Figures, Gang

SWITCH = "--forward-backward-disaggregating"
PER_FORWARD = "--fbd-backward-per-forward 2"
RECOMPUTE = {
    "none": "",
    "selective": "--recompute-granularity selective",
    "full": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
}
SHARDED = "--use-distributed-optimizer"
TP2 = "--tensor-model-parallel-size 2 --sequence-parallel"
PP2 = "--pipeline-model-parallel-size 2"


def summary(ranks: dict[int, Figures], roles: dict[int, Figures]) -> Figures:
    """Return the figures of a step over all ranks: its length, the medians of passes, and memory of trained ranks."""
    trained = [figures for rank, figures in ranks.items() if roles[rank]["role"] != "forward"]
    found: Figures = {"ms": 1e3 * (max(part["ended"] for part in trained) - min(part["begun"] for part in trained))}
    for name in {name for figures in ranks.values() for name in figures if name.endswith("_ms")}:
        found[name] = max(figures[name] for figures in ranks.values() if name in figures)
    for name in ("peak_bytes", "added_bytes"):
        found[name] = max(part[name] for part in trained)
    for name in ("loss", "norm", "digest"):
        if name in trained[0]:
            found[name] = [part[name] for part in trained]
    found["log"] = trained[0]["log"]
    return found


def medians(blocks: list[Figures]) -> Figures:
    """Return the median of each number."""
    names = {name for figures in blocks for name, value in figures.items() if isinstance(value, int | float)}
    return {name: statistics.median([figures[name] for figures in blocks]) for name in sorted(names)}


def passes(gang: RunningGang, count: int) -> Figures:
    return summary(gang.command("passes", count), gang.roles)


def step(gang: RunningGang) -> Figures:
    return summary(gang.command("step"), gang.roles)


def mib(size: float) -> int:
    return round(size / 2**20)


def ring_of(gang: RunningGang) -> int:
    return int(max(role.get("ring_bytes", 0) for role in gang.roles.values()))


def microbatch_ms(found: dict[str, list[Figures]], name: str, counts: list[int]) -> float:
    """Return the milliseconds of one more microbatch, from the least and the most of them."""
    least, most = min(counts), max(counts)
    slopes = [
        (long["ms"] - short["ms"]) / (most - least)
        for short, long in zip(found[f"{name} {least}"], found[f"{name} {most}"], strict=True)
    ]
    return float(statistics.median(slopes))


def passes_of(running: dict[str, RunningGang], counts: list[int]) -> dict[str, Callable[[], Figures]]:
    return {
        f"{name} {count}": lambda gang=gang, count=count: passes(gang, count)  # type: ignore[misc]
        for name, gang in running.items()
        for count in counts
    }


@dataclasses.dataclass(frozen=True)
class Experiment:
    """Gangs, and what is made of their figures."""

    gpus: int
    gangs: list[Gang]
    rows: Callable[[GangBench, dict[str, RunningGang]], list[Figures]]


def pair_gang(name: str = "pair", flags: str = "", **options: Any) -> Gang:  # noqa: ANN401 - fields of Gang
    return Gang(name, 2, f"{SWITCH} {flags}", 2, **options)


def pair_rows(bench: GangBench, running: dict[str, RunningGang]) -> list[Figures]:
    options = bench.options
    found = bench.alternate(passes_of(running, options.counts))
    most = max(options.counts)
    alone = {name: medians(found[f"{name} {most}"]) for name in running}
    forward, backward = alone["plain on forward GPU"]["forward_ms"], alone["plain on backward GPU"]["backward_ms"]
    pair = microbatch_ms(found, "pair", options.counts)
    shipped, issue = alone["pair"]["forward_ms"], alone["pair"]["issue_ms"]
    rows = [
        {
            "forward_ms": round(forward, 3),
            "backward_ms": round(backward, 3),
            "plain_microbatch_ms": round(microbatch_ms(found, "plain on backward GPU", options.counts), 3),
            "pair_microbatch_ms": round(pair, 3),
            "pair_over_larger": round(pair / max(forward, backward), 3),
            "pair_backward_ms": round(alone["pair"]["backward_ms"], 3),
            "forward_shipping_ms": round(shipped, 3),
            "forward_slowed": round(shipped / forward, 3),
            "issue_ms_per_layer": round(issue / options.layers, 4),
            "blocks": len(found[f"pair {most}"]),
        }
    ]
    for count in options.counts:
        for name in ("pair", "plain on backward GPU"):
            figures = medians(found[f"{name} {count}"])
            memory = {"peak_MiB": mib(figures["peak_bytes"]), "added_MiB": mib(figures["added_bytes"])}
            ring = mib(ring_of(running[name]))
            rows.append(
                {"gang": name, "microbatches": count, "ms": round(figures["ms"], 2), **memory, "ring_MiB": ring}
            )
    return rows


def equal_rows(bench: GangBench, running: dict[str, RunningGang]) -> list[Figures]:
    """Compare gradients of passes, then losses and norms of steps, of both gangs."""
    seen: dict[str, list[Figures]] = {name: [] for name in running}
    for name, gang in running.items():
        seen[name] += [passes(gang, bench.options.batch // bench.options.micro_batch)]
        seen[name] += [step(gang) for _ in range(bench.options.equal_steps)]
        seen[name] += [passes(gang, bench.options.batch // bench.options.micro_batch)]
    plain, pair = seen.values()
    ends = [[blocks[0]["digest"], blocks[-1]["digest"]] for blocks in (plain, pair)]
    curves = [[(each["loss"], each["norm"]) for each in blocks[1:-1]] for blocks in (plain, pair)]
    return [
        {
            "gradients_equal": ends[0] == ends[1],
            "losses_and_norms_equal": curves[0] == curves[1],
            "steps": len(curves[0]),
            "digests": ends,
            "losses": [loss[0] for loss, _ in curves[1]],
        }
    ]


def step_rows(bench: GangBench, running: dict[str, RunningGang]) -> list[Figures]:
    """Compare whole steps of gangs by samples per second and GPU."""
    found = bench.alternate(
        {name: lambda gang=gang: step(gang) for name, gang in running.items() if not gang.gang.competes}  # type: ignore[misc]
    )
    middle = {name: medians(blocks) for name, blocks in found.items()}
    speed = {
        name: 1e3 * bench.options.batch / figures["ms"] / running[name].gang.gpus for name, figures in middle.items()
    }
    rows = []
    for name, figures in middle.items():
        row = {"gang": name, "gpus": running[name].gang.gpus, "step_ms": round(figures["ms"], 2)}
        row |= {"per_gpu": round(speed[name], 3), "peak_MiB": mib(figures["peak_bytes"])}
        row |= {"ring_MiB": mib(ring_of(running[name])), "blocks": len(found[name])}
        row |= {key: round(value, 3) for key, value in figures.items() if key.endswith("_sum_ms")}
        row |= {"log": log} if (log := found[name][-1]["log"]) else {}
        row["over"] = {other: round(speed[name] / speed[other], 3) for other in speed if other != name}
        rows.append(row)
    return rows


def ship_rows(bench: GangBench, running: dict[str, RunningGang]) -> list[Figures]:
    """Compare whole steps and passes of the pair by what travels."""
    rows = step_rows(bench, running)
    found = bench.alternate(passes_of(running, bench.options.counts))
    for row in rows:
        name = row["gang"]
        figures = medians(found[f"{name} {max(bench.options.counts)}"])
        row["microbatch_ms"] = round(microbatch_ms(found, name, bench.options.counts), 3)
        row |= {key: round(figures[key], 3) for key in ("forward_ms", "backward_ms", "issue_ms")}
    return rows


def occupancy_rows(bench: GangBench, running: dict[str, RunningGang]) -> list[Figures]:
    """Compare the shares of forward and backward passes in a step with those of the model."""
    counts = bench.options.counts
    found = bench.alternate(passes_of(running, counts))
    most, rows = max(counts), []
    pair = medians(found[f"pair {most}"])
    for name, gang in running.items():
        figures, replicas = medians(found[f"{name} {most}"]), 2 if PER_FORWARD in gang.gang.flags else 1
        each = microbatch_ms(found, name, counts)
        rows.append(
            {
                "gang": name,
                "microbatches": most * replicas,
                "ms": round(figures["ms"], 2),
                "one_more_of_each_replica_ms": round(each, 3),
                "model_ms": round(replicas * max(pair["forward_ms"], pair["backward_ms"]), 3),
                "forward_share": round(figures["forward_sum_ms"] / figures["ms"], 3),
                "model_forward_share": round(pair["forward_ms"] / max(pair["forward_ms"], pair["backward_ms"]), 3),
            }
        )
    return rows


def cpu_rows(bench: GangBench, running: dict[str, RunningGang]) -> list[Figures]:
    """Return the passes of each gang, and what the pair says of itself."""
    counts = bench.options.counts
    found = bench.alternate(passes_of(running, counts))
    rows = []
    for name, gang in running.items():
        blocks = found[f"{name} {max(counts)}"]
        figures = medians(blocks)
        row = {"gang": name, "microbatch_ms": round(microbatch_ms(found, name, counts), 3)}
        row |= {key: round(figures[key], 3) for key in ("forward_ms", "backward_ms")}
        row |= {"peak_MiB": mib(figures["peak_bytes"]), "ring_MiB": mib(ring_of(gang)), "blocks": len(blocks)}
        rows.append(row | ({"log": log} if (log := blocks[-1]["log"]) else {}))
    return rows


def halved_rows(bench: GangBench, running: dict[str, RunningGang]) -> list[Figures]:
    competitor = running["competitor"]
    rows = [{**row, "competitor": False} for row in step_rows(bench, running)]
    competitor.command("busy")
    rows += [{**row, "competitor": True} for row in step_rows(bench, running)]
    competitor.command("idle")
    return rows


def wide(name: str, ours: str, plain: str, gpus: int) -> dict[str, Experiment]:
    """Return MegaFBD on three or four GPUs next to each of its plain peers; plain tensor parallelism takes two.

    One peer at a time: all of them together have no room next to the shipments.
    """
    peers = 2 if "tensor" in plain else gpus
    stages = 2 if "pipeline" in plain else 1
    forward = Gang("MegaFBD", gpus, f"{SWITCH} {ours}", gpus, stages=stages)
    return {
        f"{name}, {other}": Experiment(
            gpus,
            [forward, Gang("plain", peers, f"{plain} {flags}", peers, stages=stages)],
            step_rows,
        )
        for other, flags in RECOMPUTE.items()
    }


ALONE = [Gang("plain on backward GPU", 1, "", 1), Gang("plain on forward GPU", 1, "", 1, first_gpu=1)]
SAME_GPU = f"{SWITCH} {PER_FORWARD} --ranks-per-gpu 2 --distributed-backend gloo"
EXPERIMENTS = {
    "pair": Experiment(2, [*ALONE, pair_gang()], pair_rows),
    "equal": Experiment(2, [Gang("plain", 1, "", 1, deterministic=True), pair_gang(deterministic=True)], equal_rows),
    **{
        f"plain, {name}": Experiment(2, [pair_gang(), Gang("plain DP2", 2, f"{SHARDED} {flags}", 2)], step_rows)
        for name, flags in RECOMPUTE.items()
    },
    "ships": Experiment(
        2, [pair_gang(ship, f"--fbd-ship {ship}") for ship in ("saved", "selective", "full")], ship_rows
    ),
    "ships, auto": Experiment(2, [pair_gang(ship, f"--fbd-ship {ship}") for ship in ("saved", "auto")], ship_rows),
    "shared": Experiment(2, [pair_gang(), Gang("one forward for two on one GPU", 3, SAME_GPU, 2)], occupancy_rows),
    "halved": Experiment(
        2,
        [
            pair_gang(),
            Gang("plain DP2", 2, SHARDED, 2),
            Gang("competitor", 1, "", 1, first_gpu=1, competes=True),
        ],
        halved_rows,
    ),
    "cpu": Experiment(
        1,
        [
            Gang("plain", 1, RECOMPUTE["full"], 1),
            Gang("forward on the CPU", 2, f"{SWITCH} --fbd-ship full --fbd-forward-on-cpu", 1),
        ],
        cpu_rows,
    ),
    **wide("merged", f"{TP2} --ignore-forward-tensor-parallel", TP2, 3),
    **wide("replicas", f"{SHARDED} {PER_FORWARD}", SHARDED, 3),
    **wide("stages", PP2, f"{PP2} {SHARDED}", 4),
}
ONLY_NAMED = {"cpu"}
"""Experiments that need sizes of their own: a CPU is slow."""
TINY: dict[str, Any] = {
    "layers": 2,
    "hidden": 64,
    "heads": 4,
    "sequence": 32,
    "vocabulary": 120,
    "blocks": 2,
    "warm": 1,
}
TINY |= {"counts": [2, 4], "batch": 24, "micro_batch": 2, "equal_steps": 2}


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in {"hidden": 2048, "heads": 16, "sequence": 2048, "vocabulary": 32768}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--layers", type=int, default=10, help="of each stage")
    parser.add_argument("--micro-batch", type=int, default=4, metavar="N", help="samples of a microbatch (default: 4)")
    parser.add_argument("--batch", type=int, default=48, help="samples of a step")
    parser.add_argument("--counts", type=lambda text: [int(part) for part in text.split(",")], default=[4, 8, 12])
    parser.add_argument("--blocks", type=int, default=10)
    parser.add_argument("--warm", type=int, default=10, help="turns before the first block; `auto` chooses after nine")
    parser.add_argument("--equal-steps", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=480.0, help="no block and no experiment begins later")
    parser.add_argument("--only", default="", help="names of experiments, separated by commas")
    parser.add_argument("--gpus", type=int, help="default: all")
    parser.add_argument("--cpu", action="store_true", help="CPU ranks in the place of GPUs")
    parser.add_argument("--tiny", action="store_true", help="a toy model, and two blocks")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("gpu_fbd.json"))
    options = parser.parse_args()
    if options.tiny:
        vars(options).update(TINY)
    return options


def main() -> int:
    options = parsed()
    if options.gpus is None:
        import torch

        options.gpus = torch.cuda.device_count()
    given = options.only.split(",") if options.only else {name.split(",")[0] for name in EXPERIMENTS} - ONLY_NAMED
    names = [name for name in EXPERIMENTS if name.split(",")[0] in given]
    if all(EXPERIMENTS[name].gpus > options.gpus for name in names):
        print(f"skipped: {options.gpus} GPUs are too few; two are needed for most, or --cpu --gpus 2")
        return 0
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        bench = GangBench(options, pathlib.Path(directory))
        try:
            for name in names:
                if EXPERIMENTS[name].gpus > options.gpus or bench.is_over:
                    reason = "time is over" if bench.is_over else f"needs {EXPERIMENTS[name].gpus} GPUs"
                    print(json.dumps({"experiment": name, "skipped": reason}), flush=True)
                    continue
                bench.run(name, EXPERIMENTS[name].gangs, EXPERIMENTS[name].rows)
        finally:
            bench.close()
    return 1 if any("failed" in found for name, found in bench.results.items() if name in EXPERIMENTS) else 0


if __name__ == "__main__":
    sys.exit(main())
