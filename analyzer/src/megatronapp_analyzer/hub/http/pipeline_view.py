"""Answer about the pipeline of a job: its plans, and what its steps measured under each of them."""

import dataclasses
import statistics
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from megatronapp_analyzer.hub.http import schemas
from megatronapp_analyzer.hub.ingest.pipeline_passes import (
    TRANSFER_STEPS,
    PassesCache,
    PipelinePasses,
    Transfers,
    path_name,
)
from megatronapp_analyzer.hub.ingest.store import StoredStep
from megatronapp_analyzer.hub.reader import HubReader
from megatronapp_analyzer.hub.state.progress import PipelinePlan
from megatronapp_analyzer.model import JobLayout

PIPELINE_STEPS = 500
"""Steps in an answer at most: the newest of the range."""


@dataclasses.dataclass(frozen=True, slots=True)
class ChosenSteps:
    """Stored steps of the newest attempt and what is known of it, for work in a thread."""

    attempt: int
    layout: JobLayout | None
    steps: list[StoredStep]
    plans: list[PipelinePlan]
    samples: list[PipelinePasses]
    """Figures of the first steps under each plan; none for a range of steps."""


def choose_steps(hub: HubReader, first: int | None, last: int | None) -> ChosenSteps:
    """Return the newest whole steps of a range."""
    state = hub.ingest.newest
    attempt = 0 if state is None else state.attempt
    steps = [
        step
        for step in hub.ingest.store.select(first, last, newest=PIPELINE_STEPS)
        if step.view.attempt == attempt and step.digest.complete
    ]
    layout = None if state is None else state.layout
    samples = hub.plan_samples.of_attempt(attempt) if first is None and last is None else []
    return ChosenSteps(attempt, layout, steps[-PIPELINE_STEPS:], hub.ranks.plans(), samples)


def pipeline_view(chosen: ChosenSteps, cache: PassesCache) -> schemas.PipelineView:
    """Return plans, steps and transfers of the pipeline."""
    layout, plans = chosen.layout, chosen.plans
    steps = [] if layout is None else cache.figures(chosen.steps, layout)
    newest = {step.step for step in steps[-TRANSFER_STEPS:]}
    measured = {step.step: step for step in (*chosen.samples, *steps)}.values()
    ends = [*(plan.from_step for plan in plans[1:]), None][: len(plans)]
    return schemas.PipelineView(
        attempt=chosen.attempt,
        stages=1 if layout is None else layout.pp,
        plans=[
            _period(
                plan, [step for step in measured if plan.from_step <= step.step and (end is None or step.step < end)]
            )
            for plan, end in zip(plans, ends, strict=True)
        ],
        steps=[step.step for step in steps],
        seconds=[round(step.seconds, 6) for step in steps],
        bubble=[_mean(step.bubble) for step in steps],
        early=[step.early for step in steps],
        passes=[step.count for step in steps],
        transfers=[
            transfer_view(pair) for pair in cache.transfers([step for step in chosen.steps if step.view.step in newest])
        ],
        transfer_steps=len(newest),
    )


def transfer_view(pair: Transfers) -> schemas.TransferView:
    """Return the transfers of a pair by one path."""
    return schemas.TransferView(
        source=pair.source,
        destination=pair.destination,
        path=path_name(pair.path),
        transfers=pair.count,
        bytes=pair.size_bytes,
        copy_seconds=round(pair.seconds, 9),
        bytes_per_second=pair.size_bytes / pair.seconds if pair.seconds > 0 else None,
    )


def _period(plan: PipelinePlan, steps: Sequence[PipelinePasses]) -> schemas.PlanPeriod:
    table = np.stack([step.bubble for step in steps]) if steps else np.empty((0, 0))
    ranks = [_median(column) for column in table.T]
    return schemas.PlanPeriod(
        plan=plan,
        steps=len(steps),
        seconds=round(statistics.median(step.seconds for step in steps), 6) if steps else None,
        bubble=_mean(np.array([np.nan if value is None else value for value in ranks])),
        rank_bubbles=ranks,
        early_per_step=statistics.mean(step.early for step in steps) if steps else None,
    )


def _median(values: NDArray[np.float64]) -> float | None:
    known = values[np.isfinite(values)]
    return round(float(np.median(known)), 4) if len(known) else None


def _mean(values: NDArray[np.float64]) -> float | None:
    """Return the mean over the ranks that are known."""
    known = values[np.isfinite(values)]
    return round(float(known.mean()), 4) if len(known) else None
