"""Time of the what-if analysis of a recorded trace, and of its replay alone.

    python bench/bench_whatif.py TRACE.parquet [--rounds 20]

"analysis" is reading and analysing the file in a process that has imported everything; "command" the whole command line
in a new process, with the file in the page cache. An operation-replay is one operation of one replica, step and
scenario. Least times of all rounds.
"""

import argparse
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np

from megatronapp_analyzer.whatif.analysis import Idealise, analyze, durations_of, ideal_durations
from megatronapp_analyzer.whatif.pattern import pattern_of
from megatronapp_analyzer.whatif.recording import read_parquet
from megatronapp_native import StepReplay

SCENARIOS = 22


def least_s(rounds: int, work: Callable[[], object]) -> float:
    """Return the least time of several calls."""
    times = []
    for _ in range(rounds):
        begun = time.perf_counter()
        work()
        times.append(time.perf_counter() - begun)
    return min(times)


def main() -> None:
    """Measure all three and print the times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=pathlib.Path)
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    recording = read_parquet(options.trace)
    pattern = pattern_of(recording)
    durations = durations_of(recording, pattern)
    ideal = ideal_durations(recording, durations, Idealise.POOLED)
    replay = StepReplay(**pattern.flat(), is_end=np.ones(len(recording.operations)), recorded=durations, ideal=ideal)
    flags = np.random.default_rng(0).random((SCENARIOS, *durations.shape[:2])) < 0.5
    replay_s = least_s(options.rounds, lambda: replay.step_seconds(flags))
    analysis_s = least_s(options.rounds, lambda: analyze(read_parquet(options.trace)))
    command = [sys.executable, "-m", "megatronapp_common.cli", "whatif", str(options.trace), "--json"]
    command_s = least_s(max(3, options.rounds // 4), lambda: subprocess.run(command, check=True, capture_output=True))
    print(f"{durations.size} operations, {len(recording.steps_T)} steps")
    print(f"replay    {1e-6 * SCENARIOS * durations.size / replay_s:8.0f} million operation-replays a second")
    print(f"analysis  {1e3 * analysis_s:8.1f} ms")
    print(f"command   {1e3 * command_s:8.1f} ms")


if __name__ == "__main__":
    main()
