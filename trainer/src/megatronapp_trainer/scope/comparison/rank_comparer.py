"""Comparison of branches on one rank: reads logits and sites of their rows in each step.

comparer = RankComparer(group)
comparer.attach(group)  # on every rank, after other observers
comparer.collected = results.add  # on rank 0

Shapes: L layers, A heads, D channels of a head and H hidden size of this rank; V its part of the vocabulary; N tokens
of a step; R rows.
"""

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from megatronapp_common.scope.perturbation.recipe import Recipe
from megatronapp_trainer.device.idle_window import IdleWindow
from megatronapp_trainer.device.place import sent_to
from megatronapp_trainer.hooks.forward_observer import ComparedRow, ForwardResult, StepContext
from megatronapp_trainer.hooks.hook_collector import HookCollector
from megatronapp_trainer.hooks.observers import ObserverPair
from megatronapp_trainer.hooks.sites import Site, site_of
from megatronapp_trainer.inference.patch_sources import check_lengths, lengths_of
from megatronapp_trainer.scope.analysis.rank_exchange import RankExchange
from megatronapp_trainer.scope.capture.rank_shard import Span, rank_shard_of
from megatronapp_trainer.scope.comparison.commands import TOPIC, BeginComparison, CollectRows, ComparisonCommand
from megatronapp_trainer.scope.comparison.shard_divergence import change_of, divergence_parts

RESIDUAL, HEADS = site_of("residual"), site_of("head_output")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankRows:
    """Compared rows of one rank."""

    rows: Sequence[tuple[int, int]]
    """Branch and index of the token, of each row."""
    layers: Span
    heads: Span
    divergence: NDArray[np.float64] | None
    """[R, P, 8], P parts with the columns of `shard_divergence`; None but on the last stage."""
    drift: NDArray[np.float32] | None
    """[R, L] on the first tensor rank."""
    changes: NDArray[np.float32] | None
    """[R, L, A]."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _RowValues:
    """Values of a branch at one row."""

    logits_V: torch.Tensor | None
    """Whole vocabulary, of the reference this rank's part; None but on the last stage."""
    residual_LH: torch.Tensor | None
    heads_LAD: torch.Tensor | None

    def owned(self, part: Span) -> "_RowValues":
        """Return a copy, with a part of the vocabulary; the next replay of a CUDA graph overwrites the original."""
        return _RowValues(
            logits_V=None if self.logits_V is None else self.logits_V[slice(*part)].clone(),
            residual_LH=None if self.residual_LH is None else self.residual_LH.clone(),
            heads_LAD=None if self.heads_LAD is None else self.heads_LAD.clone(),
        )


@dataclasses.dataclass(kw_only=True)
class _Open:
    """A comparison that has begun."""

    settings: BeginComparison
    reference: dict[int, _RowValues] = dataclasses.field(default_factory=dict)
    rows: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    divergence: list[torch.Tensor] = dataclasses.field(default_factory=list)
    drift: list[torch.Tensor] = dataclasses.field(default_factory=list)
    changes: list[torch.Tensor] = dataclasses.field(default_factory=list)


class RankComparer:
    """Observer of the steps of compared branches. Used in the engine's thread only."""

    def __init__(self, group: Any) -> None:  # noqa: ANN401 - WorkerGroup, or another one with a model runner
        runner = group.runner
        self.shard = rank_shard_of(
            runner.model, runner.layout, vocab_size=runner.vocab_size, max_length=runner.capacity
        )
        self.collected: Callable[[str, int, Sequence[RankRows]], None] = lambda _name, _number, _rows: None
        """Callback on rank 0 for the gathered rows of all ranks, with the number of their `CollectRows`."""
        self._runner = runner
        self._exchange = RankExchange(runner.layout, group.process_group, self.shard.layers)
        self._collector = HookCollector(runner.model)
        self._open: dict[str, _Open] = {}
        self._window: IdleWindow | None = None
        """Window in which rows are compared: while the thread waits for the token. None: rows are compared at once."""
        self._later: list[Callable[[], None]] = []
        self._step: StepContext | None = None
        self._rows: list[ComparedRow] = []
        self._chosen: torch.Tensor | None = None
        """Tokens that the step before has chosen, of a step that is ahead."""

    def attach(self, group: Any) -> None:  # noqa: ANN401 - WorkerGroup
        """Observe the runner of this group and take commands of rank 0 from now on."""
        group.handle(TOPIC, self.handle)
        if next(self._runner.model.parameters()).is_cuda:
            self._window = group.idle_window
        observer = self._runner.observer
        self._runner.observer = self if observer is None else ObserverPair(observer, self)

    def check(self, recipe: Recipe, prompt_length: int) -> None:
        """Raise RecipeError where the model lacks what a recipe names, this rank the memory for it, or the source of a
        patch a position of the prompt.
        """
        perturbation = self._runner.perturbation
        perturbation.check(recipe)
        check_lengths(recipe, prompt_length, lengths_of(perturbation.sources(recipe)))

    @property
    def is_empty(self) -> bool:
        """Return true if no comparison is open."""
        return not self._open

    def handle(self, command: ComparisonCommand) -> None:
        """Begin, gather or end a comparison; an unknown name is ignored on all ranks alike."""
        self.settle()
        if isinstance(command, BeginComparison):
            self._open[command.name] = _Open(settings=command)
        elif command.name in self._open:
            if isinstance(command, CollectRows):
                self._collect(command)
            else:
                del self._open[command.name]
                if not self._open:
                    self._collector.remove()

    def step_begin(self, step: StepContext, /) -> Hashable:
        """Read the sites of a step that has compared rows; None if it has none."""
        if not self._open:
            return None
        self.settle()
        self._rows = [row for row in step.compared if row.name in self._open]
        sites = self._sites()
        if not self._rows:
            self._collector.begin({}, {})
            return None
        self._step = step
        self._chosen = None if step.chosen_R is None else step.chosen_R.clone()  # before this step's own are written
        self._collector.set_sites(sites)
        tokens = None
        if not step.decode:
            picked = [step.output_rows[row.output] for row in self._rows]
            tokens = sent_to(step.positions_N.device, torch.tensor(picked))
        self._collector.begin(dict.fromkeys(sites, tokens), {})
        settings = [self._open[row.name].settings for row in self._rows]
        # The settings and not the sites, of which tensor ranks read different ones: all capture equal families.
        return "compared", any(measured.drift for measured in settings), any(measured.heads for measured in settings)

    def collect(self) -> dict[str, torch.Tensor]:
        """Stack the values of all layers: [L, N, ..] of each site."""
        found = {name: self._collector.stacked(name) for name in self._sites() if self._collector.layers(name)}
        self._collector.take()
        return found

    def step_end(self, result: ForwardResult, /) -> None:
        """Hold the reference's rows, and compare those of the others with them, before the next step is launched."""
        step, self._step = self._step, None
        assert step is not None
        rows, chosen = self._rows, self._chosen
        self._later.append(lambda: self._read(step, rows, result, chosen))
        if self._window is None:
            self.settle()
        else:
            self._window.defer(self.settle)

    def settle(self) -> None:
        """Compare the rows of earlier steps that wait for an idle window."""
        later, self._later = self._later, []
        for work in later:
            work()

    @torch.no_grad()
    def _read(
        self,
        step: StepContext,
        rows: Sequence[ComparedRow],
        result: ForwardResult,
        chosen_R: torch.Tensor | None,
    ) -> None:
        for row_place, row in enumerate(rows):
            values = self._values(row, _slot_of(step, row) if step.decode else row_place, result)
            found = self._open[row.name]
            if row.branch == 0:
                found.reference[row.index] = values.owned(self._vocabulary_part())
            else:
                self._compare(found, row, values, chosen_R)

    def forget(self, key: Hashable) -> None:
        """Do nothing: the only graphs are those of the runner."""

    def _sites(self) -> dict[str, Site]:
        settings = [self._open[row.name].settings for row in self._rows]
        sites = {}
        if any(measured.drift for measured in settings) and self.shard.is_first_of_tensor:
            sites[RESIDUAL.name] = RESIDUAL
        if any(measured.heads for measured in settings):
            sites[HEADS.name] = HEADS
        return sites

    def _values(self, row: ComparedRow, place: int, result: ForwardResult) -> _RowValues:
        """Return this rank's values of a row, in memory that a later step may write."""
        sites = result.collected or {}
        residual, heads = (sites[site.name][:, place] if site.name in sites else None for site in (RESIDUAL, HEADS))
        logits = None if result.logits is None else result.logits[row.output]
        return _RowValues(logits_V=logits, residual_LH=residual, heads_LAD=heads)

    def _vocabulary_part(self) -> Span:
        """Return the part of the vocabulary that this tensor rank compares."""
        count, size = self.shard.vocabulary, -(-self.shard.vocabulary // self.shard.tensor_size)
        return min(count, self.shard.tp * size), min(count, (self.shard.tp + 1) * size)

    def _compare(self, found: _Open, row: ComparedRow, values: _RowValues, chosen_R: torch.Tensor | None) -> None:
        """Compare a row with the reference's."""
        lasting = found.settings.lasting
        reference = found.reference[row.index] if lasting else found.reference.pop(row.index)
        found.rows.append((row.branch, row.index))
        if reference.logits_V is not None and values.logits_V is not None:
            token = row.token if found.settings.watched is None else found.settings.watched
            token_1 = chosen_R if token is None else torch.full((1,), token, device=values.logits_V.device)
            assert token_1 is not None
            first, _ = self._vocabulary_part()
            found.divergence.append(divergence_parts(reference.logits_V, values.logits_V, first, token_1))
        if reference.residual_LH is not None and values.residual_LH is not None:
            found.drift.append(change_of(reference.residual_LH, values.residual_LH))
        if reference.heads_LAD is not None and values.heads_LAD is not None:
            found.changes.append(change_of(reference.heads_LAD, values.heads_LAD))

    def _collect(self, command: CollectRows) -> None:
        found = self._open[command.name]
        part = RankRows(
            rows=tuple(found.rows),
            layers=self.shard.layers,
            heads=self.shard.heads,
            divergence=_stacked(found.divergence),
            drift=_stacked(found.drift),
            changes=_stacked(found.changes),
        )
        for values in (found.rows, found.divergence, found.drift, found.changes):
            values.clear()
        parts = self._exchange.gather(part)
        if parts is not None:
            self.collected(command.name, command.number, parts)


def _slot_of(step: StepContext, row: ComparedRow) -> int:
    """Return the slot of a row of a decode step, of which the layers get one row for each slot."""
    return step.segments[step.output_rows[row.output]].slot


def _stacked(rows: list[torch.Tensor]) -> NDArray[Any] | None:
    return torch.stack(rows).cpu().numpy() if rows else None
