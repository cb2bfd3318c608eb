"""Perturbation of a model that trains, by orders that all ranks obey at the same step boundary."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch

from megatronapp_common.control.orders import Order, PerturbationTarget
from megatronapp_common.errors import OrderError
from megatronapp_common.scope.perturbation.recipe import Recipe, RecipeError
from megatronapp_trainer.checkpoint.train_state import PerturbedSteps, TrainState
from megatronapp_trainer.hooks.perturbation.check import check_recipe
from megatronapp_trainer.hooks.perturbation.model_shard import ModelShard
from megatronapp_trainer.hooks.perturbation.storage import PerturbedParameters
from megatronapp_trainer.training.perturbation.master_parameters import MasterParameters
from megatronapp_trainer.training.perturbation.trained_activations import SamplePlan, TrainingActivations
from megatronapp_trainer.training.perturbation.training_limits import TrainingLimits, check_order
from megatronapp_trainer.training.perturbation.training_memory import TrainingMemory

MAX_REPORTED = 8
"""Perturbed spans of steps in the progress document, the newest."""


@dataclasses.dataclass(kw_only=True)
class _OrderedPerturbation:
    """A perturbation that was ordered, on this rank."""

    entry: PerturbedSteps
    steps_left: int | None
    """Steps in which activations are perturbed; None: until it is undone."""
    changes_model: bool
    """The recipe changes parameters of the next step, on some replica: gathers of parameters are collective."""
    model: PerturbedParameters | None = None
    """Parameters of the next step; None: unchanged on this replica."""
    master: MasterParameters | None = None
    """Parameters of the optimizer; None: unchanged."""
    activations: TrainingActivations | None = None
    """None: unchanged on this replica."""
    has_activations: bool
    """The recipe has perturbations of activations, on some replica."""
    steps_done: int = 0


class TrainedPerturbation:
    """`TrainingPerturbation` of a rank with an optimizer. At most one recipe is in force."""

    def __init__(
        self,
        state: TrainState,
        shard: ModelShard,
        plan: SamplePlan,
        *,
        limits: TrainingLimits,
        memory: TrainingMemory,
        overlaps_gathers: bool,
        weights_changed: Callable[[], None],
    ) -> None:
        """Take the state that is trained.

        Args:
            state: of the training; its record of perturbed steps is kept up to date.
            shard: sizes of the model.
            plan: which samples this rank's microbatches have.
            limits: what orders may ask for.
            memory: estimates what they take.
            overlaps_gathers: parameters are gathered while forward passes run.
            weights_changed: called on all replicas when parameters have changed without a step of the optimizer.
        """
        self._state = state
        self._shard = shard
        self._plan = plan
        self._limits = limits
        self._memory = memory
        self._weights_changed = weights_changed
        self._overlaps_gathers = overlaps_gathers
        self._models = [model_of(chunk) for chunk in state.chunks]
        self._prepared: _OrderedPerturbation | None = None
        self._current: _OrderedPerturbation | None = None
        self._newest: _OrderedPerturbation | None = None
        """Perturbation of the newest step, with its parameters, until the next one begins."""

    @property
    def active(self) -> str | None:
        """Return the digest of the recipe in force."""
        return None if self._current is None else self._current.entry.digest

    @property
    def steps(self) -> list[dict[str, Any]]:
        """Return the newest perturbed steps as the progress document has them."""
        return [
            {
                "digest": entry.digest,
                "parameters": entry.parameters,
                "replica": entry.replica,
                "firstStep": entry.first_step,
                "lastStep": entry.last_step,
            }
            for entry in self._state.perturbed[-MAX_REPORTED:]
        ]

    def prepare(self, order: Order, iteration: int) -> None:
        """Check an order to perturb, and draw noise of parameters, without any effect yet. Raises OrderError."""
        try:
            self._prepared = self._drawn(order, iteration)
        except RecipeError as error:
            raise OrderError(*_problem_and_advice(error)) from error
        except torch.OutOfMemoryError as error:
            raise OrderError("a rank has too little memory for the noise", "choose fewer layers or modules") from error

    def commit(self) -> None:
        """Apply what was prepared. Collective over the replicas."""
        self._current, self._prepared = self._prepared, None
        assert self._current is not None
        if self._current.master is not None:
            self._swap_master(self._current.master)
        self._state.perturbed.append(self._current.entry)

    def discard(self) -> None:
        """Forget what was prepared."""
        self._prepared = None

    def undo(self) -> None:
        """End the perturbation in force; a step that has not been perturbed yet never was."""
        current = self._current
        if current is None:
            raise self._nothing_to_undo()
        if current.steps_done == 0:
            if current.master is not None:
                self._swap_master(current.master)
            self._state.perturbed.remove(current.entry)
        self._current = None

    def undo_unused(self) -> None:
        """End the perturbation in force if no step has used it. Collective over the replicas."""
        if self._current is not None and self._current.steps_done == 0:
            self.undo()

    def step_begin(self, iteration: int, consumed_samples: int) -> None:
        """Perturb the passes of the step that follows after `iteration` steps."""
        self._newest = current = self._current
        if current is None:
            return
        if current.steps_done > 0:
            current.model = None
        elif current.changes_model:
            self._stop_gathers()
            self._swap(current.model)
        if current.activations is not None:
            current.activations.install(iteration, consumed_samples)
        current.entry.last_step = iteration + 1

    def passes_done(self) -> None:
        """Compute as before again, and count the step."""
        current = self._current
        if current is None:
            return
        if current.activations is not None:
            current.activations.remove()
        if current.steps_done == 0 and current.changes_model:
            self._swap(current.model)
            self._resume_gathers()
        current.steps_done += 1
        is_over = current.steps_done == current.steps_left
        if is_over or not current.has_activations:
            self._current = None

    @contextlib.contextmanager
    def again(self) -> Iterator[str | None]:
        """Perturb passes inside the context as those of the newest step were; no gather of parameters overlaps them."""
        newest = self._newest
        if newest is None:
            yield None
            return
        repeats_parameters = newest.changes_model and newest.steps_done == 1
        if repeats_parameters:
            self._swap(newest.model)
        if newest.activations is not None:
            newest.activations.install(self._state.iteration, self._state.consumed_samples)
        try:
            yield newest.entry.digest
        finally:
            if newest.activations is not None:
                newest.activations.remove()
            if repeats_parameters:
                self._swap(newest.model)

    def _drawn(self, order: Order, iteration: int) -> _OrderedPerturbation:
        if self._current is not None:
            raise OrderError(f"perturbation {self.active} is in force", "undo it first")
        self._newest = None
        if order.recipe is None:
            raise OrderError("the recipe is missing, or larger than an order holds", "choose fewer perturbations")
        recipe = Recipe.model_validate_json(order.recipe)
        for model in self._models:
            check_recipe(recipe, model, self._shard)
        check_order(order, recipe, self._limits)
        stored = any(entry.kind == "storage" for entry in recipe.perturbations)
        # Collective, so before checks and allocations that may fail on some replicas alone.
        with self._gathered() if stored else contextlib.nullcontext():
            return self._draw_order(order, recipe, iteration, is_stored=stored)

    def _draw_order(self, order: Order, recipe: Recipe, iteration: int, *, is_stored: bool) -> _OrderedPerturbation:
        """Draw what this rank changes. Raises OrderError if it lacks the memory."""
        is_mine = order.replica in {None, self._plan.data_rank}
        self._memory.check(recipe, self._models, order.target, perturbs=is_mine)
        found = _OrderedPerturbation(
            entry=PerturbedSteps(
                digest=recipe.digest,
                parameters=order.target.value if is_stored else None,
                replica=order.replica,
                first_step=iteration + 1,
            ),
            steps_left=order.steps or None,
            changes_model=is_stored and order.target is PerturbationTarget.MODEL,
            has_activations=any(entry.kind != "storage" for entry in recipe.perturbations),
        )
        if found.has_activations and is_mine:
            found.activations = TrainingActivations(recipe, self._models, self._shard, self._plan)
        if is_stored and order.target is PerturbationTarget.MASTER:
            found.master = MasterParameters(
                recipe, self._models, self._state.chunks, self._state.optimizer, self._shard
            )
        elif is_stored and is_mine:
            found.model = PerturbedParameters(recipe, self._models, self._shard)
        return found

    def _nothing_to_undo(self) -> OrderError:
        newest = self._state.perturbed[-1] if self._state.perturbed else None
        if newest is None or newest.parameters != PerturbationTarget.MASTER.value:
            return OrderError("no perturbation is in force", "perturb the training first")
        return OrderError(
            f"step {newest.first_step} has used the perturbed parameters, so that they cannot be undone",
            f"load a checkpoint from before step {newest.first_step}",
        )

    def _swap(self, model: PerturbedParameters | None) -> None:
        """Exchange perturbed parameters of the model; None: this replica has none, and others may."""
        if model is not None:
            model.swap_contents()
        self._weights_changed()

    def _swap_master(self, master: MasterParameters) -> None:
        with self._gathered():
            master.swap()
        self._weights_changed()

    @contextlib.contextmanager
    def _gathered(self) -> Iterator[None]:
        """Let no gather of parameters be pending inside the context."""
        self._stop_gathers()
        try:
            yield
        finally:
            self._resume_gathers()

    def _stop_gathers(self) -> None:
        """Wait for pending gathers of parameters, and start none. Collective over the replicas."""
        if self._overlaps_gathers:
            for chunk in self._state.chunks:
                chunk.disable_forward_pre_hook()

    def _resume_gathers(self) -> None:
        if self._overlaps_gathers:
            for chunk in self._state.chunks:
                chunk.enable_forward_pre_hook()


def _problem_and_advice(error: RecipeError) -> tuple[str, str]:
    """Return the halves of a text such as `perturbations.0.heads: q has no head 9; write 0 to 3`."""
    problem, _, advice = str(error).rpartition("; ")
    return (problem, advice) if problem else (advice, "change the recipe")


def model_of(chunk: Any) -> Any:  # noqa: ANN401 - megatron-core's wrappers
    """Return the model in megatron-core's wrappers of data parallelism and half precision."""
    while not hasattr(chunk, "decoder"):
        chunk = chunk.module
    return chunk
