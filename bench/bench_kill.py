"""Kills or stops one process of a real job at a random moment, again and again, and checks what must be true then.

    python bench/bench_kill.py --count 50 --seed 1

Jobs run through the real command line: 2 workers, 4 ranks (PP2 x DP2) of a tiny model on random tokens, with
checkpoints, agents and hub. A case is kill -9 or SIGSTOP of a rank, a launcher, an agent, the hub, the backend or the
guardian. It holds if training continues where it should with unchanged losses, a gang whose rank or launcher was killed
runs again as the next attempt, a stopped rank is named as hung and no other, everything ends with the backend, `get`
shows what is so, and nothing is left after `delete`. A job that is healthy after a case serves the next one, too.
Exit code 0 only if every case held.
"""

import argparse
import dataclasses
import pathlib
import shutil
import statistics
import sys
import tempfile
import time
from collections import defaultdict

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "support"))

from chaos import Chaos, ChaosCase, draw_cases  # noqa: E402 - found by the path above
from chaos_job import Cli, Unmet  # noqa: E402


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """How one case went; `failure` is None if all held."""

    case: ChaosCase
    failure: str | None
    times_s: dict[str, float]


def main() -> int:
    options = parse_options()
    folder = pathlib.Path(tempfile.mkdtemp(prefix="bench-kill-"))
    chaos = Chaos(Cli(folder), cases_per_job=options.cases_per_job)
    results: list[Result] = []
    deadline = time.monotonic() + options.max_minutes * 60
    try:
        for number, case in enumerate(draw_cases(options.count, options.seed), 1):
            if time.monotonic() > deadline:
                print(f"stopped after {options.max_minutes:g} minutes, with {len(results)} of {options.count} cases")
                break
            results.append(run_case(chaos, case))
            print(f"{number:>3}  {describe(results[-1])}", flush=True)
        if results:
            results[-1] = end_last_job(chaos, results[-1])
    finally:
        if chaos.job is not None:
            chaos.job.wipe()
        shutil.rmtree(folder, ignore_errors=True)
    print_table(results)
    return 0 if all(result.failure is None for result in results) else 1


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=50, help="cases (default: 50)")
    parser.add_argument("--seed", type=int, default=1, help="draws kinds, victims and moments (default: 1)")
    parser.add_argument("--cases-per-job", type=int, default=4, help="cases that one job serves at most (default: 4)")
    parser.add_argument("--max-minutes", type=float, default=240, help="begin no case after that (default: 240)")
    return parser.parse_args()


def run_case(chaos: Chaos, case: ChaosCase) -> Result:
    failure = None
    try:
        chaos.run(case)
    except Unmet as error:
        failure = str(error)
    return Result(case=case, failure=failure, times_s=dict(chaos.times_s))


def end_last_job(chaos: Chaos, last: Result) -> Result:
    """The job that is still there is deleted, too; what is wrong then counts against the last case."""
    try:
        chaos.end()
    except Unmet as error:
        return dataclasses.replace(last, failure=last.failure or str(error))
    return last


def describe(result: Result) -> str:
    case = result.case
    moment = "in start-up" if case.in_startup else f"after {case.after_s:.1f} s"
    then = ", left stopped" if case.leave and not case.killed else ""
    times = ", ".join(f"{name} in {seconds:.1f} s" for name, seconds in result.times_s.items())
    outcome = "held" if result.failure is None else f"FAILED: {result.failure}"
    return f"{case.kind:<18} {moment}{then}: {outcome}  {times}"


def print_table(results: list[Result]) -> None:
    """One row per kind, and the whole count."""
    kinds: dict[str, list[Result]] = defaultdict(list)
    for result in results:
        kinds[result.case.kind].append(result)
    print("\n| what | cases | held | times, median and longest |\n|---|---|---|---|")
    for kind, found in sorted(kinds.items()):
        survived = sum(result.failure is None for result in found)
        print(f"| {kind} | {len(found)} | {survived} | {times_of(found)} |")
    survived = sum(result.failure is None for result in results)
    print(f"\n{survived} of {len(results)} cases held")


def times_of(results: list[Result]) -> str:
    times: dict[str, list[float]] = defaultdict(list)
    for result in results:
        for name, seconds in result.times_s.items():
            times[name].append(seconds)
    figures = (f"{name} {statistics.median(found):.1f} s, {max(found):.1f} s" for name, found in times.items())
    return "; ".join(figures) or "-"


if __name__ == "__main__":
    sys.exit(main())
