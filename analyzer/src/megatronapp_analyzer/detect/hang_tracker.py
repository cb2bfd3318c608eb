"""Verdicts about hanging ranks, over their life."""

import dataclasses
from collections.abc import Sequence

from megatronapp_analyzer.detect import hang_search
from megatronapp_analyzer.detect.findings.sentences import hang_sentence
from megatronapp_analyzer.detect.settings import DetectorSettings
from megatronapp_analyzer.model import (
    Cause,
    JobLayout,
    JobMoment,
    RankLiveness,
    SubjectType,
    Verdict,
    VerdictState,
    VerdictSubject,
)

CERTAIN = 0.98
LIKELY = 0.7
OPEN = 0.3
DOUBT_S = 3.0
"""How long a hang without direct evidence must last before it is named."""


class HangTracker:
    """Tracker of at most one hang at a time: all ranks that are silent belong to it."""

    def __init__(self, layout: JobLayout, settings: DetectorSettings) -> None:
        self._layout = layout
        self._settings = settings
        self._live: dict[int, Verdict] = {}
        self._doubtful: tuple[int, ...] = ()
        self._doubtful_since_s = 0.0

    def observe(self, ranks: Sequence[RankLiveness], usual_step_s: float | None, when: JobMoment) -> list[Verdict]:
        """Judge the newest heartbeats; return verdicts that are new or over."""
        found = hang_search.find(ranks, usual_step_s, self._settings)
        if found is not None and not found.certain and len(ranks) < self._layout.world:
            found = None
        found = self._lasting(found, when)
        culprits = found.culprits if found else ()
        told = [self._over(rank, when) for rank in list(self._live) if rank not in culprits]
        for rank in culprits:
            if rank not in self._live and found is not None:
                self._live[rank] = self._verdict(rank, found, when)
                told.append(self._live[rank])
        return told

    def _lasting(self, found: hang_search.Hang | None, when: JobMoment) -> hang_search.Hang | None:
        """Return `found` if the evidence is direct, or all ranks have reported and it has lasted for a while.

        Ranks that only wait may wait for one that has not reported. When a stopped rank continues, its victims appear
        for a moment to wait for each other: agents report at different times.
        """
        doubtful = () if found is None or found.certain else found.culprits
        if doubtful != self._doubtful:
            self._doubtful, self._doubtful_since_s = doubtful, when.time
        return found if not doubtful or when.time - self._doubtful_since_s >= DOUBT_S else None

    def _over(self, rank: int, when: JobMoment) -> Verdict:
        verdict = self._live.pop(rank)
        return dataclasses.replace(verdict, state=VerdictState.CLEARED, until=when)

    def _verdict(self, rank: int, found: hang_search.Hang, when: JobMoment) -> Verdict:
        alone = len(found.culprits) == 1
        lines = [f"no progress for {found.silent_s:.0f} s", found.reason]
        if found.victims:
            lines.append("waiting for it: " + ", ".join(f"rank {victim}" for victim in found.victims))
        return Verdict(
            id=f"a{when.attempt}-s{when.step}-hang-{rank}",
            subject=VerdictSubject(
                type=SubjectType.RANK, ranks=(rank,), worker=self._layout.workers[rank], node=self._layout.nodes[rank]
            ),
            cause=Cause.HANG,
            state=VerdictState.CONFIRMED,
            seconds_per_step=found.silent_s,
            seconds_lost=0.0,
            slowdown=1.0,
            confidence=CERTAIN if found.certain else LIKELY if alone else OPEN,
            evidence_steps=(when.step,),
            evidence_text=tuple(lines),
            since=when,
            sentence=hang_sentence(rank, found.victims, found.silent_s, found.reason, self._layout),
        )
