"""Ranks that compare branches, for tests: rows of rank 0, and the events of both branches."""

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import Any

from generating_ranks import config_of, drain, groups_of, model_of, open_engine

from megatronapp_common.scope.perturbation.recipe import Recipe
from megatronapp_common.scope.protocol_requests import SamplingSettings
from megatronapp_trainer.inference.engine import Engine
from megatronapp_trainer.inference.events import TokenEvent
from megatronapp_trainer.inference.request import GenerationRequest
from megatronapp_trainer.scope.comparison.commands import BeginComparison
from megatronapp_trainer.scope.comparison.comparison_service import BranchText, ComparisonService
from megatronapp_trainer.scope.comparison.rank_comparer import RankComparer
from megatronapp_trainer.scope.comparison.row_results import RowResult


@dataclasses.dataclass(kw_only=True)
class Compared:
    """Result of a comparison."""

    rows: list[RowResult] = dataclasses.field(default_factory=list)
    chosen: dict[int, list[int]] = dataclasses.field(default_factory=dict)
    """Own choices of each branch."""
    candidates: dict[int, list[list[int]]] = dataclasses.field(default_factory=dict)


def text_of(name: str, ids: tuple[int, ...], tokens: int, **fields: Any) -> BranchText:
    sampling = SamplingSettings(temperature=fields.pop("temperature", 0.0))
    return BranchText(name=name, ids=ids, tokens=tokens, sampling=sampling, seed=3, top=5, **fields)


class Comparer:
    """Engine of rank 0 with comparisons."""

    def __init__(self, engine: Engine, comparer: RankComparer) -> None:
        self.engine = engine
        self.comparer = comparer
        self.service = ComparisonService(engine, comparer)

    def compare(
        self,
        text: BranchText,
        recipes: tuple[Recipe | None, Recipe | None],
        *,
        forced: bool = True,
        others: Sequence[GenerationRequest] = (),
    ) -> Compared:
        """Compare two branches while others generate."""
        requests = [
            text.request(number, recipe, is_forced=forced and number > 0) for number, recipe in enumerate(recipes)
        ]
        found = Compared()
        self.service.begin(
            BeginComparison(name=text.name, drift=True, heads=True), lambda _number, rows: found.rows.extend(rows)
        )
        self.run(found, [*others, *requests], text.name)
        self.service.end(text.name)
        self.engine.step()
        assert self.comparer.is_empty
        return found

    def run(self, found: Compared, requests: Sequence[GenerationRequest], name: str) -> None:
        self.engine.submit(*requests)
        for event in drain(self.engine):
            branch, _, number = event.request_id.rpartition("-")
            if isinstance(event, TokenEvent) and branch == name:
                found.chosen.setdefault(int(number), []).append(event.token)
                found.candidates.setdefault(int(number), []).append([likely.token for likely in event.candidates])
        self.service.collect(name, 1)
        self.engine.step()


@contextlib.contextmanager
def comparing(flags: str, variant: str = "", **options: Any) -> Any:
    """Yield the model, and on rank 0 the comparer; the other ranks follow it."""
    with groups_of(flags) as (layout, device):
        config = config_of(f"{flags} {variant}")
        model = model_of(config, layout, device)
        gang, engine = open_engine(model, config, layout, device, **options)
        comparer = RankComparer(gang)
        comparer.attach(gang)
        if engine is None:
            gang.follow()
            yield model, config, None
            return
        yield model, config, Comparer(engine, comparer)
        if layout.world_size > 1:
            engine.close()
