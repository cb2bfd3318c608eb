"""Perturbation of a model runner's steps: which recipe is active, and whose tokens the step has."""

from collections.abc import Callable, Hashable
from typing import Any

import torch
import torch.distributed as dist

from megatronapp_common.scope.perturbation.recipe import Recipe
from megatronapp_trainer.device import Device
from megatronapp_trainer.device.free_memory import free_bytes
from megatronapp_trainer.hooks.perturbation.check import check_recipe
from megatronapp_trainer.hooks.perturbation.limits import check_work, needed_bytes, recorded_bytes
from megatronapp_trainer.hooks.perturbation.model_perturbations import ModelPerturbations
from megatronapp_trainer.hooks.perturbation.model_shard import model_shard_of
from megatronapp_trainer.hooks.perturbation.row_context import PromptPart, RowContext
from megatronapp_trainer.inference.patch_sources import (
    Encode,
    SourceCache,
    check_source,
    lengths_of,
    source_of_name,
)
from megatronapp_trainer.inference.perturbed_steps import AddRecipe, DropRecipe, PerturbedGraphs, PerturbedStep
from megatronapp_trainer.inference.step_plan import StepPlan
from megatronapp_trainer.parallel.layout import Layout


class StepPerturbation:
    """Recipes of one rank of a generating model. Steps without one run the model as it is."""

    def __init__(
        self,
        model: Any,  # noqa: ANN401 - GPTModel
        layout: Layout,
        device: Device,
        *,
        vocab_size: int,
        slots: int,
        capacity: int,
        step_tokens: int,
        drop_graphs: Callable[[Callable[[Hashable], bool]], None],
        clear_slot: Callable[[int], None],
    ) -> None:
        """`capacity`: most tokens of a sequence. `step_tokens`: most tokens of a step. `drop_graphs` drops the CUDA
        graphs of some families, `clear_slot` the cache of a slot.
        """
        self._drop_graphs = drop_graphs
        self._clear_slot = clear_slot
        self._model = model
        self._device = device
        self._shard = model_shard_of(model, layout, vocabulary=vocab_size)
        self._perturbations = ModelPerturbations(model, self._shard, slots=slots)
        self._slots = slots
        self._capacity_tokens = capacity
        self.encode: Encode | None = None
        """Tokenizer of the sources of patches, on rank 0; None: sources are given as tokens."""
        self._sources = SourceCache()
        self._step_tokens = step_tokens
        self._less_free = 0
        """Bytes by which the rank with the least free memory has less than this one."""
        self._capacity: int | None = None
        """Bytes for recipes at the beginning of a change that is under way; None: no change is."""
        self._perturbed_slots: set[int] = set()
        """Slots whose cache a perturbed step has written since it was cleared."""
        self._origins: dict[int, torch.Tensor] = {}
        """Samples, prompt lengths and slots of decode steps, int64 [3, B] by number of slots, for CUDA graphs."""
        self._written: dict[int, tuple[list[int], list[int]]] = {}
        """Samples and prompt lengths that these tensors hold."""

    def check(self, recipe: Recipe) -> int:
        """Return the memory in bytes that a recipe takes on the stage with the most of it; on rank 0, from any thread.

        Raises RecipeError where the model lacks what a recipe names, or where the noise is too much to draw.
        """
        check_recipe(recipe, self._model, self._shard)
        check_work(recipe, self._model, self._shard, tokens=self._step_tokens)
        needed = needed_bytes(recipe, self._model, self._shard, slots=self._slots, tokens=self._step_tokens)
        return needed + recorded_bytes(recipe, self._model, self._shard, lengths_of(self.sources(recipe)))

    def sources(self, recipe: Recipe) -> dict[int, tuple[int, ...]]:
        """Return the tokens of the sources of patches, by index of the perturbation; on rank 0, from any thread.

        A text is tokenized by the first call for a recipe with it. Raises RecipeError for one that cannot be read.
        """
        found = self._sources.get(recipe, self.encode)
        for place, tokens in found.items():
            check_source(place, tokens, capacity=self._capacity_tokens, vocabulary=self._shard.vocabulary)
        return found

    def compare_memory(self, group: Any) -> None:  # noqa: ANN401 - a process group of torch
        """Find the rank with the least free memory, once the cache exists; collective over a gloo group."""
        free = free_bytes(self._device)
        least = torch.tensor(free)
        dist.all_reduce(least, dist.ReduceOp.MIN, group=group)
        self._less_free = free - int(least)

    @property
    def capacity_bytes(self) -> int:
        """Return the memory for recipes on the rank with the least, that of known recipes included; on rank 0."""
        if self._capacity is not None:
            return self._capacity
        return free_bytes(self._device) - self._less_free + self._perturbations.num_bytes

    def change(self, command: AddRecipe | DropRecipe) -> None:
        """Prepare a recipe, or forget it with its CUDA graphs; at a step boundary."""
        self._capacity = self.capacity_bytes
        try:
            if isinstance(command, AddRecipe):
                self._perturbations.add(command.recipe, command.source_lengths)
                return
            digest = command.digest
            self._drop_graphs(lambda family: isinstance(family, PerturbedGraphs) and family.digest == digest)
            self._perturbations.drop(digest)
        finally:
            self._capacity = None

    def activate(self, plan: StepPlan) -> None:
        """Let the model compute with the recipe of a plan, or as it is."""
        self._perturbations.activate(plan.digest)

    def begin_prefill(self, plan: StepPlan, positions_N: torch.Tensor, output_rows: torch.Tensor | None) -> None:
        """Set the tokens of prompts that a step reads, and the rows whose logits it computes (None: all).

        A slot that a perturbed sequence has left is cleared for the next one: a decode step multiplies keys and values
        beyond the end of a sequence by 0, and that is NaN if a perturbation has made them infinite. Observers of the
        step have begun before: what they still read of the last sequence has been launched.
        """
        for segment in plan.segments:
            if segment.start == 0 and segment.slot in self._perturbed_slots:
                self._clear_slot(segment.slot)
                self._perturbed_slots.discard(segment.slot)
        if plan.perturbed is not None:
            self._perturbed_slots.update(segment.slot for segment in plan.segments)
            self._perturbations.set_rows(self._prompt_rows(plan, plan.perturbed, positions_N), output_rows)
        row = 0
        for segment in plan.segments:
            rows = slice(row, row + len(segment.tokens))
            if (source := source_of_name(segment.request_id)) is not None:
                self._perturbations.record(*source, rows, segment.start)
            row = rows.stop

    def begin_decode(self, plan: StepPlan, positions_B: torch.Tensor) -> None:
        """Set the tokens of a decode step, one for each slot; `positions_B` is at the same address in each step."""
        if plan.perturbed is not None:
            self._perturbations.set_rows(self._decode_rows(plan, plan.perturbed, positions_B))

    def end_pass(self) -> None:
        """Perturb no activation until the next step begins, such as when modules are called to read a step."""
        self._perturbations.set_rows(None)
        self._perturbations.end_recording()

    def _prompt_rows(self, plan: StepPlan, step: PerturbedStep, positions_N: torch.Tensor) -> RowContext:
        parts: list[PromptPart] = []
        origins: list[tuple[int, int, int]] = []
        for segment, sample, length in zip(plan.segments, step.samples, step.prompt_lengths, strict=True):
            rows = slice(len(origins), len(origins) + len(segment.tokens))
            parts.append(PromptPart(rows=rows, slot=segment.slot, start=segment.start, prompt_length=length))
            origins += [(sample, length, segment.slot)] * len(segment.tokens)
        samples_N, prompts_N, slots_N = self._device.to_device(torch.tensor(origins).T.contiguous()).unbind()
        return RowContext(
            positions_N=positions_N, samples_N=samples_N, prompts_N=prompts_N, slots_N=slots_N, parts=parts
        )

    def _decode_rows(self, plan: StepPlan, step: PerturbedStep, positions_B: torch.Tensor) -> RowContext:
        """Write the step into the buffer that the graph of this size reads."""
        slots = positions_B.size(0)
        samples, lengths = [0] * slots, [1] * slots
        for segment, sample, length in zip(plan.segments, step.samples, step.prompt_lengths, strict=True):
            samples[segment.slot], lengths[segment.slot] = sample, length
        if slots not in self._origins:
            self._origins[slots] = torch.empty(3, slots, dtype=torch.int64, device=self._device.torch_device)
        if self._written.get(slots) != (samples, lengths):  # a copy delays the launch of the step
            origins_3B = torch.tensor([samples, lengths, list(range(slots))])
            source = origins_3B.pin_memory() if self._device.is_cuda else origins_3B
            self._origins[slots].copy_(source, non_blocking=True)
            self._written[slots] = samples, lengths
        samples_B, prompts_B, slots_B = self._origins[slots].unbind()
        return RowContext(positions_N=positions_B, samples_N=samples_B, prompts_N=prompts_B, slots_N=slots_B)
