"""Work of microbatches: a replica that gets more tokens takes longer, and is not slow.

Ranks that read data report the tokens of each microbatch, and the pairs of tokens that attend to each other. A pass
takes 1 + a (t - 1) + b (p - 1) times as long as usual, with t and p its tokens and pairs over the usual ones. a and b
are learned from the passes of a rank, in a step and from step to step; before any differ, they are 1 and 0.
"""

import dataclasses

import numpy as np
from numpy.typing import NDArray

from megatronapp_analyzer.detect.settings import DetectorSettings
from megatronapp_analyzer.graph import records as rec
from megatronapp_analyzer.model import JobLayout, RankRecords
from megatronapp_common.trace import NO_MICROBATCH, PASS_KINDS, RecordKind

Floats = NDArray[np.float64]
MEMORY = 0.98
"""Weight of what was learned before, from step to step."""
PRIOR = 0.1
"""Squares of differences in work that weigh as much as the assumption before any."""
LEVEL_RATE = 1 / 64
"""Rate at which the usual length and work of the passes of a rank follow its steps."""
LARGEST = 1.5
"""Largest growth of a pass with its tokens or pairs."""
LEAST_FACTOR = 0.05
OUTLIER = 1.0
"""Largest part by which a pass may differ from the others of its rank to be learned from."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StepWork:
    """Reported work of one step."""

    tokens: Floats
    """Tokens of each microbatch over the usual ones, [replica, microbatch]; NaN where it is not reported."""
    pairs: Floats
    usual_tokens: float
    growth: tuple[float, float]
    """Growth of passes with tokens and with pairs."""

    @property
    def factors(self) -> Floats:
        """Expected length of passes over the usual, [replica, microbatch]; NaN where it is not known."""
        by_tokens, by_pairs = self.growth
        factors = 1.0 + by_tokens * (self.tokens - 1.0) + by_pairs * (self.pairs - 1.0)
        return np.maximum(factors, LEAST_FACTOR)

    @property
    def of_replicas(self) -> Floats:
        """Mean factor of each replica; NaN where a microbatch is not reported, if others of its number are."""
        there = np.isfinite(self.tokens).any(axis=0)
        out: Floats = self.factors[:, there].mean(axis=1)
        return out

    def mean_tokens(self, replica: int) -> float:
        """Tokens per microbatch of a replica."""
        return float(np.nanmean(self.tokens[replica])) * self.usual_tokens


class WorkModel:
    """Learns how the passes of a job grow with their work."""

    def __init__(self, layout: JobLayout, settings: DetectorSettings) -> None:
        self._left_steps = settings.warmup_steps
        """Slow first steps, which are not learned from."""
        self._replica_of = np.array([at.dp for at in layout.coordinates], np.int64)
        self._usual: tuple[float, float] | None = None
        self._squares = np.zeros((2, 2))
        self._products = np.zeros(2)
        self._levels: dict[int, tuple[float, ...]] = {}
        """Usual seconds, tokens and pairs of passes, by rank, kind and chunk."""

    @property
    def growth(self) -> tuple[float, float]:
        """Growth of passes with tokens and with pairs, as far as it is known."""
        squares, products = self._squares + PRIOR * np.eye(2), self._products + PRIOR * np.array([1.0, 0.0])
        both: Floats = np.asarray(np.linalg.solve(squares, products), np.float64)
        if (both < 0.0).any():  # a pass does not become shorter with more work: what seems so is not known
            larger = int(both[1] > both[0])
            both = np.where(np.arange(2) == larger, products[larger] / squares[larger, larger], 0.0)
        by_tokens, by_pairs = np.clip(both, 0.0, LARGEST).tolist()
        return by_tokens, by_pairs

    def normalise(self, records: RankRecords, spans: RankRecords, clean_s: Floats) -> tuple[Floats, StepWork | None]:
        """Return the lengths of spans with passes as long as with usual work, and the reported work of the step.

        None: no work is reported, and lengths are as given. Learns from the passes.
        """
        table = self._table(records, spans)
        if table is None:
            return clean_s, None
        passes = np.flatnonzero(rec.is_kind(spans["kind"], PASS_KINDS) & (spans["microbatch"] < table.shape[2]))
        place = self._replica_of[spans["rank"][passes]], spans["microbatch"][passes].astype(np.int64)
        tokens, pairs = table
        if self._left_steps:
            self._left_steps -= 1
        else:
            self._learn(spans[passes], clean_s[passes], np.stack([tokens[place], pairs[place]]))
        assert self._usual is not None
        work = StepWork(tokens=tokens, pairs=pairs, usual_tokens=self._usual[0], growth=self.growth)
        out = clean_s.copy()
        out[passes] /= np.nan_to_num(work.factors[place], nan=1.0)
        return out, work

    def _table(self, records: RankRecords, spans: RankRecords) -> Floats | None:
        """Return tokens and pairs over the usual ones, [2, replica, microbatch]; None without any.

        Of microbatches that some pass has: a damaged record could make the table as large as numbers go.
        """
        reported = records[(records["kind"] == RecordKind.WORK) & (records["microbatch"] != NO_MICROBATCH)]
        reported = reported[(reported["aux"] > 0) & (reported["rank"] < len(self._replica_of))]
        if not len(reported):
            return None
        of_passes = spans["microbatch"][rec.is_kind(spans["kind"], PASS_KINDS)]
        most = int(of_passes[of_passes != NO_MICROBATCH].max(initial=0))
        reported = reported[reported["microbatch"] <= most]
        if not len(reported):
            return None
        out = np.full((2, int(self._replica_of.max()) + 1, int(reported["microbatch"].max()) + 1), np.nan)
        place = self._replica_of[reported["rank"]], reported["microbatch"].astype(np.int64)
        out[0][place] = reported["aux"]
        out[1][place] = np.where(reported["ordinal"] > 0, reported["ordinal"], reported["aux"])
        if self._usual is None:
            self._usual = float(np.nanmedian(out[0])), float(np.nanmedian(out[1]))
        relative: Floats = out / np.array(self._usual)[:, None, None]
        return relative

    def _learn(self, passes: RankRecords, seconds: Floats, work: Floats) -> None:
        """Learn from how passes of the same rank, kind and chunk differ. `work`: tokens and pairs, [2, pass]."""
        known = np.isfinite(seconds) & (seconds > 0) & np.isfinite(work).all(axis=0)
        passes, seconds, work = passes[known], seconds[known], work[:, known]
        if not len(passes):
            return
        key = (passes["rank"].astype(np.int64) << 16) | (passes["kind"].astype(np.int64) << 8) | passes["chunk"]
        keys, group = np.unique(key, return_inverse=True)
        count = np.bincount(group)
        mean_s = np.bincount(group, seconds) / count
        means = np.stack([np.bincount(group, row) / count for row in work])
        levels = np.array([self._levels.get(number, (np.nan,) * 3) for number in keys.tolist()]).T
        self._add(seconds / mean_s[group] - 1.0, work - means[:, group], means[:, group], np.ones(len(group)))
        self._add(mean_s / levels[0] - 1.0, means - levels[1:], levels[1:], count.astype(np.float64))
        fresh = np.stack([mean_s, *means])
        moved = np.where(np.isfinite(levels), levels + LEVEL_RATE * (fresh - levels), fresh)
        self._levels.update(zip(keys.tolist(), (tuple(row) for row in moved.T.tolist()), strict=True))

    def _add(self, longer: Floats, differs: Floats, means: Floats, weight: Floats) -> None:
        """Add passes that are longer than their mean by `longer`, with work that `differs` from its `means`."""
        by_tokens, by_pairs = self.growth
        level = 1.0 + by_tokens * (means[0] - 1.0) + by_pairs * (means[1] - 1.0)
        differs = differs / np.maximum(level, LEAST_FACTOR)
        usable = np.isfinite(longer) & (np.abs(longer) < OUTLIER) & np.isfinite(differs).all(axis=0)
        differs, longer, weight = differs[:, usable], longer[usable], weight[usable]
        self._squares = MEMORY * self._squares + (weight * differs) @ differs.T
        self._products = MEMORY * self._products + (weight * differs) @ longer


def work_details(work: StepWork, replica: int, ratio: float) -> tuple[str, ...]:
    """Describe what a replica was given, whose passes are expected to take `ratio` times as long for it.

    Nothing where it did not report in this step.
    """
    reporting = np.flatnonzero(np.isfinite(work.tokens).any(axis=1)).tolist()
    if replica not in reporting:
        return ()
    given = f"its microbatches had {work.mean_tokens(replica):,.0f} tokens"
    if others := [work.mean_tokens(other) for other in reporting if other != replica]:
        given += f", those of the others {np.median(others):,.0f}"
    by_tokens, by_pairs = work.growth
    learned = f"passes grow by {by_tokens:.2f} of the growth of tokens and {by_pairs:.2f} of that of pairs of tokens"
    return given, f"{learned}: {ratio:.2f} times as long; compared for equal work, its devices are not slow for it"
