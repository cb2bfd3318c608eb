"""Choice of a perturbation by a request: a whole recipe, or one of the server by its name or digest."""

from typing import Annotated, Any

from pydantic import Discriminator, Field, Tag

from megatronapp_common.scope.perturbation.recipe import Recipe

RECIPE_TAG, NAME_TAG = "<recipe>", "<name>"
"""Names of the members of the union in places of errors."""


def _kind_of_choice(value: Any) -> str | None:  # noqa: ANN401 - whatever JSON holds
    if isinstance(value, dict | Recipe):
        return RECIPE_TAG
    return NAME_TAG if isinstance(value, str) else None


PerturbationChoice = Annotated[
    Annotated[Recipe, Tag(RECIPE_TAG)] | Annotated[str, Field(min_length=1, max_length=63), Tag(NAME_TAG)],
    Discriminator(
        _kind_of_choice,
        custom_error_type="perturbation",
        custom_error_message="must be a recipe (an object), or the name or digest of a recipe of this server",
    ),
]
