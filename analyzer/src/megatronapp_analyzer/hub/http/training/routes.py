"""Routes by which controllers pause, resume, step, stop and capture a training, one of them at a time."""

import dataclasses
import secrets
import time
from typing import Annotated, Any

from fastapi import APIRouter, Depends, status

from megatronapp_analyzer.hub.http.access import HubOf
from megatronapp_analyzer.hub.http.training import schemas, views
from megatronapp_analyzer.hub.service import Hub
from megatronapp_analyzer.hub.state.training_orders import described
from megatronapp_analyzer.scope.routes import CONTROLLER, bounded
from megatronapp_analyzer.scope.store.audit_log import who_of
from megatronapp_common.control.orders import Order, OrderKind, PerturbationTarget, check_order_size, check_recipe_size
from megatronapp_common.errors import OrderError
from megatronapp_common.scope.perturbation.recipe import Recipe, RecipeError, parse_recipe
from megatronapp_common.web.models import Problem
from megatronapp_common.web.problems import HttpError
from megatronapp_common.web.roles import direct

PROBLEM: dict[str, Any] = {"model": Problem}
PROBLEMS: dict[int | str, dict[str, Any]] = {401: PROBLEM, 409: PROBLEM, 422: PROBLEM, 429: PROBLEM}
BODY: dict[int | str, dict[str, Any]] = {400: PROBLEM, 403: PROBLEM, 408: PROBLEM, 413: PROBLEM}

router = APIRouter(prefix="/api/v1/training", responses=PROBLEMS, dependencies=[Depends(bounded)])
Who = Annotated[str, Depends(direct(who_of))]


@router.get("", operation_id="getTraining")
async def training(hub: HubOf) -> schemas.TrainingView:
    """State of the training, who controls it, and the newest orders."""
    found = views.training_view(hub)
    if found is None:
        raise _off()
    return found


@router.post("/lease", operation_id="controlTraining", responses=BODY, dependencies=CONTROLLER)
async def lease(hub: HubOf, request: schemas.LeaseRequest, who: Who) -> schemas.LeaseGrant:
    """Take, renew or release the control of the training; it ends 30 s after it was taken or renewed."""
    _check_controlled(hub)
    key = request.key
    if request.action == "take":
        key, former = hub.lease.take(who, request.client, force=request.force)
        if former is not None:
            hub.scope.probe_client.actions.note(who, f"took the control of the training from {former.who}")
    elif request.action == "renew":
        hub.lease.renew(str(key))
    else:
        hub.lease.release(str(key))
        key = None
    hub.send_control_documents()
    view = views.training_view(hub)
    return schemas.LeaseGrant(key=key, lease=None if view is None else view.lease)


@router.post(
    "/orders",
    operation_id="orderTraining",
    status_code=status.HTTP_202_ACCEPTED,
    responses=BODY,
    dependencies=CONTROLLER,
)
async def order(hub: HubOf, request: schemas.OrderRequest, who: Who) -> schemas.OrderView:
    """Give an order. All ranks obey at the same step boundary; `fromStep` of getTraining says at which."""
    known = None if request.id is None else hub.orders.find(request.id)
    if known is not None:
        return views.order_view(known)
    _check_controlled(hub)
    hub.lease.check_holds(request.lease)
    progress = hub.ranks.progress
    saves = progress is not None and progress.control is not None and progress.control.saves
    stored = hub.orders.add(
        request.id or secrets.token_hex(8),
        _order_of(request),
        who=who,
        at=round(time.time(), 3),
        saves=saves,
    )
    hub.scope.probe_client.actions.note(who, described(stored))
    return views.order_view(stored)


def _order_of(request: schemas.OrderRequest) -> Order:
    """Return the order of a request. Raises HttpError for a recipe with mistakes, or one that is too large."""
    order = Order(
        0,
        OrderKind(request.kind),
        request.steps or 0,
        request.every,
        target=PerturbationTarget(request.target or "model"),
        replica=request.replica,
    )
    if request.recipe is None:
        return order
    try:
        recipe = parse_recipe(request.recipe)
        _check_no_patch(recipe)
        check_recipe_size(recipe.canonical())
        order = dataclasses.replace(order, recipe=recipe.canonical())
        check_order_size(order)
    except (RecipeError, OrderError) as error:
        raise HttpError(422, "invalid-request", f"recipe: {error}", "See docs/perturbation.md.") from error
    return order


def _check_no_patch(recipe: Recipe) -> None:
    """Raise RecipeError for a patch, which needs a prompt."""
    for place, entry in enumerate(recipe.perturbations):
        if entry.action.type == "patch":
            raise RecipeError(
                f"perturbations.{place}.action.type: a training has no other prompt to patch from; "
                "write gaussian, uniform, zero or mean"
            )


def _check_controlled(hub: Hub) -> None:
    """Raise HttpError unless orders reach the ranks of this job."""
    view = views.training_view(hub)
    if view is None:
        raise _off()
    if view.state == "ended":
        raise HttpError(409, "ended", "this training has ended", "Start it again to continue from its checkpoint.")
    if views.ranks_have_ended(hub):
        raise HttpError(409, "not-training", "the ranks have ended, and do not train again yet", "Wait until they do.")


def _off() -> HttpError:
    return HttpError(
        409,
        "control-off",
        "this training obeys no orders",
        "Start the job with spec.scope.training.enabled: true.",
    )
