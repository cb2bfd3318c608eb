"""Sources of patches in the engine: texts that are read before the first step of a recipe that takes values of them."""

import dataclasses
import threading
from collections.abc import Callable, Mapping, Sequence

import cachetools

from megatronapp_common.scope.perturbation.recipe import Recipe, RecipeError
from megatronapp_trainer.hooks.perturbation.patches import patched_positions

PREFIX = "patch:"
Encode = Callable[[str], Sequence[int]]
"""Function that returns the tokens of a prompt."""
MAX_CACHED_TOKENS = 1 << 21
"""Limit of a `SourceCache`: all sources of the largest recipe, where each character is a token."""
MAX_CACHED_TEXTS = 64


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
    """Tokens of the texts of sources that were used last: each is tokenized once for all recipes. From any thread."""

    def __init__(self) -> None:
        least = MAX_CACHED_TOKENS // MAX_CACHED_TEXTS
        self._tokens: cachetools.LRUCache[str, tuple[int, ...]] = cachetools.LRUCache(
            MAX_CACHED_TOKENS, getsizeof=lambda tokens: max(least, len(tokens))
        )
        self._lock = threading.Lock()

    def get(self, recipe: Recipe, encode: Encode | None) -> dict[int, tuple[int, ...]]:
        """Return the tokens of a recipe's sources, by index of the perturbation. Raises RecipeError."""
        return source_tokens(recipe, None if encode is None else lambda text: self._encoded(text, encode))

    def _encoded(self, text: str, encode: Encode) -> tuple[int, ...]:
        with self._lock:
            found = self._tokens.get(text)
        if found is None:
            found = tuple(encode(text))  # without the lock, as it may take seconds
            if len(found) <= MAX_CACHED_TOKENS:
                with self._lock:
                    self._tokens[text] = found
        return found


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
