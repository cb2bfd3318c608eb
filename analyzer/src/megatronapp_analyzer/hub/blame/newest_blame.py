"""Blame of the newest step, computed about once a minute, so that metrics show whether it explains the time lost."""

import asyncio
import logging

from megatronapp_analyzer.hub.blame.stored_step import blame_of, default_peers, steps_before
from megatronapp_analyzer.hub.ingest.ingest import TraceIngest
from megatronapp_analyzer.hub.ingest.step_graphs import StepGraphs
from megatronapp_analyzer.hub.ingest.store import StoredStep
from megatronapp_analyzer.hub.state.answer_cache import AnswerCache
from megatronapp_analyzer.hub.state.totals import HubTotals, LostTime
from megatronapp_analyzer.model import JobLayout
from megatronapp_common.web.problems import HttpError

LOG = logging.getLogger(__name__)
PERIOD_S = 60.0
"""Pause after a step whose blame was computed."""
WAIT_S = 1.0
"""Pause without such a step."""
MOST_RECORDS = 1 << 20
"""Records of a step up to which its blame is computed unasked: graphs of a larger one take hundreds of megabytes."""

CHOSEN_OF = 8
"""Newest steps of which the last whole one is chosen."""


class NewestBlame:
    """Computes the blame of newest steps, in the thread that answers users, and stores the lost time in the totals."""

    def __init__(self, ingest: TraceIngest, graphs: StepGraphs, answers: AnswerCache, totals: HubTotals) -> None:
        self._ingest, self._graphs, self._answers, self._totals = ingest, graphs, answers, totals

    async def run(self) -> None:
        """Compute the blame of a new step after each pause."""
        while True:
            await asyncio.sleep(PERIOD_S if await self.update() else WAIT_S)

    async def update(self) -> bool:
        """Compute the blame of the newest whole step; return false if there is no new one, or if the thread is busy.

        A step of more than MOST_RECORDS records is no new one.
        """
        chosen = self._newest()
        known = self._totals.lost_time
        if chosen is None or (known is not None and known.key == chosen[1].key):
            return False
        layout, step = chosen
        before = [older for older in steps_before(self._ingest.store, step) if len(older.view.records) <= MOST_RECORDS]
        try:
            found = await self._answers.answer(
                ("newest blame",), step.key, lambda: _lost_time(step, before, layout, self._graphs)
            )
        except HttpError as busy:
            LOG.info("blame of attempt %d step %d is not computed: %s", *step.key, busy)
            return False
        except Exception:
            LOG.exception("blame of attempt %d step %d is not known", *step.key)
            return True
        if found is not None and found.key != step.key:  # an older one, as the thread rests
            return False
        self._totals.lost_time = found or known
        return True

    def _newest(self) -> tuple[JobLayout, StoredStep] | None:
        """Return the newest whole step of the newest attempt with its layout, unless it is too large."""
        state = self._ingest.newest
        if state is None or state.layout is None:
            return None
        for step in reversed(self._ingest.store.newest(CHOSEN_OF)):
            if step.digest.complete and step.view.attempt == state.attempt:
                return (state.layout, step) if len(step.view.records) <= MOST_RECORDS else None
        return None


def _lost_time(step: StoredStep, before: list[StoredStep], layout: JobLayout, graphs: StepGraphs) -> LostTime | None:
    blame = blame_of(step, before, layout, default_peers(layout), graphs)
    return None if blame is None else LostTime(step.key, blame.lost_s, blame.blamed_s)
