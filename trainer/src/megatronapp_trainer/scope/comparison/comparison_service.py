"""Rank 0's side of comparisons: commands to the ranks, requests of branches, and the merged rows."""

import dataclasses
from collections.abc import Callable, Sequence

from megatronapp_common.scope.perturbation.recipe import Recipe
from megatronapp_common.scope.protocol_requests import SamplingSettings
from megatronapp_trainer.inference.engine import Engine
from megatronapp_trainer.inference.request import ComparedBranch, GenerationRequest
from megatronapp_trainer.scope.capture.rank_shard import RankShard
from megatronapp_trainer.scope.comparison.commands import TOPIC, BeginComparison, CollectRows, EndComparison
from megatronapp_trainer.scope.comparison.rank_comparer import RankComparer, RankRows
from megatronapp_trainer.scope.comparison.row_results import RowResult, row_results

Sink = Callable[[int, Sequence[RowResult]], None]
"""Gets the number of a `collect` and its rows, in the engine's thread."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BranchText:
    """Prompt and sampling that all branches of a comparison have."""

    name: str
    ids: tuple[int, ...]
    tokens: int
    sampling: SamplingSettings
    seed: int
    top: int = 0
    """Number of likeliest tokens to report."""
    is_background: bool = False

    def request(
        self, number: int, recipe: Recipe | None, *, is_pair: bool = True, is_forced: bool = False
    ) -> GenerationRequest:
        """Return the request of a branch that generates together with another one, or alone."""
        return GenerationRequest(
            id=f"{self.name}-{number}",
            prompt=self.ids,
            max_new_tokens=self.tokens,
            temperature=self.sampling.temperature,
            top_k=self.sampling.top_k,
            top_p=self.sampling.top_p,
            seed=self.seed,
            stop_texts=self.sampling.stop,
            candidates=self.top,
            group=self.name if is_pair else "",
            perturbation=recipe,
            compared=ComparedBranch(name=self.name, number=number, is_forced=is_forced),
            is_background=self.is_background,
        )

    def forced_request(self, number: int, recipe: Recipe | None, tokens: Sequence[int]) -> GenerationRequest:
        """Return the request of a branch that reads the tokens of a reference that has ended."""
        return dataclasses.replace(
            self.request(number, recipe, is_pair=False),
            max_new_tokens=len(tokens),
            stop_texts=(),
            ignore_end=True,
            compared=ComparedBranch(name=self.name, number=number, forced=tuple(tokens)),
        )


class ComparisonService:
    """Comparisons of one engine. From any thread."""

    def __init__(self, engine: Engine, comparer: RankComparer) -> None:
        self._engine = engine
        self._comparer = comparer
        self._sinks: dict[str, Sink] = {}
        comparer.collected = self._collected

    @property
    def shard(self) -> RankShard:
        """Return the shard of rank 0, for the sizes of the model."""
        return self._comparer.shard

    def check(self, recipe: Recipe | None, prompt_length: int) -> None:
        """Raise RecipeError where the model lacks what a recipe names, or the source of a patch is too short."""
        if recipe is not None:
            self._comparer.check(recipe, prompt_length)

    def begin(self, settings: BeginComparison, sink: Sink) -> None:
        """Let all ranks compare the branches of a name from the next step on."""
        self._sinks[settings.name] = sink
        self._engine.command(TOPIC, settings)

    def collect(self, name: str, number: int) -> None:
        """Pass the rows that have been compared so far to the sink of a comparison, before the next step."""
        self._engine.command(TOPIC, CollectRows(name=name, number=number))

    def end(self, name: str) -> None:
        """Free what the ranks hold of a comparison."""
        self._sinks.pop(name, None)
        self._engine.command(TOPIC, EndComparison(name=name))

    def _collected(self, name: str, number: int, ranks: Sequence[RankRows]) -> None:
        sink = self._sinks.get(name)
        if sink is not None:
            sink(number, row_results(ranks, self.shard))
