"""State of a controlled training as its answers show it."""

import dataclasses

from megatronapp_analyzer.hub.http.training import schemas
from megatronapp_analyzer.hub.reader import HubReader
from megatronapp_analyzer.hub.state.ranks import RankState
from megatronapp_analyzer.hub.state.training_orders import StoredOrder
from megatronapp_common.control.orders import PerturbationTarget, TrainingState


def training_view(hub: HubReader) -> schemas.TrainingView | None:
    """Return the state of the training; None where it obeys no orders."""
    control = hub.identity.control
    if control is None:
        return None
    progress = hub.ranks.progress
    report = None if progress is None else progress.control
    holder = hub.lease.holder
    return schemas.TrainingView(
        state=_state(hub),
        attempt=(progress.attempt if progress else None) or 0,
        step=progress.iteration if progress else None,
        total_steps=progress.total_iterations if progress else None,
        steps_left=report.steps_left if report else 0,
        paused_since=report.paused_since if report else None,
        paused_seconds=report.paused_seconds if report else 0.0,
        gpus=control.gpus,
        saves=report.saves if report else False,
        resume_after_seconds=control.resume_after_s if report is None else report.resume_after_seconds,
        capture_every=captured_every(hub),
        perturbation=None if report is None else report.perturbation,
        perturbed=[] if report is None else [schemas.PerturbedStepsView(**dict(steps)) for steps in report.perturbed],
        lease=None if holder is None else schemas.LeaseView(**dataclasses.asdict(holder)),
        orders=[order_view(order) for order in hub.orders.newest_first],
    )


def order_view(order: StoredOrder) -> schemas.OrderView:
    """Return an order as answers show it."""
    return schemas.OrderView(
        id=order.id,
        attempt=order.attempt,
        kind=order.kind.value,
        steps=order.steps,
        every=order.every,
        digest=order.digest,
        target=None if order.recipe is None else PerturbationTarget(order.target).value,
        replica=order.replica,
        who=order.who,
        at=order.at,
        from_step=order.from_step,
        refusal=order.refusal,
    )


def captured_every(hub: HubReader) -> int | None:
    """Return the interval of captures that the ranks have reported; None: none."""
    report = None if hub.ranks.progress is None else hub.ranks.progress.control
    return hub.captures.store.every if report is None else report.capture_every


def ranks_have_ended(hub: HubReader) -> bool:
    """Return True if all ranks of the newest attempt have ended; another attempt may follow."""
    states = hub.ranks.states()
    return bool(states) and all(state == RankState.ENDED for state in states.values())


def _state(hub: HubReader) -> schemas.TrainingStateName:
    reported, expected = hub.orders.reported, hub.orders.expected
    over = hub.ranks.progress is not None and hub.ranks.progress.state == "done"
    if hub.ended is not None or over:
        return "ended"
    if reported is None or expected is None or ranks_have_ended(hub):
        return "starting"
    if expected.state is TrainingState.STOPPING:
        return "stopping"
    if expected.state is TrainingState.PAUSED and reported.state is not TrainingState.PAUSED:
        return "pausing"
    return reported.state.value
