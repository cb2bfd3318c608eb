"""Recipes of perturbations in the engine: commands to the ranks, the order of recipes, and coordinates of a step."""

import dataclasses
from collections.abc import Callable, Hashable, Iterable, Mapping, Set
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from megatronapp_common.scope.perturbation.recipe import Recipe, RecipeError
from megatronapp_trainer.inference.errors import QueueFullError, RequestError

if TYPE_CHECKING:
    from megatronapp_trainer.inference.request import GenerationRequest

TOPIC = "perturbation"
MOST_RECIPES = 8
"""Limit of different recipes of all open requests."""
MOST_UNUSED = 2
"""Recipes without an open request that the ranks do not forget yet: each holds the memory of its CUDA graphs."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class AddRecipe:
    """Command to draw the noise of a recipe before the first step that uses it."""

    recipe: Recipe
    source_lengths: Mapping[int, int] = dataclasses.field(default_factory=dict)
    """Tokens of the sources of patches, by index of the perturbation."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DropRecipe:
    """Command to forget a recipe that no open request uses."""

    digest: str


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PerturbedStep:
    """Recipe of a step, and for each of its segments the coordinates that noise depends on."""

    digest: str
    samples: tuple[int, ...]
    """Index of the prompt or choice within its request."""
    prompt_lengths: tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PerturbedGraphs:
    """Family of CUDA graphs with the hooks and parameters of a recipe baked in."""

    digest: str
    captured: Hashable


def check_recipes(check: Callable[[Recipe], int], requests: Iterable["GenerationRequest"]) -> dict[str, int]:
    """Check the recipe of each request; return the memory that each takes in bytes, by digest.

    Raises RequestError where `check` raises RecipeError.
    """
    recipes = {request.perturbation.digest: request.perturbation for request in requests if request.perturbation}
    try:
        return {digest: check(recipe) for digest, recipe in recipes.items()}
    except RecipeError as error:
        raise RequestError("perturbation", str(error)) from error


def check_number_of_recipes(digests: Set[str | None]) -> None:
    """Raise QueueFullError if these are more different recipes than may be open."""
    if len(digests - {None}) > MOST_RECIPES:
        raise QueueFullError(f"open requests have {MOST_RECIPES} different perturbations already; try again later")


class RecipeReservations:
    """Memory of the recipes of open requests, drawn or not. Used under the engine's lock."""

    def __init__(self) -> None:
        self._reserved: dict[str, int] = {}

    def reserve(self, needed: Mapping[str, int], open_digests: Set[str | None], capacity: Callable[[], int]) -> None:
        """Reserve memory for recipes that are not open yet. `capacity`: bytes for all recipes together.

        Raises RequestError if they never fit, QueueFullError if they do not fit next to the open ones.
        """
        reserved = {digest: count for digest, count in self._reserved.items() if digest in open_digests}
        added = {digest: count for digest, count in needed.items() if digest not in reserved}
        new, old = sum(added.values()), sum(reserved.values())
        if new > 0 and new + old > (free := capacity()):
            what = f"perturbations: a rank needs {new >> 20} MiB for it, and {free >> 20} MiB are free"
            if new > free:
                raise RequestError("perturbation", f"{what}; choose fewer layers or modules")
            raise QueueFullError(f"{what}, of which open requests use {old >> 20} MiB; try again once they have ended")
        self._reserved = reserved | added


Key = TypeVar("Key", bound=Hashable)


class RecipeRotation(Generic[Key]):
    """Fair order of keys of steps, such as recipes, that have work at the same time."""

    def __init__(self) -> None:
        self._last_steps: dict[Key, int] = {}
        self._steps = 0

    def next(self, due: Iterable[Key]) -> Key:
        """Choose the key whose last step is longest ago, of at least one; a new one counts from now."""
        self._last_steps = {key: self._last_steps.get(key, self._steps) for key in due}
        chosen = min(self._last_steps, key=self._last_steps.__getitem__)
        self._steps += 1
        self._last_steps[chosen] = self._steps
        return chosen


class RankRecipes:
    """The recipes that the ranks know. Used in the engine's thread."""

    def __init__(self, command: Callable[[str, Any], None]) -> None:
        self._command = command
        self._known: dict[str, Recipe] = {}
        self._unused: dict[str, None] = {}
        """Recipes that no open request uses and whose CUDA graphs are there for the next one, oldest first."""

    def add(self, recipe: Recipe | None, source_lengths: Mapping[int, int] | None = None) -> None:
        """Send a recipe to all ranks before the first step that uses it, or that reads a source of its patches."""
        if recipe is not None and recipe.digest not in self._known:
            self._command(TOPIC, AddRecipe(recipe=recipe, source_lengths=dict(source_lengths or {})))
            self._known[recipe.digest] = recipe
        if recipe is not None:
            self._unused.pop(recipe.digest, None)

    def knows(self, recipe: Recipe | None) -> bool:
        """Return true if a step with this recipe can be launched without sending it first."""
        return recipe is None or recipe.digest in self._known

    @property
    def is_empty(self) -> bool:
        """Return true if the ranks know no recipe that is in use."""
        return self._known.keys() == self._unused.keys()

    def has_unused(self, used: Iterable[str | None]) -> bool:
        """Return true if `keep` has something to do."""
        return not self._known.keys() - self._unused.keys() <= set(used)

    def keep(self, used: Iterable[str | None]) -> None:
        """Let all ranks forget the recipes that are not among the used ones, but for a few that need no memory."""
        for digest in sorted(self._known.keys() - self._unused.keys() - set(used)):
            if _needs_memory(self._known[digest]):
                self._drop(digest)
            else:
                self._unused[digest] = None
        while len(self._unused) > MOST_UNUSED:
            self._drop(next(iter(self._unused)))

    def _drop(self, digest: str) -> None:
        self._command(TOPIC, DropRecipe(digest=digest))
        self._unused.pop(digest, None)
        del self._known[digest]


def _needs_memory(recipe: Recipe) -> bool:
    """Return true for copies of parameters, sums over prompts, and values of patches, which each use reads again."""
    return any(
        entry.kind == "storage" or entry.action.type == "patch" or entry.action.over is not None
        for entry in recipe.perturbations
    )
