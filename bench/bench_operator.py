"""The operator at scale, compared with Kubernetes' own Job controller: a real API server, nodes and pods of kwok.

    python bench/bench_operator.py                            # all sizes, about 25 minutes on two quiet cores
    python bench/bench_operator.py --sizes 20,20              # a trial
    python bench/bench_operator.py --only gangs,small,peers   # some of the phases

Phases: gangs (one job of 1,000 pods from apply to all running, and its restart after one pod failed; with and without
hub and agents), scheduled (the same with the real scheduler), small (1,000 jobs of one pod), peers (gang, restart and
small jobs by JobSet and by Kubeflow Trainer, without hubs), large (5 gangs, and the operator killed; 10 gangs, and its
memory), idle (a tenth of the jobs, with a hub each: requests
in ten minutes without any change), and, only if it is named, turns (the small jobs by the operator, with and without
hubs, and by the peers, --rounds times in turns: for a computer whose load changes). The other side is an Indexed Job
with the same pods, by kube-controller-manager with a client of 20 and of 200 requests a second; it has no restart of
the gang to compare with.
Peers are those of operator_peers.py: their cost is that of all their controllers, with the Job controller at 200.
scripts/kube_tools.sh builds each program the first time, the peers in eleven minutes of processor time.
Every phase and side has a fresh API server with the same nodes, and has run one small job before. Pods are given to
nodes by a binder of the bench, except in "scheduled"; kwok says that their containers run, and never that they end.
Running is counted on pods: an open watch of the bench sees the last of them.

Prints a table, then one line of JSON. Exit code 1 if a goal is missed; goals hold for the full sizes only.
"""

import argparse
import asyncio
import dataclasses
import json
import os
import pathlib
import platform
import sys
import time
from collections.abc import AsyncIterator, Iterator

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests" / "support"), str(ROOT / "tests" / "support" / "control_plane")]

from operator_peers import Peer  # noqa: E402 - found by the path above
from operator_phases import Measured, Side, idle, large, many_jobs, single_gang  # noqa: E402

PHASES = ("gangs", "scheduled", "small", "peers", "large", "idle")
ALTERNATING = "turns"
RATES = (200, 20)
GANGS, MORE_GANGS = 5, 5
FULL = 1000
GOALS_S = {
    "one job": 60.0,
    "gang restart": 60.0,
    "jobs of one pod": 120.0,
    "operator killed, its lease gone": 30.0,
    "operator killed, its lease left": 25.0,
}
GOAL_HUBS_S = 100.0
"""Seconds for all small jobs with a hub each."""
GOAL_CPU_MS = 3.0
"""CPU time of the operator for each pod of one job without a hub."""
GOAL_MIB = 512.0
GOAL_RATIO = 1.2
RATIO_PHASE = "one job"
SMALL_PHASE = "jobs of one pod"


def main() -> int:
    options = parse_options()
    began = time.monotonic()
    found = asyncio.run(measure(options))
    print_table(found)
    host = {"cores": os.cpu_count(), "machine": platform.machine(), "seconds": round(time.monotonic() - began)}
    print(json.dumps({"machine": host, "results": [dataclasses.asdict(measured) for measured in found]}))
    if options.sizes != (FULL, FULL):
        print("a trial: the goals are for 1,000 pods and 1,000 jobs", file=sys.stderr)
        return 0
    missed = [miss for miss in (misses(measured, found) for measured in found) if miss]
    print("\n".join(missed) or "all goals of these phases are met", file=sys.stderr)
    return 1 if missed else 0


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=sizes, default=(FULL, FULL), metavar="PODS,JOBS", help="default: 1000,1000")
    parser.add_argument(
        "--only", type=lambda text: text.split(","), default=list(PHASES), help=",".join((*PHASES, ALTERNATING))
    )
    parser.add_argument("--rounds", type=int, default=3, help="rounds of the phase turns")
    parser.add_argument("--limit-s", type=float, default=300.0, help="what is not there by then is given up")
    options = parser.parse_args()
    if unknown := set(options.only) - {*PHASES, ALTERNATING}:
        parser.error(f"--only {','.join(sorted(unknown))}: choose from {', '.join((*PHASES, ALTERNATING))}")
    return options


def sizes(text: str) -> tuple[int, int]:
    """Pods of a gang and number of small jobs."""
    pods, _, jobs = text.partition(",")
    return int(pods), int(jobs or pods)


async def measure(options: argparse.Namespace) -> list[Measured]:
    found: list[Measured] = []
    for phase in plan(options):
        async for measured in phase:
            print(line(measured), file=sys.stderr, flush=True)
            found.append(measured)
    return found


def plan(options: argparse.Namespace) -> Iterator[AsyncIterator[Measured]]:
    """The phases that are asked for."""
    (pods, jobs), limit_s = options.sizes, options.limit_s
    if "gangs" in options.only:
        for hub in (False, True):
            yield from (single_gang(Side(qps=qps, hub=hub), pods, limit_s) for qps in (None, *RATES))
    if "scheduled" in options.only:
        yield from (single_gang(Side(qps=qps, hub=False, scheduler=True), pods, limit_s) for qps in (None, RATES[0]))
    if "small" in options.only:
        yield from (many_jobs(Side(qps=qps, hub=False), jobs, limit_s) for qps in (None, *RATES))
        yield many_jobs(Side(qps=None, hub=True), jobs, limit_s)
    if "peers" in options.only:
        for side in (Side(qps=RATES[0], hub=False, peer=peer) for peer in Peer):
            yield single_gang(side, pods, limit_s)
            yield many_jobs(side, jobs, limit_s)
    if ALTERNATING in options.only:
        ours = [Side(qps=None, hub=hub) for hub in (False, True)]
        peers = [Side(qps=RATES[0], hub=False, peer=peer) for peer in Peer]
        yield from (many_jobs(side, jobs, limit_s) for _ in range(options.rounds) for side in (*ours, *peers))
    if "large" in options.only:
        gangs, more = [f"large-{number}" for number in range(GANGS)], [f"more-{number}" for number in range(MORE_GANGS)]
        yield large(Side(qps=None, hub=False), pods, gangs, more, limit_s)
    if "idle" in options.only:
        yield idle(Side(qps=None, hub=True), max(1, jobs // 10), limit_s)


def line(run: Measured) -> str:
    """Format a figure when it arrives."""
    seconds = "not reached" if run.seconds is None else f"{run.seconds:.1f} s"
    others = ", ".join(f"{name} {used:.1f}" for name, used in run.others_cpu_s.items())
    summary = f"{run.phase}, {run.pods} pods, {place(run)}, {run.side.who}: {seconds}, {run.cpu_s:.1f} CPU s"
    return f"{summary}, {run.rss_mib:.0f} MiB (peak {run.peak_mib:.0f}); CPU s of others: {others}  {run.note}"


def place(measured: Measured) -> str:
    hub = "with hub" if measured.side.hub else "no hub"
    return f"{hub}, {'scheduler' if measured.side.scheduler else 'binder'}"


def anchor(measured: Measured, found: list[Measured]) -> Measured | None:
    """The same by the Job controller at the higher rate."""
    if measured.side.qps is not None:
        return None
    side = dataclasses.replace(measured.side, qps=RATES[0])
    return next((other for other in found if (other.phase, other.side) == (measured.phase, side)), None)


def ratio(measured: Measured, found: list[Measured]) -> float | None:
    """Our time by its time."""
    other = anchor(measured, found)
    if other is None or measured.seconds is None or other.seconds is None:
        return None
    return measured.seconds / other.seconds


def goal_of(measured: Measured) -> float | None:
    """Seconds that our operator may take for a phase, or None."""
    if measured.side.qps is not None:
        return None
    if measured.phase == SMALL_PHASE and measured.side.hub:
        return GOAL_HUBS_S
    return GOALS_S.get(measured.phase)


def misses(measured: Measured, found: list[Measured]) -> str | None:
    """Return the goal that a figure misses; those of other controllers have none."""
    if measured.side.qps is not None:
        return None
    goal_s, against = goal_of(measured), ratio(measured, found)
    if goal_s is not None and (measured.seconds is None or measured.seconds >= goal_s):
        return f"missed: {line(measured)}; goal: under {goal_s:g} s"
    if measured.phase == RATIO_PHASE and against is not None and against > GOAL_RATIO:
        return f"missed: {measured.phase}, {place(measured)}: {against:.2f} times the Job controller at QPS {RATES[0]}"
    if measured.phase.startswith("memory") and max(measured.rss_mib, measured.peak_mib) >= GOAL_MIB:
        return f"missed: {line(measured)}; goal: under {GOAL_MIB:g} MiB"
    cpu_ms = measured.cpu_s / measured.pods * 1000
    if (measured.phase, measured.side) == (RATIO_PHASE, Side(qps=None, hub=False)) and cpu_ms > GOAL_CPU_MS:
        return f"missed: {line(measured)}; goal: {GOAL_CPU_MS:g} ms of CPU a pod, not {cpu_ms:.1f}"
    return _slower_than_peers(measured, found)


def _slower_than_peers(measured: Measured, found: list[Measured]) -> str | None:
    """Return the peers that were as fast as our operator, or faster."""
    peers = [other for other in found if other.side.peer is not None and other.phase == measured.phase]
    seconds = measured.seconds
    if not peers or seconds is None or measured.side != Side(qps=None, hub=False):
        return None
    faster = [line(other) for other in peers if other.seconds is not None and other.seconds <= seconds]
    return f"missed: {measured.phase}: {seconds:.1f} s, not faster than {'; '.join(faster)}" if faster else None


def print_table(found: list[Measured]) -> None:
    """One row for each figure."""
    print("\n| what | pods | hub, placing | who | seconds | goal | time / Job at 200 | CPU s | peak MiB | notes |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for measured in found:
        seconds = "not reached" if measured.seconds is None else f"{measured.seconds:.1f}"
        against, goal = ratio(measured, found), "-"
        if (goal_s := goal_of(measured)) is not None:
            goal = f"< {goal_s:g} s"
        elif measured.phase.startswith("memory"):
            goal = f"< {GOAL_MIB:g} MiB"
        cells = [measured.phase, f"{measured.pods:,}", place(measured), measured.side.who, seconds, goal]
        cells += [
            "-" if against is None else f"{against:.2f}",
            f"{measured.cpu_s:.1f}",
            f"{measured.peak_mib:.0f}",
            measured.note,
        ]
        print(f"| {' | '.join(cells)} |")
    print()


if __name__ == "__main__":
    sys.exit(main())
