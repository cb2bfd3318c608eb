"""Perturbation with which the texts of a run are read again."""

from collections.abc import Sequence

from megatronapp_analyzer.scope.store.run import ScopeRun
from megatronapp_common.scope.perturbation.recipe import RecipeError, parse_recipe
from megatronapp_common.scope.protocol_requests import PerturbedTexts
from megatronapp_common.web.problems import HttpError


def perturbed_texts(run: ScopeRun, samples: Sequence[int]) -> PerturbedTexts | None:
    """Return the perturbation of texts of these samples; None if the run has none.

    Raises HttpError 409 for a recipe of a newer release.
    """
    if (perturbation := run.header.get("perturbation")) is None:
        return None
    try:
        recipe = parse_recipe(perturbation["recipe"])
    except RecipeError as error:
        raise HttpError(
            409, "newer-recipe", f"this run has a perturbation that this hub cannot read: {error}", "Upgrade the hub."
        ) from error
    lengths = tuple(len(run.prompt_ids(sample)) for sample in samples)
    return PerturbedTexts(recipe=recipe, samples=tuple(samples), prompt_lengths=lengths)
