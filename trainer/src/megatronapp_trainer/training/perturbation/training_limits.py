"""Check of an order to perturb against what a training can do."""

import dataclasses

from megatronapp_common.control.orders import Order, PerturbationTarget
from megatronapp_common.errors import OrderError
from megatronapp_common.scope.perturbation.recipe import Perturbation, Recipe, RecipeError


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TrainingLimits:
    """Properties of a training that limit orders to perturb it."""

    replicas: int
    """Number of data-parallel replicas."""
    runs_in_order: bool
    """The passes of each chunk run in the order of microbatches."""
    ships_passes: bool
    """MegaFBD: forward passes run on other ranks, and backward passes by graphs that are built at the start."""
    serves_several_replicas: bool
    """A forward rank of MegaFBD runs passes of several replicas with the same weights."""


def check_order(order: Order, recipe: Recipe, limits: TrainingLimits) -> None:
    """Raise OrderError or RecipeError for what a training cannot do; the recipe fits the model."""
    for place, entry in enumerate(recipe.perturbations):
        if (problem := _problem_in_training(entry)) is not None:
            raise RecipeError(f"perturbations.{place}.{problem}")
    stored = any(entry.kind == "storage" for entry in recipe.perturbations)
    activations = any(entry.kind != "storage" for entry in recipe.perturbations)
    if activations:
        _check_activations(limits)
    if order.steps and not activations:
        raise OrderError("steps means nothing for a recipe without activations", "leave it out")
    if order.target is PerturbationTarget.MASTER:
        _check_master(order, stored=stored, activations=activations)
    if order.replica is not None:
        _check_replica(order.replica, limits)


def _check_activations(limits: TrainingLimits) -> None:
    if limits.ships_passes:
        raise OrderError(
            "with MegaFBD backward passes run by graphs that are built at the start, without a perturbation",
            "perturb parameters, or train without --forward-backward-disaggregating",
        )
    if not limits.runs_in_order:
        raise OrderError(
            "with --use-dpp passes run in no fixed order, on which noise of activations depends",
            "perturb parameters, or train without --use-dpp",
        )


def _check_master(order: Order, *, stored: bool, activations: bool) -> None:
    if not stored:
        raise OrderError("master means nothing for a recipe without parameters", "leave it out")
    if activations:
        raise OrderError(
            "master parameters are perturbed for good, and activations until undo",
            "give an order with the parameters, and after its step one with the activations",
        )
    if order.replica is not None:
        raise OrderError("replicas have equal master parameters", "name no replica, or perturb model")


def _check_replica(replica: int, limits: TrainingLimits) -> None:
    if replica >= limits.replicas:
        raise OrderError(f"there is no replica {replica}", f"give 0 to {limits.replicas - 1}")
    if limits.serves_several_replicas:
        raise OrderError(
            "a forward rank runs the passes of several replicas with the same weights",
            "name no replica, or train with --fbd-backward-per-forward 1",
        )


def _problem_in_training(entry: Perturbation) -> str | None:
    """Return what a perturbation of generation has that training lacks."""
    if entry.action.type == "patch":
        return "action.type: a training has no other prompt to patch from; write gaussian, uniform, zero or mean"
    if entry.steps is not None:
        return "steps: are steps of generation; leave them out, and give steps with the order"
    if any(place.origin == "promptEnd" for place in entry.positions or ()):
        return "positions: samples of a training have no prompt; write origin: start"
    if entry.action.over is not None:
        return "action.over: samples of a training have no prompt; write value or values"
    return None
