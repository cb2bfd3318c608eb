"""Recipes of perturbations that a server knows by name, and the choice of one for a request."""

import dataclasses
import json
from collections.abc import Callable, Sequence
from typing import Annotated, Any

from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from megatronapp_common.field_errors import describe
from megatronapp_common.scope.perturbation.recipe import MAX_NAMED, NONE, NamedRecipe, Recipe, RecipeError
from megatronapp_common.web.problems import HttpError
from megatronapp_trainer.errors import UsageError
from megatronapp_trainer.inference.errors import RequestError

FLAG = "--scope-perturbations"
_NAMED = TypeAdapter(Annotated[tuple[NamedRecipe, ...], Field(max_length=MAX_NAMED)])


class AppliedPerturbation(BaseModel):
    """Perturbation with which an answer was generated."""

    digest: str
    """First 12 hex digits of the SHA-256 of the recipe's canonical JSON."""


def applied(recipe: Recipe | None) -> AppliedPerturbation | None:
    """Return what an answer says of its perturbation."""
    return None if recipe is None else AppliedPerturbation(digest=recipe.digest)


def _unprepared(_recipe: Recipe) -> None:
    """Do nothing: no engine needs to know recipes before their requests."""


@dataclasses.dataclass(frozen=True)
class ServedPerturbations:
    """The recipes that requests can name."""

    recipes: Sequence[NamedRecipe] = ()
    prepare: Callable[[Recipe], object] = _unprepared
    """Tokenizes the sources of a recipe's patches for the engine; raises RecipeError."""

    @property
    def active(self) -> Recipe | None:
        """Return the recipe of requests that choose none."""
        return next((named.recipe for named in self.recipes if named.active), None)

    def listed(self) -> list[dict[str, Any]]:
        """Return name, digest and state of each recipe, for the hub."""
        return [{"name": named.name, "digest": named.recipe.digest, "active": named.active} for named in self.recipes]

    def choose(self, given: Recipe | str | None) -> Recipe | None:
        """Return the recipe of a request: its own, one by name or digest, the active one, or None for `none`.

        Raises HttpError for an unknown name, RequestError for a source of a patch that cannot be read. Digest and
        tokens of sources are computed here, which can take long: call it in a thread.
        """
        chosen = self._chosen(given)
        if chosen is not None:
            self.prepared(chosen)
        return chosen

    def prepared(self, recipe: Recipe) -> None:
        """Compute digest and tokens of a recipe, so that submitting it is quick. Raises RequestError."""
        _ = recipe.digest
        try:
            self.prepare(recipe)
        except RecipeError as error:
            raise RequestError("perturbation", str(error)) from error

    def _chosen(self, given: Recipe | str | None) -> Recipe | None:
        if given is None:
            return self.active
        if isinstance(given, Recipe):
            return given
        if given == NONE:
            return None
        for named in self.recipes:
            if given in {named.name, named.recipe.digest}:
                return named.recipe
        names = ", ".join([*(named.name for named in self.recipes), NONE])
        raise HttpError(
            422,
            "invalid-request",
            f"perturbation: this server has no recipe {given}",
            f"Write one of {names}, or a recipe.",
            param="perturbation",
        )


def read_perturbations(text: str | None) -> ServedPerturbations:
    """Parse the JSON of the flag. Raises UsageError with the place of a mistake."""
    if text is None:
        return ServedPerturbations()
    try:
        recipes = _NAMED.validate_json(text)
    except ValidationError as error:
        raise UsageError(f"{FLAG}: {describe(error.errors(include_url=False))}") from error
    names = [named.name for named in recipes]
    if repeated := next((name for name in names if names.count(name) > 1), None):
        raise UsageError(f"{FLAG}: two recipes are called {repeated}; give each another name")
    active = [named.name for named in recipes if named.active]
    if len(active) > 1:
        raise UsageError(f"{FLAG}: {' and '.join(active)} are active; one recipe at most can be")
    return ServedPerturbations(recipes)


def perturbation_document(recipe: Recipe | None) -> dict[str, Any] | None:
    """Return the digest and the recipe as JSON, for headers and states of runs."""
    return None if recipe is None else {"digest": recipe.digest, "recipe": json.loads(recipe.canonical())}
