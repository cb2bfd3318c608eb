"""Perturbation with which the texts of a run are read again."""

from collections.abc import Sequence

from megatronapp_analyzer.scope.store.run import ScopeRun
from megatronapp_common.scope.perturbation.recipe import parse_recipe
from megatronapp_common.scope.protocol_requests import PerturbedTexts


def perturbed_texts(run: ScopeRun, samples: Sequence[int]) -> PerturbedTexts | None:
    """Return the perturbation of texts of these samples; None if the run has none.

    Raises RecipeError for a recipe of a newer release.
    """
    if (perturbation := run.header.get("perturbation")) is None:
        return None
    recipe = parse_recipe(perturbation["recipe"])
    lengths = tuple(len(run.prompt_ids(sample)) for sample in samples)
    return PerturbedTexts(recipe=recipe, samples=tuple(samples), prompt_lengths=lengths)
