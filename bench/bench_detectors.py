"""Compares detectors of slow ranks on simulated jobs with known faults (docs/detector-benchmark.md).

    python bench/bench_detectors.py --windows 20                  # tuning seeds
    python bench/bench_detectors.py --windows 200 --published     # the seeds of published tables
    python bench/bench_detectors.py --windows 200 --published --continue run.jsonl --minutes 60   # in several parts
    python bench/bench_detectors.py --windows 200 --published --continue run.jsonl --processes 16
    python bench/bench_detectors.py --table --published --seed 7001 --continue run.jsonl --minutes 60   # the table
    python bench/bench_detectors.py --show run.jsonl                                      # the tables of what is stored
    python bench/bench_detectors.py --rows @healthy --windows 1112 --published --continue run.jsonl --processes 16
    python bench/bench_detectors.py ... --part 2/3 --continue 2.jsonl                     # a third of the seeds
    python bench/bench_detectors.py ... --continue 1.jsonl --also 2.jsonl 3.jsonl         # the sums of all parts
    python bench/bench_detectors.py --rows "ramp,healthy" --detectors ours --windows 50 --json out.json

Every window is a separate job, watched from its first step. All detectors get the same records. With --continue,
Ctrl-C or SIGTERM ends a run after the windows that have begun; the same command continues it.
"""

import argparse
import contextlib
import dataclasses
import hashlib
import itertools
import json
import math
import multiprocessing
import os
import pathlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool

import detect
from detect.noise import Recording
from detect.progress import OutcomeFile, read_outcomes, version_of
from detect.runner import DETECTORS, DetectionOutcome, as_json, key_of, reliability_table, run, table
from detect.score import quantile, score
from detect.suite import LAYOUTS, NOISES, PUBLISHED, ROW_GROUPS, ROWS, TABLE_WINDOWS, DetectionCase, draw
from exact_bounds import with_bounds

import megatronapp_analyzer

AHEAD = 2
"""Windows that wait for a process."""
APART = ("compute 3 %", "compute 2 %", "ramp", "2 to 5 faults", "20 % lost records")
"""Rows that are summed up apart from the others."""


def main() -> None:
    options = parse_options()
    if options.show:
        outcomes, names = shown(options.show)
        report(outcomes, names, options)
        return
    rows = list(TABLE_WINDOWS) if options.table else chosen_rows(options.rows or "@faults,@healthy")
    names = chosen(options.detectors, DETECTORS, "--detectors")
    cases = cases_of(rows, options)
    outcomes = run_some(cases, names, options) if options.resume else run_in_order(cases, names, options.processes)
    if not outcomes:
        sys.exit("no window has been run; give more --minutes, or more --windows for so many parts")
    report(outcomes, names, options)


def cases_of(rows: Sequence[str], options: argparse.Namespace) -> list[DetectionCase]:
    """Return the cases of rows, row by row within a seed, so that a run that is ended has equally many of each."""
    layouts = tuple(chosen(options.layouts, LAYOUTS, "--layouts")) if options.layouts else ()
    seeds = {row: seeds_of(options, TABLE_WINDOWS[row] if options.table else options.windows) for row in rows}
    rounds = itertools.zip_longest(*([(row, seed) for seed in seeds[row]] for row in rows))
    cases = [draw(ROWS[each[0]], each[1], layouts) for each in itertools.chain.from_iterable(rounds) if each]
    recordings = {noise: Recording.read(path) for noise, path in options.pace.items()}
    return [with_recording(case, recordings) for case in cases]


def shown(paths: Sequence[pathlib.Path]) -> tuple[list[DetectionOutcome], list[str]]:
    """Return the outcomes of files, and their detectors; ends the program where they do not belong together."""
    try:
        files = [read_outcomes(path) for path in paths]
    except (OSError, ValueError) as error:
        sys.exit(f"--show: {error}")
    if len({(stored.version, stored.detectors) for stored in files}) > 1:
        sys.exit("--show: the files are of several versions or sets of detectors; show them one by one")
    found = dict(itertools.chain.from_iterable(stored.outcomes.items() for stored in files))
    if not found:
        sys.exit(f"--show: {paths[0]} has no window yet")
    order = {row: place for place, row in enumerate(ROWS)}
    return sorted(found.values(), key=lambda each: (order[each.key.row], each.key.seed)), list(files[0].detectors)


def report(outcomes: Sequence[DetectionOutcome], names: Sequence[str], options: argparse.Namespace) -> None:
    """Print all tables of outcomes."""
    print(table(outcomes))
    print("\nAll rows together, with exact bounds at 95 %:\n" + totals_table(outcomes))
    print(f"\nConfidence of {names[0]!r} when a subject was first named:\n" + reliability_table(outcomes, names[0]))
    seconds = {name: sum(outcome.seconds_per_step[name] for outcome in outcomes) / len(outcomes) for name in names}
    print("\nms a step: " + ", ".join(f"{name} {1e3 * spent:.2f}" for name, spent in seconds.items()))
    if options.json:
        options.json.write_text(json.dumps(as_json(outcomes), indent=1) + "\n", encoding="utf-8")
    if options.misses:
        report_misses(outcomes, names[0])


def totals_table(outcomes: Sequence[DetectionOutcome]) -> str:
    """Return the scores of each detector over groups of rows as a Markdown table."""
    columns = ["group", "detector", "windows", "faults", "recall", "precision"]
    columns += ["victims named", "cause F1", "steps to cause (median, 95 %)", "false alarms"]
    lines = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    groups: dict[str, list[DetectionOutcome]] = {}
    for outcome in outcomes:
        groups.setdefault(_group(outcome.key.row), []).append(outcome)
    for group, inside in groups.items():
        for name in inside[0].windows:
            total = score(outcome.windows[name] for outcome in inside)
            cells = [group, name, str(len(inside))]
            if total.faulty:
                delays = f"{quantile(total.cause_delays, 0.5):.0f}, {quantile(total.cause_delays, 0.95):.0f}"
                named = total.hits + total.false
                cells += [str(total.faults), with_bounds(total.hits, total.faults), with_bounds(total.hits, named)]
                cells += [f"{total.victim_windows}/{total.faulty}", f"{total.cause_f1:.2f}", delays, "-"]
            else:
                hours, bound = total.healthy_hours, total.alarms_per_hour[1]
                cells += ["-"] * 6 + [f"{total.alarms} in {hours:.1f} h (at most {bound:.3f} per hour)"]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _group(row: str) -> str:
    if row in APART:
        return row
    if row.startswith("stream"):
        return "healthy streams"
    if row in ROW_GROUPS["@large"]:
        return row
    return "healthy" if row.startswith("healthy") else "other faults"


def with_recording(case: DetectionCase, recordings: Mapping[str, Recording]) -> DetectionCase:
    """Return a case with recorded noise in place of the drawn one, if there is a recording for its kind of noise."""
    recorded = recordings.get(case.job.noise.name)
    noise = dataclasses.replace(case.job.noise, recorded=recorded)
    return dataclasses.replace(case, job=dataclasses.replace(case.job, noise=noise)) if recorded else case


def seeds_of(options: argparse.Namespace, windows: int) -> range:
    """Return the seeds of the windows of a row: all, or those of a part."""
    first = options.seed + (PUBLISHED - 1 if options.published else 0)
    part, parts = options.part
    ends = [first + windows * number // parts for number in (part - 1, part)]
    return range(*ends)


def run_in_order(cases: Sequence[DetectionCase], names: Sequence[str], processes: int) -> list[DetectionOutcome]:
    """Return the outcomes of cases in their order."""
    found = {outcome.key: outcome for outcome in run_all(cases, names, processes)}
    return [found[key_of(case)] for case in cases]


def run_all(
    cases: Iterable[DetectionCase],
    names: Sequence[str],
    processes: int,
    minutes: float = math.inf,
    ended: Callable[[], bool] = lambda: False,
) -> Iterator[DetectionOutcome]:
    """Yield the outcomes of cases, in any order; none is begun after `minutes`, or once `ended` returns true.

    A window depends on its case alone, so that the number of processes changes nothing.
    """
    end = time.monotonic() + 60 * minutes
    in_time = itertools.takewhile(lambda case: time.monotonic() < end and not ended(), cases)
    if processes == 1:
        yield from (run(case, names) for case in in_time)
        return
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # of each process: windows are spread, and not what is inside
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"), ignore_interrupts) as pool:
        try:
            # A few in advance, so that no process waits and few windows are begun after the end.
            running = {pool.submit(run, case, names) for case in itertools.islice(in_time, processes + AHEAD)}
            while running:
                done, running = wait(running, return_when=FIRST_COMPLETED)
                running |= {pool.submit(run, case, names) for case in itertools.islice(in_time, len(done))}
                yield from (future.result() for future in done)
        except BrokenProcessPool:
            if not ended():  # `timeout` sends its signal to all processes of the run
                raise
        finally:
            pool.shutdown(cancel_futures=True)


@contextlib.contextmanager
def until_a_signal() -> Iterator[Callable[[], bool]]:
    """Give what returns true after the first Ctrl-C or SIGTERM; a second has its usual effect."""
    received = threading.Event()
    usual = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def restore() -> None:
        for number, handler in usual.items():
            signal.signal(number, handler)

    def receive(number: int, frame: object) -> None:
        received.set()
        restore()
        print("\nends after the windows that have begun; the same command continues", file=sys.stderr)

    for number in usual:
        signal.signal(number, receive)
    try:
        yield received.is_set
    finally:
        restore()


def ignore_interrupts() -> None:
    """Let Ctrl-C end the run and not the window that a process is at."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def run_some(
    cases: Sequence[DetectionCase], names: Sequence[str], options: argparse.Namespace
) -> list[DetectionOutcome]:
    """Continue a run for some time; return the outcomes of all cases that have been run."""
    analyzer = pathlib.Path(next(iter(megatronapp_analyzer.__path__)))
    folders = [pathlib.Path(next(iter(detect.__path__))), *(analyzer / name for name in ("detect", "graph", "align"))]
    csrc = pathlib.Path(__file__).parents[1] / "csrc"
    folders += [csrc / "src" / "detect", csrc / "include" / "megatronapp" / "detect"]
    recordings = {noise: hashlib.sha256(path.read_bytes()).hexdigest() for noise, path in options.pace.items()}
    version = version_of(folders, f"{names} {options.layouts} {recordings}")
    try:
        others = [read_outcomes(path, version).outcomes for path in options.also]
    except (OSError, ValueError) as error:
        sys.exit(f"--also: {error}")
    try:
        stored = OutcomeFile(options.resume, version, names)
    except (OSError, ValueError) as error:
        sys.exit(f"--continue: {error}")
    found = dict(itertools.chain.from_iterable(part.items() for part in [*others, stored.outcomes]))
    missing = [case for case in cases if key_of(case) not in found]
    if strange := len(found) - (len(cases) - len(missing)):
        print(f"{strange} of the stored outcomes are of other rows, seeds or parts; they are left out", file=sys.stderr)
    begun_s = time.monotonic()
    with until_a_signal() as ended:
        new = run_all(missing, names, options.processes, options.minutes, ended)
        for number, outcome in enumerate(new, start=1):
            stored.add(outcome)
            found[outcome.key] = outcome
            left = (time.monotonic() - begun_s) / number * (len(missing) - number) / 60
            print(f"\r{number} of {len(missing)} windows, {left:.0f} minutes for the others  ", end="", file=sys.stderr)
            sys.stderr.flush()
    stored.close()
    outcomes = [found[key_of(case)] for case in cases if key_of(case) in found]
    if len(outcomes) < len(cases):
        print(f"\n{len(cases) - len(outcomes)} of {len(cases)} windows are missing below", end="", file=sys.stderr)
    print(file=sys.stderr)
    return outcomes


def report_misses(outcomes: Sequence[DetectionOutcome], name: str) -> None:
    """Print the windows in which the first detector did not name exactly the faults."""
    for outcome in outcomes:
        window = outcome.windows[name]
        expected = {truth.subject for truth in window.truths if truth.counts}
        named = {verdict.subject for verdicts in window.named.values() for verdict in verdicts}
        if expected != named:
            verdicts_by_step = {
                step: [(verdict.subject.ranks, verdict.cause) for verdict in verdicts]
                for step, verdicts in list(window.named.items())[::10][:6]
            }
            key = outcome.key
            print(f"{key.row} {key.layout} seed {key.seed}: {window.truths} named {verdicts_by_step}")


def chosen_rows(text: str) -> list[str]:
    """Return the rows of a list of names of rows and of groups of them (`@healthy`)."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    rows = [row for name in names for row in ROW_GROUPS.get(name, (name,))]
    return chosen(",".join(dict.fromkeys(rows)), dict.fromkeys((*ROWS, *ROW_GROUPS)), "--rows")


def chosen(text: str, known: Mapping[str, object], option: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()] or list(known)
    if unknown := [name for name in names if name not in known]:
        sys.exit(f"{option}: no {unknown[0]!r}; write some of: {', '.join(known)}")
    return names


def part_of(text: str) -> tuple[int, int]:
    """Read `2/3`, the second of three parts."""
    part, slash, parts = text.partition("/")
    if not (slash and part.isdecimal() and parts.isdecimal() and 1 <= int(part) <= int(parts)):
        raise argparse.ArgumentTypeError(f"{text!r} is no part; write for example 2/3 for the second of three")
    return int(part), int(parts)


def recording_of(text: str) -> tuple[str, pathlib.Path]:
    """Read a kind of noise and a file, such as `gpu=FILE`."""
    noise, equals, path = text.partition("=")
    if not equals or noise not in NOISES:
        raise argparse.ArgumentTypeError(f"{text!r} names no kind of noise; write for example gpu=recorded.npz")
    if not pathlib.Path(path).is_file():
        raise argparse.ArgumentTypeError(f"there is no file {path!r}; write it with bench/detect_noise.py --write")
    return noise, pathlib.Path(path)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, default=10, help="windows of each row")
    parser.add_argument(
        "--rows",
        default="",
        help="rows, comma-separated; @faults, @healthy, @large and @streams stand for all of these",
    )
    parser.add_argument("--layouts", default="", help="layouts, comma-separated; those of the row by default")
    parser.add_argument("--detectors", default="", help="detectors, comma-separated; all by default")
    parser.add_argument("--seed", type=int, default=1, help="first seed: for tuning, or of the published ones")
    parser.add_argument("--published", action="store_true", help="use the seeds of published tables instead")
    parser.add_argument(
        "--continue", dest="resume", metavar="FILE", type=pathlib.Path, help="store outcomes, and skip those stored"
    )
    parser.add_argument(
        "--also",
        nargs="+",
        default=[],
        metavar="FILE",
        type=pathlib.Path,
        help="with --continue: use these outcomes, too",
    )
    parser.add_argument(
        "--part", type=part_of, default=(1, 1), metavar="K/N", help="only the Kth of N parts of the seeds"
    )
    parser.add_argument("--minutes", type=float, default=math.inf, help="with --continue: begin no window afterwards")
    parser.add_argument("--processes", type=int, default=1, help="processes that windows are spread over")
    parser.add_argument(
        "--pace",
        nargs="+",
        type=recording_of,
        default=[],
        metavar="NOISE=FILE",
        help="take noise of this kind (gpu, cpu) from a recording (detect_noise.py)",
    )
    parser.add_argument("--table", action="store_true", help="run all rows with the windows of the published table")
    parser.add_argument(
        "--show",
        nargs="+",
        default=[],
        metavar="FILE",
        type=pathlib.Path,
        help="print the tables of files of --continue",
    )
    parser.add_argument("--json", type=pathlib.Path, help="also write the scores to this file")
    parser.add_argument("--misses", action="store_true", help="print the windows in which the first detector is wrong")
    options = parser.parse_args()
    options.pace = dict(options.pace)
    if options.table and options.rows:
        parser.error("--table: runs all rows of the published table; leave out --rows, or --table")
    if options.resume is None and options.also:
        parser.error("--also: write --continue FILE, too, for the outcomes that are missing in these files")
    if options.resume is None and options.minutes != math.inf:
        parser.error("--minutes: write --continue FILE, too, with which the rest can be run later")
    return options


if __name__ == "__main__":
    main()
