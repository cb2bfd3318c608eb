"""Calculation and system perturbations: write hooks that change activations in each forward pass."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from megatronapp_common.scope.perturbation.recipe import Perturbation, Recipe
from megatronapp_trainer.hooks.interventions import WriteHooks
from megatronapp_trainer.hooks.perturbation.model_shard import GlobalFeatures, ModelShard, global_features
from megatronapp_trainer.hooks.perturbation.noise import activation_block, blocks_of_rows, gaussian, noise_key, scaled
from megatronapp_trainer.hooks.perturbation.patches import SourceValues
from megatronapp_trainer.hooks.perturbation.philox import RandomBlock, Uint32
from megatronapp_trainer.hooks.perturbation.prompt_means import PromptMeans
from megatronapp_trainer.hooks.perturbation.row_context import RowContext, selected_rows
from megatronapp_trainer.hooks.sites import Site, site_of

LOGITS, LAYER_BOUNDARY = "logits", "residual"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PlacedPerturbation:
    """A perturbation and its index in the recipe."""

    place: int
    perturbation: Perturbation


class ActivationPerturbations:
    """The activation perturbations of a recipe on one rank; `rows` are set before each forward pass."""

    def __init__(
        self,
        recipe: Recipe,
        model: Any,  # noqa: ANN401 - GPTModel
        shard: ModelShard,
        *,
        slots: int,
        source_lengths: Mapping[int, int],
    ) -> None:
        """`source_lengths`: tokens of the sources of patches, by index of the perturbation."""
        self.rows: RowContext | None = None
        """Tokens of the forward pass; None: activations are unchanged."""
        self.output_rows: torch.Tensor | None = None
        """Rows whose logits are computed, int64 on the device; None: all."""
        self.step: int | None = None
        """Training step that noise of calculation depends on; None: the model generates."""
        self._hooks = WriteHooks(model)
        self._seed = recipe.seed
        self._shard = shard
        self._slots = slots
        self._features: dict[tuple[str, torch.Size], GlobalFeatures] = {}
        self._means: dict[tuple[int, int], PromptMeans] = {}
        self._values: dict[int, torch.Tensor] = {}
        """Given means on the device, by index of the perturbation: a CUDA graph cannot copy them from the host."""
        self._head_masks: dict[tuple[int, torch.Size], torch.Tensor] = {}
        """Selected heads on the device, bool [heads, 1], by index of the perturbation and shape of a token's value."""
        self._by_site = by_site(recipe)
        self._sources = {
            place: SourceValues(recipe.perturbations[place], length) for place, length in source_lengths.items()
        }
        self._recipe = recipe
        self._recording = WriteHooks(model)

    def install(self) -> None:
        """Perturb forward passes from now on. Sites that this rank does not hold are skipped."""
        for name, placed in self._by_site.items():
            layers = layers_of(placed)
            self._hooks.add(site_of(name), _SiteHook(self, site_of(name), placed), layers=layers, required=False)

    def remove(self) -> None:
        """Let the model compute as before."""
        self._hooks.remove()

    def record(self, place: int, rows: slice, start: int) -> None:
        """Record the values of a patch in the next forward pass; `start`: position of its first row."""
        perturbation, source = self._recipe.perturbations[place], self._sources[place]

        def hook(value: torch.Tensor, layer: int) -> None:
            source.record(value, layer, rows, start)

        layers = None if perturbation.layers is None else frozenset(perturbation.layers)
        self._recording.add(site_of(perturbation.site or ""), hook, layers=layers, required=False)

    @property
    def num_bytes(self) -> int:
        """Return the memory of the values of patches."""
        return sum(source.num_bytes for source in self._sources.values())

    def end_recording(self) -> None:
        """Remove the hooks that record."""
        self._recording.remove()

    def changed(self, value: torch.Tensor, layer: int, site: Site, placed: PlacedPerturbation) -> torch.Tensor:
        """Return a value with one perturbation applied: [N, features] or [N, heads, channels]."""
        assert self.rows is not None
        rows = self._rows_of(site, self.rows)
        if placed.place in self._sources:
            return self._patched(value, layer, site, placed, rows)
        if placed.perturbation.action.over is not None:  # sums over whole prompts
            return self._changed_rows(value, layer, site, placed, rows)
        blocks = blocks_of_rows(value.size(0), value.shape[1:].numel())
        if len(blocks) == 1:
            return self._changed_rows(value, layer, site, placed, rows)
        return torch.cat([self._changed_rows(value[block], layer, site, placed, rows.block(block)) for block in blocks])

    def _changed_rows(
        self, value: torch.Tensor, layer: int, site: Site, placed: PlacedPerturbation, rows: RowContext
    ) -> torch.Tensor:
        new = self._new_value(value, layer, site, placed, rows)
        chosen = self._chosen(value, site, placed, rows)
        if chosen is None and value.requires_grad and not new.requires_grad:
            chosen = torch.ones((), dtype=torch.bool, device=value.device)  # backward passes go on, with gradient 0
        return new if chosen is None else torch.where(chosen, new, value)

    def _patched(
        self, value: torch.Tensor, layer: int, site: Site, placed: PlacedPerturbation, rows: RowContext
    ) -> torch.Tensor:
        heads, where = placed.perturbation.heads, self._coordinates(site, value)
        mask = None
        if heads is not None and where.heads is not None:
            mask = self._head_mask(placed, value.shape[1:], where.heads, heads)
        return self._sources[placed.place].patched(value, layer, rows, mask)

    def _rows_of(self, site: Site, rows: RowContext) -> RowContext:
        if site.name == LOGITS and self.output_rows is not None:
            return rows.of_rows(self.output_rows)
        return rows

    def _coordinates(self, site: Site, value: torch.Tensor) -> GlobalFeatures:
        key = (site.name, value.shape[1:])
        if key not in self._features:
            self._features[key] = global_features(site, value.shape[1:], self._shard, value.device)
        return self._features[key]

    def _chosen(
        self, value: torch.Tensor, site: Site, placed: PlacedPerturbation, rows: RowContext
    ) -> torch.Tensor | None:
        """Return which numbers are selected, a bool tensor that broadcasts against the value; None: all."""
        masks = []
        if (chosen_N := selected_rows(placed.perturbation, rows)) is not None:
            masks.append(chosen_N.view(-1, *([1] * (value.ndim - 1))))
        where = self._coordinates(site, value)
        if placed.perturbation.heads is not None and where.heads is not None:
            masks.append(self._head_mask(placed, value.shape[1:], where.heads, placed.perturbation.heads))
        if site.name == LOGITS:
            masks.append(where.features < self._shard.vocabulary)
        return functools.reduce(torch.logical_and, masks) if masks else None

    def _head_mask(
        self, placed: PlacedPerturbation, shape: torch.Size, heads: torch.Tensor, chosen: Sequence[int]
    ) -> torch.Tensor:
        """Return which heads are selected. It is copied from the host while a prompt is read, before any CUDA graph."""
        key = (placed.place, shape)
        if key not in self._head_masks:
            self._head_masks[key] = torch.isin(heads, torch.tensor(chosen, device=heads.device))
        return self._head_masks[key]

    def _new_value(
        self, value: torch.Tensor, layer: int, site: Site, placed: PlacedPerturbation, rows: RowContext
    ) -> torch.Tensor:
        action = placed.perturbation.action
        if action.type == "zero":
            return torch.zeros_like(value)
        if action.type == "mean":
            return self._mean(value, layer, site, placed, rows)
        assert action.coefficient is not None
        block = self._block(value, layer, site, placed, rows)
        return (gaussian if action.type == "gaussian" else scaled)(value, action.coefficient, block)

    def _block(
        self, value: torch.Tensor, layer: int, site: Site, placed: PlacedPerturbation, rows: RowContext
    ) -> RandomBlock:
        where = self._coordinates(site, value)
        positions: Uint32 = 0
        samples: Uint32 = 0
        features: Uint32 = where.features
        identity: list[str | int] = [site.name, layer]
        if placed.perturbation.kind == "system":
            identity[0] = "system"
            features = 0 if placed.perturbation.action.type == "uniform" else where.features
        else:
            axes = (-1, *([1] * (value.ndim - 1)))
            positions, samples = rows.positions_N.view(axes), rows.samples_N.view(axes)
            if self.step is not None:
                identity += ["step", self.step]
        return activation_block(
            noise_key(self._seed, placed.place, *identity),
            features=features,
            positions=positions,
            samples=samples,
            heads=0 if where.heads is None else where.heads,
            device=value.device,
        )

    def _mean(
        self, value: torch.Tensor, layer: int, site: Site, placed: PlacedPerturbation, rows: RowContext
    ) -> torch.Tensor:
        action = placed.perturbation.action
        if action.value is not None:
            return torch.full_like(value, action.value)
        if action.values is not None:
            if placed.place not in self._values:
                self._values[placed.place] = torch.tensor(action.values, dtype=value.dtype, device=value.device)
            features = self._coordinates(site, value).features.clamp_max(len(action.values) - 1)
            return self._values[placed.place][features].expand_as(value)
        means_of = self._means.setdefault((placed.place, layer), PromptMeans(self._slots))
        return means_of.replacement(value, rows)


class _SiteHook:
    """Write hook of one site: its perturbations in the order of the recipe."""

    def __init__(self, owner: ActivationPerturbations, site: Site, placed: Sequence[PlacedPerturbation]) -> None:
        self._owner = owner
        self._site = site
        self._placed = placed

    def __call__(self, value: torch.Tensor, layer: int) -> torch.Tensor | None:
        if self._owner.rows is None:
            return None
        changed = value
        for placed in self._placed:
            layers = placed.perturbation.layers
            if layers is None or layer in layers:
                changed = self._owner.changed(changed, layer, self._site, placed)
        return None if changed is value else changed


def by_site(recipe: Recipe) -> dict[str, list[PlacedPerturbation]]:
    """Return the activation perturbations of a recipe by site, in its order."""
    found: dict[str, list[PlacedPerturbation]] = {}
    for place, perturbation in enumerate(recipe.perturbations):
        if perturbation.kind != "storage":
            site = LAYER_BOUNDARY if perturbation.kind == "system" else perturbation.site or ""
            found.setdefault(site, []).append(PlacedPerturbation(place=place, perturbation=perturbation))
    return found


def layers_of(placed: Sequence[PlacedPerturbation]) -> frozenset[int] | None:
    """Return the layers that any of the perturbations selects; None: all."""
    layers = [entry.perturbation.layers for entry in placed]
    return None if None in layers else frozenset(layer for some in layers for layer in some or ())
