"""Play many generated histories of the operator's plan (`tests/support/plan_fuzz`), on all processors.

    python bench/fuzz_plan.py --histories 50000 --first 0
    python bench/fuzz_plan.py --without judge_change      # how soon a plan that lacks a policy is found out
    python bench/fuzz_plan.py --elastic                   # gangs that may get smaller

Ends with code 1 where a promise does not hold, and prints the seeds; `--histories 1 --first SEED` plays one again.
"""

import argparse
import collections
import multiprocessing
import os
import pathlib
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "tests" / "support"))

from plan_fuzz.history import play
from plan_fuzz.promises import Broken

from megatronapp_operator.plan import planner

CHUNK = 20
SHOWN = 5


def outcome(seed: int) -> tuple[int, str, str]:
    """Seed, how it ended, and what broke."""
    try:
        return seed, play(seed), ""
    except Broken as error:
        return seed, "broken", str(error)


def elastic_outcome(seed: int) -> tuple[int, str, str]:
    """Return the same for a gang that may get smaller."""
    try:
        return seed, play(seed, spares=seed % 3, elastic=True), ""
    except Broken as error:
        return seed, "broken", str(error)


def without(name: str) -> None:
    """Plan without one of its policies from now on."""
    if name and name not in {policy.__name__ for policy in planner.POLICIES}:
        raise SystemExit(
            f"there is no policy {name}; there are {', '.join(policy.__name__ for policy in planner.POLICIES)}"
        )
    planner.POLICIES = tuple(policy for policy in planner.POLICIES if policy.__name__ != name)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--histories", type=int, default=50_000)
    parser.add_argument("--first", type=int, default=0, help="seed of the first one")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--without", default="", metavar="POLICY", help="leave out one policy of the plan")
    parser.add_argument("--elastic", action="store_true", help="restart in place, and let gangs get smaller")
    given = parser.parse_args()
    ends, bugs, began = collections.Counter[str](), [], time.monotonic()
    seeds, played = range(given.first, given.first + given.histories), elastic_outcome if given.elastic else outcome
    with multiprocessing.Pool(given.processes, initializer=without, initargs=(given.without,)) as pool:
        for seed, end, error in pool.imap_unordered(played, seeds, chunksize=CHUNK):
            ends[end] += 1
            if error:
                bugs.append((seed, error))
                print(f"seed {seed} breaks a promise: {error.splitlines()[0]}", flush=True)
    for end, count in sorted(ends.items()):
        print(f"{count:8} {end}")
    for seed, error in sorted(bugs)[:SHOWN]:
        print(f"\nseed {seed}\n{error}")
    print(f"{given.histories} histories in {time.monotonic() - began:.0f} s: {len(bugs)} with a broken promise")
    return 1 if bugs else 0


if __name__ == "__main__":
    raise SystemExit(main())
