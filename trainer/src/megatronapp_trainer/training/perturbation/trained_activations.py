"""Perturbation of activations while a model trains: which token of which sample each number of a pass belongs to.

Shapes: S positions of this rank, B samples of a microbatch.
"""

import collections
import dataclasses
from typing import Any

import torch

from megatronapp_common.scope.perturbation.recipe import Recipe
from megatronapp_trainer.hooks.interventions import WriteHooks
from megatronapp_trainer.hooks.perturbation.activations import (
    LOGITS,
    ActivationPerturbations,
    PlacedPerturbation,
    by_site,
    layers_of,
)
from megatronapp_trainer.hooks.perturbation.model_shard import ModelShard
from megatronapp_trainer.hooks.perturbation.row_context import RowContext
from megatronapp_trainer.hooks.recomputation import is_recomputing
from megatronapp_trainer.hooks.sites import ShardAxis, Site, site_of


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SamplePlan:
    """Sizes from which the sample of a row follows."""

    micro_batch_size: int
    seq_length: int
    data_rank: int
    data_size: int

    def first_sample(self, consumed_samples: int, microbatch: int) -> int:
        """Return the global number of the first sample of this replica's microbatch."""
        return consumed_samples + (microbatch * self.data_size + self.data_rank) * self.micro_batch_size


class TrainingActivations:
    """The activation perturbations of a recipe on one rank, in steps whose passes of each chunk run in order."""

    def __init__(self, recipe: Recipe, models: list[Any], shard: ModelShard, plan: SamplePlan) -> None:
        self._plan = plan
        self._shard = shard
        self._consumed = 0
        self._passes: collections.Counter[tuple[int, str, int, bool]] = collections.Counter()
        """Passes of this step by chunk, site, layer, and whether they were repeated for a backward pass."""
        self._perturbations = ActivationPerturbations(recipe, models[0], shard, slots=0, source_lengths={})
        self._sites = by_site(recipe)
        self._models = models
        self._hooks = [WriteHooks(model) for model in models]

    def install(self, iteration: int, consumed_samples: int) -> None:
        """Perturb the passes of the step that follows after `iteration` steps."""
        self._consumed = consumed_samples
        self._passes.clear()
        self._perturbations.step = iteration
        for chunk, hooks in enumerate(self._hooks):
            for name, placed in self._sites.items():
                hook = _TrainingHook(self, chunk, _as_trained(site_of(name)), placed)
                hooks.add(site_of(name), hook, layers=layers_of(placed), required=False)

    def remove(self) -> None:
        """Remove the hooks of the step."""
        for hooks in self._hooks:
            hooks.remove()

    def changed(
        self, value: torch.Tensor, chunk: int, layer: int, site: Site, placed: list[PlacedPerturbation]
    ) -> torch.Tensor:
        """Return the value of a site in a pass, perturbed: [S, B, ..], or [S, ..] for a single sample."""
        microbatch = self._next_microbatch(chunk, site.name, layer)
        samples = self._plan.micro_batch_size
        rows = value.flatten(0, 1) if samples > 1 else value
        self._perturbations.rows = self._context(rows, self._plan.first_sample(self._consumed, microbatch))
        for entry in placed:
            if entry.perturbation.layers is None or layer in entry.perturbation.layers:
                rows = self._perturbations.changed(rows, layer, site, entry)
        self._perturbations.rows = None
        # A copy, no view: megatron-core frees the output of a pipeline stage, which must own its memory.
        return rows.view(value.shape).clone() if samples > 1 else rows

    def _next_microbatch(self, chunk: int, site: str, layer: int) -> int:
        """Return the microbatch of a pass: forward passes run in order, and so do their repetitions."""
        key = chunk, site, layer, is_recomputing()
        self._passes[key] += 1
        return self._passes[key] - 1

    def _context(self, rows: torch.Tensor, first_sample: int) -> RowContext:
        samples, device = self._plan.micro_batch_size, rows.device
        places = torch.arange(rows.size(0), device=device)
        positions = torch.div(places, samples, rounding_mode="floor")
        if rows.size(0) < self._plan.seq_length * samples:  # with sequence parallelism a slice of the sequence
            positions = positions + self._shard.tensor_rank * (rows.size(0) // samples)
        none = torch.zeros_like(places)
        return RowContext(
            positions_N=positions,
            samples_N=(places % samples + first_sample) & 0xFFFFFFFF,
            prompts_N=none,
            slots_N=none,
        )


class _TrainingHook:
    """Write hook of one site of one chunk."""

    def __init__(self, owner: TrainingActivations, chunk: int, site: Site, placed: list[PlacedPerturbation]) -> None:
        self._owner = owner
        self._chunk = chunk
        self._site = site
        self._placed = placed

    def __call__(self, value: torch.Tensor, layer: int) -> torch.Tensor:
        return self._owner.changed(value, self._chunk, layer, self._site, self._placed)


def _as_trained(site: Site) -> Site:
    """Return a site as it is in training: each tensor rank has its part of the vocabulary."""
    return dataclasses.replace(site, axis=ShardAxis.FEATURES) if site.name == LOGITS else site
