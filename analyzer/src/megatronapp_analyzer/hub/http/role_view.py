"""Answer about forward and backward ranks: their balance, passes and waits, and the shipments between them."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from megatronapp_analyzer.hub.http import schemas
from megatronapp_analyzer.hub.http.pipeline_view import ChosenSteps, transfer_view
from megatronapp_analyzer.hub.ingest.pipeline_passes import TRANSFER_STEPS, PassesCache
from megatronapp_analyzer.hub.ingest.role_passes import RolePasses, RolesCache, ranks_of, shipments
from megatronapp_analyzer.hub.state.progress import ForwardBackward
from megatronapp_analyzer.model import JobLayout
from megatronapp_common.topology import RankRole

DECIMALS = 7
Numbers = list[float | None]


def forward_backward_view(
    chosen: ChosenSteps, state: ForwardBackward | None, roles: RolesCache, passes: PassesCache
) -> schemas.ForwardBackwardView:
    """Return roles, steps and shipments; without MegaFBD they are empty."""
    layout = chosen.layout if chosen.layout is not None and chosen.layout.roles else None
    steps = [] if layout is None else roles.figures(chosen.steps, layout)
    newest = steps[-TRANSFER_STEPS:]
    measured = {step.step for step in newest}
    forward, backward = (
        np.empty(0, np.int64) if layout is None else ranks_of(role, layout)
        for role in (RankRole.FORWARD, RankRole.BACKWARD)
    )
    stored = [step for step in chosen.steps if step.view.step in measured]
    return schemas.ForwardBackwardView(
        attempt=chosen.attempt,
        state=state,
        roles=[] if layout is None else _roles(newest, layout),
        role_steps=len(newest),
        steps=[step.step for step in steps],
        seconds=[round(step.seconds, DECIMALS) for step in steps],
        forward_busy=[mean(step.busy[forward]) for step in steps],
        backward_busy=[mean(step.busy[backward]) for step in steps],
        forward_seconds=[mean(step.pass_seconds[forward]) for step in steps],
        backward_seconds=[mean(step.pass_seconds[backward]) for step in steps],
        shipment_wait_seconds=[mean(step.wait_seconds[backward]) for step in steps],
        credit_wait_seconds=[mean(step.wait_seconds[forward]) for step in steps],
        transfers=[]
        if layout is None
        else [transfer_view(pair) for pair in shipments(passes.transfers(stored), layout)],
    )


def _roles(steps: Sequence[RolePasses], layout: JobLayout) -> list[schemas.RoleView]:
    views = []
    for role in (RankRole.FORWARD, RankRole.BACKWARD):
        ranks = ranks_of(role, layout)
        busy, lengths, waits = (
            _medians([getattr(step, name)[ranks] for step in steps], len(ranks))
            for name in ("busy", "pass_seconds", "wait_seconds")
        )
        views.append(
            schemas.RoleView(
                role="forward" if role is RankRole.FORWARD else "backward",
                ranks=ranks.tolist(),
                busy=mean(busy),
                pass_seconds=mean(lengths),
                wait_seconds=mean(waits),
                rank_busy=_numbers(busy),
                rank_pass_seconds=_numbers(lengths),
                rank_wait_seconds=_numbers(waits),
            )
        )
    return views


def _medians(rows: Sequence[NDArray[np.float64]], size: int) -> NDArray[np.float64]:
    """Return the median of the numbers of each column; NaN where a column has none."""
    out = np.full(size, np.nan)
    for column in range(size):
        known = np.array([row[column] for row in rows if np.isfinite(row[column])])
        if len(known):
            out[column] = np.median(known)
    return out


def mean(values: NDArray[np.float64]) -> float | None:
    """Return the mean over the ranks that are known; None without any."""
    known = values[np.isfinite(values)]
    return round(float(known.mean()), DECIMALS) if len(known) else None


def _numbers(values: NDArray[np.float64]) -> Numbers:
    return [round(float(value), DECIMALS) if np.isfinite(value) else None for value in values]
