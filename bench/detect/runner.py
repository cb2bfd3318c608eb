"""Runs detectors over cases, and writes tables of their scores."""

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from detect.baselines import ChangePoint, LateStart, MedianDeviation, MegatronAppRule, RelativeScore
from detect.current import CurrentDetector
from detect.faults import SimulatedFault
from detect.hangs import HANG_SECONDS, reports
from detect.layout import Grid
from detect.protocol import Detector, StepTrace, Verdict
from detect.score import Score, Truth, Window, quantile, reliability, score
from detect.simulation import Floats, JobSimulation
from detect.suite import DetectionCase

FIRST_REAL_TIME_S = 1.7e9
"""Real time of the simulated jobs' clocks at 0."""
DETECTORS: dict[str, Callable[[Grid], Detector]] = {
    "ours": CurrentDetector,
    "MegatronApp's rule": MegatronAppRule,
    "NVRx score": RelativeScore,
    "late start": LateStart,
    "change point": ChangePoint,
    "plain MAD": MedianDeviation,
}


COLUMNS = (
    "row",
    "detector",
    "windows",
    "faults",
    "precision",
    "recall",
    "victims named",
    "cause F1",
    "delay, steps (median, 95 %)",
    "named for",
    "cost error",
    "false alarms",
    "per job-hour (95 %)",
)


class WindowKey(NamedTuple):
    """Key of a window: its row, and how it was drawn there."""

    row: str
    layout: str
    seed: int
    steps: int


def key_of(case: DetectionCase) -> WindowKey:
    """Return the key of a case."""
    return WindowKey(case.row, case.layout, case.seed, case.steps)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DetectionOutcome:
    """Verdicts of every detector in a window."""

    key: WindowKey
    windows: dict[str, Window]
    seconds_per_step: dict[str, float]


def run(case: DetectionCase, names: Sequence[str]) -> DetectionOutcome:
    """Simulate a case once, and give its steps to all detectors."""
    detectors = {name: DETECTORS[name](case.job.grid) for name in names}
    named: dict[str, dict[int, tuple[Verdict, ...]]] = {name: {} for name in names}
    spent = dict.fromkeys(names, 0.0)
    simulated = StepLengths(case)
    for trace in simulated.traces(_finished_steps(case)):
        for name, detector in detectors.items():
            begun = time.perf_counter()
            verdicts = tuple(detector.step(trace))
            spent[name] += time.perf_counter() - begun
            if verdicts:
                named[name][trace.step] = verdicts
    hung = next((fault for fault in case.faults if fault.kind == "hang"), None)
    if hung is not None:
        _watch_hang(case, hung, detectors, named, simulated)
    truths, hours = truths_of(case, simulated)
    return DetectionOutcome(
        key=key_of(case),
        windows={
            name: Window(grid=case.job.grid, truths=truths, named=named[name], steps=case.steps, hours=hours)
            for name in names
        },
        seconds_per_step={name: seconds / case.steps for name, seconds in spent.items()},
    )


def _finished_steps(case: DetectionCase) -> int:
    """Return how many steps end: all, or those before a rank hangs."""
    return min([case.steps, *(fault.begin for fault in case.faults if fault.kind == "hang")])


def _watch_hang(
    case: DetectionCase,
    hung: SimulatedFault,
    detectors: dict[str, Detector],
    named: dict[str, dict[int, tuple[Verdict, ...]]],
    simulated: "StepLengths",
) -> None:
    """Show the detectors that can judge it the progress of the ranks, each second at the place of a step."""
    lengths = simulated.without_faults(hung.begin)
    begin_s = FIRST_REAL_TIME_S + 1000.0 + float(lengths.sum())
    for second, report in enumerate(reports(case.job.grid, hung, float(lengths[-1]), begin_s, case.seed)):
        for name, detector in detectors.items():
            if isinstance(detector, CurrentDetector) and (verdicts := tuple(detector.progress(report))):
                named[name][hung.begin + second] = verdicts


def truths_of(case: DetectionCase, simulated: "StepLengths") -> tuple[tuple[Truth, ...], float]:
    """Return the faults of a case with their true cost, by simulating the same draws without each; and job hours."""
    lengths = simulated.of(case.faults)
    truths = [_hang(fault) for fault in case.faults if fault.kind == "hang"]
    for number, fault in enumerate(case.faults):
        if fault.kind == "hang":
            continue
        others = case.faults[:number] + case.faults[number + 1 :]
        healed, alone = simulated.of(others), simulated.of((fault,))
        healthy = simulated.of(())
        steps = np.arange(case.steps)
        matters = fault.active(steps) & (steps >= max(fault.noticeable_from, 1))
        if not matters.any():
            continue
        saved = ((lengths - healed) + (alone - healthy))[matters].mean() / 2
        truths.append(
            Truth(
                subject=fault.subject,
                cause=fault.cause,
                begin=fault.begin,
                end=min(fault.begin + fault.steps, case.steps),
                noticeable_from=fault.noticeable_from,
                cost_s=float(saved),
                cost_fraction=float(saved / healthy[matters].mean()),
            )
        )
    return tuple(truths), float(lengths.sum()) / 3600


def _hang(fault: SimulatedFault) -> Truth:
    return Truth(
        subject=fault.subject,
        cause=fault.cause,
        begin=fault.begin,
        end=fault.begin + HANG_SECONDS,
        noticeable_from=fault.begin,
        cost_s=0.0,
        cost_fraction=1.0,
    )


class StepLengths:
    """Lengths of the steps of a case, with all of its faults or some of them; nothing is simulated twice."""

    def __init__(self, case: DetectionCase) -> None:
        self._case = case
        self._found: dict[tuple[tuple[SimulatedFault, ...], int], Floats] = {}

    def traces(self, steps: int) -> Iterator[StepTrace]:
        """Yield the traces of the first steps with all faults."""
        simulation = JobSimulation(self._case.job, self._case.seed, steps)
        yield from simulation.traces()
        self._found[_slow(self._case.job.faults), steps] = simulation.step_lengths_s()

    def of(self, faults: tuple[SimulatedFault, ...]) -> Floats:
        """Return the lengths of all steps in seconds, with these faults alone."""
        return self._simulate(faults, self._case.steps)

    def without_faults(self, steps: int) -> Floats:
        """Return the lengths of the first steps without any fault."""
        return self._simulate((), steps)

    def _simulate(self, faults: tuple[SimulatedFault, ...], steps: int) -> Floats:
        key = _slow(faults), steps
        if key not in self._found:
            job = dataclasses.replace(self._case.job, faults=faults)
            self._found[key] = JobSimulation(job, self._case.seed, steps).step_lengths_s()
        return self._found[key]


def _slow(faults: tuple[SimulatedFault, ...]) -> tuple[SimulatedFault, ...]:
    """Return the faults that make steps longer: a hang ends them."""
    return tuple(fault for fault in faults if fault.kind != "hang")


def table(outcomes: Sequence[DetectionOutcome]) -> str:
    """Return the scores of each row and detector as a Markdown table."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "|---" * len(COLUMNS) + "|"]
    for row, name, windows in _groups(outcomes):
        lines.append(_line(row, name, score(windows)))
    return "\n".join(lines)


def reliability_table(outcomes: Sequence[DetectionOutcome], name: str) -> str:
    """Return stated confidence against observed precision of a detector, over all rows, as a Markdown table."""
    pairs = score([outcome.windows[name] for outcome in outcomes]).confidences
    lines = ["| confidence | subjects | stated, mean | right |", "|---" * 4 + "|"]
    lines += [
        f"| {bounds} | {count} | {stated:.3f} | {right:.3f} |" for bounds, count, stated, right in reliability(pairs)
    ]
    return "\n".join(lines)


def as_json(outcomes: Sequence[DetectionOutcome]) -> list[dict[str, Any]]:
    """Return the same scores as plain objects."""
    return [{"row": row, "detector": name, **_json(score(windows))} for row, name, windows in _groups(outcomes)]


def _groups(outcomes: Sequence[DetectionOutcome]) -> Iterable[tuple[str, str, list[Window]]]:
    rows: dict[str, list[DetectionOutcome]] = {}
    for outcome in outcomes:
        rows.setdefault(outcome.key.row, []).append(outcome)
    for row, group in rows.items():
        for name in group[0].windows:
            yield row, name, [outcome.windows[name] for outcome in group]


def _line(row: str, name: str, total: Score) -> str:
    rate, bound = total.alarms_per_hour
    cells = [
        row,
        name,
        str(total.healthy + total.faulty),
        str(total.faults) if total.faulty else "-",
        f"{total.precision:.3f} ({total.false} false)" if total.faulty else "-",
        _number(total.recall, 3),
        f"{total.victim_windows}/{total.faulty}" if total.faulty else "-",
        _number(total.cause_f1, 3),
        f"{quantile(total.delays, 0.5):.0f}, {quantile(total.delays, 0.95):.0f}" if total.delays else "-",
        f"{np.mean(total.named_fraction):.2f}" if total.named_fraction else "-",
        f"{np.median(total.cost_errors):.2f}" if total.cost_errors else "-",
        f"{total.alarms}" if total.healthy else "-",
        f"{rate:.3f} (<= {bound:.3f})" if total.healthy else "-",
    ]
    return "| " + " | ".join(cells) + " |"


def _number(value: float, digits: int) -> str:
    return "-" if math.isnan(value) else f"{value:.{digits}f}"


def _json(total: Score) -> dict[str, Any]:
    plain = {
        "windows": total.healthy + total.faulty,
        "faults": total.faults,
        "hits": total.hits,
        "false": total.false,
        "parts": total.parts,
        "wide": total.wide,
        "precision": total.precision,
        "recall": total.recall,
        "victimWindows": total.victim_windows,
        "causeF1": total.cause_f1,
        "causes": {f"{right} as {named}": count for (right, named), count in sorted(total.causes.items())},
        "delayMedian": quantile(total.delays, 0.5),
        "delay95": quantile(total.delays, 0.95),
        "causeDelayMedian": quantile(total.cause_delays, 0.5),
        "namedFor": float(np.mean(total.named_fraction)) if total.named_fraction else math.nan,
        "costError": float(np.median(total.cost_errors)) if total.cost_errors else math.nan,
        "alarms": total.alarms,
        "healthyHours": total.healthy_hours,
        "alarmsPerHourBound": total.alarms_per_hour[1],
    }
    return {key: None if isinstance(value, float) and math.isnan(value) else value for key, value in plain.items()}
