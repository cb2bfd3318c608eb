"""Sources of patches in the engine: texts that are read before the first step of a recipe that takes values of them."""

import collections
import dataclasses
import threading
from collections.abc import Callable, Mapping, Sequence

from megatronapp_common.scope.perturbation.recipe import Recipe, RecipeError
from megatronapp_trainer.perturbation.patches import patched_positions

PREFIX = "patch:"
Encode = Callable[[str], Sequence[int]]
"""Function that returns the tokens of a prompt."""
MAX_CACHED_TOKENS = 1 << 20
"""Tokens of sources that a `SourceCache` stores, besides those of the newest recipe."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PatchSource:
    """Membership of a request in a recipe: the text of one of its patches."""

    recipe: Recipe
    place: int
    """Index of the perturbation in the recipe."""
    lengths: Mapping[int, int]
    """Tokens of all sources of the recipe, by index of the perturbation."""


def source_tokens(recipe: Recipe, encode: Encode | None) -> dict[int, tuple[int, ...]]:
    """Return the tokens of each source of a recipe, by index of the perturbation. Raises RecipeError."""
    found: dict[int, tuple[int, ...]] = {}
    for place, perturbation in enumerate(recipe.perturbations):
        source = perturbation.action.source
        if source is None:
            continue
        if source.prompt is not None and encode is None:
            raise RecipeError(
                f"perturbations.{place}.action.source.prompt: this model has no tokenizer; write tokens instead"
            )
        if source.prompt is not None and encode is not None:
            found[place] = tuple(encode(source.prompt))
        else:
            found[place] = source.tokens or ()
    return found


class SourceCache:
    """Tokens of the sources of the recipes that were used last: each text is tokenized once. From any thread."""

    def __init__(self) -> None:
        self._tokens: collections.OrderedDict[str, dict[int, tuple[int, ...]]] = collections.OrderedDict()
        self._lock = threading.Lock()

    def get(self, recipe: Recipe, read: Callable[[], dict[int, tuple[int, ...]]]) -> dict[int, tuple[int, ...]]:
        """Return the tokens of a recipe's sources, from `read` if they are not stored. Its errors are not stored."""
        if all(perturbation.action.source is None for perturbation in recipe.perturbations):
            return {}
        with self._lock:
            found = self._tokens.get(recipe.digest)
        if found is None:
            found = read()  # without the lock, as it may take seconds
        with self._lock:
            self._tokens[recipe.digest] = found
            self._tokens.move_to_end(recipe.digest)
            while len(self._tokens) > 1 and sum(map(_count, self._tokens.values())) > MAX_CACHED_TOKENS:
                self._tokens.popitem(last=False)
        return found


def _count(sources: Mapping[int, Sequence[int]]) -> int:
    return sum(map(len, sources.values()))


def check_source(place: int, tokens: Sequence[int], *, capacity: int, vocabulary: int) -> None:
    """Raise RecipeError for a source that cannot be read."""
    where = f"perturbations.{place}.action.source"
    if len(tokens) > capacity:
        raise RecipeError(f"{where}: has {len(tokens)} tokens, and a sequence may have {capacity}; shorten it")
    for index, token in enumerate(tokens):
        if token >= vocabulary:
            raise RecipeError(f"{where}.tokens.{index}: there is no token {token}; write 0 to {vocabulary - 1}")


def check_lengths(recipe: Recipe, prompt_length: int, lengths: Mapping[int, int]) -> None:
    """Raise RecipeError where a prompt has positions that a source lacks. `lengths`: tokens of each source."""
    for place, source_length in lengths.items():
        try:
            patched_positions(recipe.perturbations[place], prompt_length, source_length)
        except RecipeError as error:
            raise RecipeError(f"perturbations.{place}.{error}") from error


def name_of_source(digest: str, place: int) -> str:
    """Return the id of the request that reads a source."""
    return f"{PREFIX}{digest}:{place}"


def source_of_name(name: str) -> tuple[str, int] | None:
    """Return digest and index of the perturbation whose source a request reads; None for other requests."""
    if not name.startswith(PREFIX):
        return None
    digest, _, place = name.removeprefix(PREFIX).partition(":")
    return digest, int(place)


def lengths_of(sources: Mapping[int, Sequence[int]]) -> dict[int, int]:
    """Return the number of tokens of each source."""
    return {place: len(tokens) for place, tokens in sources.items()}
