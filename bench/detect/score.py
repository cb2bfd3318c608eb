"""Scores of a detector over windows. Pure functions of what was true and what was named.

A window is one job, watched from its first step on. A named subject is

    a hit      if it is a fault's subject (for a link both ranks, in order), named while the fault is active or at most
               GRACE steps later
    a part     if it is a proper part of a faulty subject's ranks: not wrong, but the fault is not found by it
    wide       if it is the tensor-parallel unit of a faulty rank: not wrong, but the rank is not found by it
    neutral    if it is a fault that costs less than HARMLESS of the step: neither to be named nor wrong
    false      in all other cases, also before the fault begins
"""

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Sequence

from detect.layout import Grid
from detect.protocol import NamedSubject, Verdict

GRACE = 20
"""Steps after the end of a fault in which its name may still be given."""
CONFIDENCE_BINS = (0.0, 0.5, 0.8, 0.9, 0.95, 0.99, 1.01)
"""Bounds of the bins of the reliability table."""
HARMLESS = 0.005
"""Share of the step that a fault must cost to count."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Truth:
    """A simulated fault with its cost. `end` is the first step without it."""

    subject: NamedSubject
    cause: str
    begin: int
    end: int
    noticeable_from: int
    cost_s: float
    """By how much steps are longer than without it, in the mean over its noticeable steps."""
    cost_fraction: float

    @property
    def counts(self) -> bool:
        return self.cost_fraction >= HARMLESS


@dataclasses.dataclass(frozen=True, kw_only=True)
class Window:
    """Outcome of a job. `named[step]` is all that was named after a step; steps without a verdict are absent."""

    grid: Grid
    truths: tuple[Truth, ...]
    named: dict[int, tuple[Verdict, ...]]
    steps: int
    hours: float


@dataclasses.dataclass(kw_only=True)
class Score:
    """Counts over windows, and what follows from them."""

    healthy: int = 0
    faulty: int = 0
    faults: int = 0
    hits: int = 0
    parts: int = 0
    wide: int = 0
    false: int = 0
    """Distinct subjects that were named wrongly, in any window."""
    false_windows: int = 0
    victim_windows: int = 0
    """Faulty windows in which a healthy subject was named."""
    alarms: int = 0
    """Distinct subjects named in healthy windows."""
    healthy_hours: float = 0.0
    delays: list[int] = dataclasses.field(default_factory=list)
    """Steps of each found fault until it was named, the step of the naming included."""
    cause_delays: list[int] = dataclasses.field(default_factory=list)
    causes: Counter[tuple[str, str]] = dataclasses.field(default_factory=Counter)
    """(right, named) causes of found faults."""
    named_fraction: list[float] = dataclasses.field(default_factory=list)
    """Share of the remaining steps of each found fault in which it was named."""
    cost_errors: list[float] = dataclasses.field(default_factory=list)
    confidences: list[tuple[float, bool]] = dataclasses.field(default_factory=list)
    """First confidence of each distinct named subject that is right or wrong, and true if it was right."""

    @property
    def precision(self) -> float:
        """Named subjects that were hits; 1 where nothing was named."""
        return self.hits / (self.hits + self.false) if self.hits + self.false else 1.0

    @property
    def recall(self) -> float:
        return self.hits / self.faults if self.faults else math.nan

    @property
    def cause_f1(self) -> float:
        return macro_f1(self.causes)

    @property
    def alarms_per_hour(self) -> tuple[float, float]:
        """False alarms per hour of healthy jobs, and the upper bound of the rate at 95 %."""
        if not self.healthy_hours:
            return math.nan, math.nan
        return self.alarms / self.healthy_hours, poisson_upper(self.alarms) / self.healthy_hours


def score(windows: Iterable[Window]) -> Score:
    """Return the sums over windows."""
    total = Score()
    for window in windows:
        _add(total, window)
    return total


def judge(window: Window, subject: NamedSubject, step: int) -> tuple[str, Truth | None]:
    """Return what naming a subject after a step is (see above), and the fault that it belongs to."""
    active = [truth for truth in window.truths if truth.begin <= step < truth.end + GRACE]
    for truth in active:
        if truth.subject == subject:
            return ("hit" if truth.counts else "neutral"), truth
    for truth in active:
        ranks = set(truth.subject.ranks)
        if truth.subject.is_link or subject.is_link:
            continue
        if set(subject.ranks) < ranks:
            return ("part" if truth.counts else "neutral"), truth
        if len(ranks) == 1 and subject.ranks == window.grid.unit(truth.subject.ranks[0]):
            return ("wide" if truth.counts else "neutral"), truth
    return "false", None


def reliability(confidences: Sequence[tuple[float, bool]]) -> list[tuple[str, int, float, float]]:
    """Return for each bin of stated confidence: its name, verdicts, mean confidence, and part that was right."""
    rows = []
    for low, high in itertools.pairwise(CONFIDENCE_BINS):
        inside = [pair for pair in confidences if low <= pair[0] < high]
        if inside:
            stated = sum(confidence for confidence, _ in inside) / len(inside)
            right = sum(correct for _, correct in inside) / len(inside)
            rows.append((f"{low:g} to {min(high, 1.0):g}", len(inside), stated, right))
    return rows


def macro_f1(confusion: Counter[tuple[str, str]]) -> float:
    """Mean of the F1 of each right cause; NaN without any."""
    scores = []
    for cause in sorted({right for right, _ in confusion}):
        both = confusion[cause, cause]
        right = sum(count for (truth, _), count in confusion.items() if truth == cause)
        named = sum(count for (_, answer), count in confusion.items() if answer == cause)
        scores.append(2 * both / (right + named))
    return sum(scores) / len(scores) if scores else math.nan


def poisson_upper(events: int, level: float = 0.95) -> float:
    """Upper bound of the mean of a Poisson count of which `events` were seen; 3.0 for none (exact, by bisection)."""
    low, high = float(events), events + 10.0 + 6.0 * math.sqrt(events + 1.0)
    for _ in range(80):
        middle = (low + high) / 2
        terms = (
            (k * math.log(middle) - middle - math.lgamma(k + 1) for k in range(events + 1)) if middle else iter([0.0])
        )
        at_most = math.fsum(math.exp(term) for term in terms)
        low, high = (middle, high) if at_most > 1 - level else (low, middle)
    return (low + high) / 2


def _add(total: Score, window: Window) -> None:
    judged = _distinct(window)
    kinds = Counter(kind for kind, _ in judged.values())
    for (_, kind), confidence in _first_confidences(window, judged).items():
        if kind != "neutral":
            total.confidences.append((confidence, kind != "false"))
    total.parts += kinds["part"]
    total.wide += kinds["wide"]
    total.false += kinds["false"]
    total.false_windows += kinds["false"] > 0
    if window.truths:
        total.faulty += 1
        total.victim_windows += kinds["false"] > 0
    else:
        total.healthy += 1
        total.healthy_hours += window.hours
        total.alarms += kinds["false"]
    for truth in window.truths:
        if truth.counts:
            total.faults += 1
            _add_fault(total, window, truth)


def _distinct(window: Window) -> dict[tuple[NamedSubject, str], tuple[str, Truth | None]]:
    """Judge each named subject once for each way in which it was right or wrong."""
    judged: dict[tuple[NamedSubject, str], tuple[str, Truth | None]] = {}
    for step, verdicts in window.named.items():
        for verdict in verdicts:
            kind, truth = judge(window, verdict.subject, step)
            judged.setdefault((verdict.subject, kind), (kind, truth))
    return judged


def _first_confidences(
    window: Window, judged: dict[tuple[NamedSubject, str], tuple[str, Truth | None]]
) -> dict[tuple[NamedSubject, str], float]:
    """Return the confidence with which each named subject was named first."""
    first: dict[tuple[NamedSubject, str], float] = {}
    for step in sorted(window.named):
        for verdict in window.named[step]:
            key = verdict.subject, judge(window, verdict.subject, step)[0]
            if key in judged:
                first.setdefault(key, verdict.confidence)
    return first


def _add_fault(total: Score, window: Window, truth: Truth) -> None:
    last = min(truth.end, window.steps)
    hits = {
        step: verdict
        for step, verdicts in window.named.items()
        for verdict in verdicts
        if verdict.subject == truth.subject and truth.begin <= step < truth.end + GRACE
    }
    if not hits:
        return
    first = min(hits)
    total.hits += 1
    total.delays.append(max(first - truth.noticeable_from + 1, 0))
    total.causes[truth.cause, _usual_cause(hits.values())] += 1
    right = [step for step, verdict in hits.items() if verdict.cause == truth.cause]
    if right:
        total.cause_delays.append(max(min(right) - truth.noticeable_from + 1, 0))
    remaining = last - first
    if remaining > 0:
        total.named_fraction.append(sum(first <= step < last for step in hits) / remaining)
    cost_s = hits[max(hits)].cost_s
    if cost_s is not None and truth.cost_s > 0:
        total.cost_errors.append(abs(cost_s - truth.cost_s) / truth.cost_s)


def _usual_cause(verdicts: Iterable[Verdict]) -> str:
    return Counter(verdict.cause for verdict in verdicts).most_common(1)[0][0]


def quantile(values: Sequence[float], fraction: float) -> float:
    """Return the smallest value that at least `fraction` of the values do not exceed; NaN without values."""
    ordered = sorted(values)
    return ordered[max(math.ceil(fraction * len(ordered)) - 1, 0)] if ordered else math.nan
