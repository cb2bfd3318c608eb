"""Requests of clients, and the checks that need no model."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping

from megatronapp_common.scope.perturbation.recipe import Recipe, RecipeError
from megatronapp_trainer.inference.errors import RequestError
from megatronapp_trainer.inference.patch_sources import PatchSource, check_lengths, lengths_of, name_of_source

MOST_CANDIDATES = 100
MOST_STOPS = 16
LONGEST_STOP = 256
_SEEDS = 2**64


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ComparedBranch:
    """Membership of a request in a comparison of branches: it shares no step with other requests."""

    name: str
    """Name of the comparison. Two requests that have it as their group take their steps alternately."""
    number: int
    """0: the reference; others are compared with it."""
    is_forced: bool = False
    """Read the tokens of the reference, which is in the same group, instead of its choices."""
    forced: tuple[int, ...] = ()
    """Tokens to read instead of its choices, where the reference has ended already."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GenerationRequest:
    """A prompt and how to continue it. Raises RequestError, which names the field, if a value cannot work."""

    id: str
    prompt: tuple[int, ...]
    """Ids of tokens, at least one."""
    max_new_tokens: int = 16
    """Number of tokens to generate; 0 reads the prompt only, for `prompt_logprobs` or `logits`."""
    temperature: float = 1.0
    """Temperature of the choice; 0 takes the likeliest token."""
    top_k: int = 0
    """Choose among this many of the likeliest tokens; 0: among all."""
    top_p: float = 1.0
    """Choose among the fewest likeliest tokens that have this probability together, after `top_k`."""
    seed: int = 0
    """Seed of the choice: the same request gives the same tokens with it, in any batch and layout."""
    stop_tokens: tuple[tuple[int, ...], ...] = ()
    """Sequences of tokens that end the generation when they have been generated."""
    stop_texts: tuple[str, ...] = ()
    """Texts that end it; they are omitted from the text of the events."""
    ignore_end: bool = False
    """Continue after the end-of-document token."""
    skip_special: bool = False
    """Leave special tokens out of the text."""
    candidates: int = 0
    """Number of the likeliest tokens that each step reports, with their log-probabilities."""
    prompt_logprobs: bool = False
    """Report the log-probability of each token of the prompt but the first."""
    logits: bool = False
    """Give the logits of all positions, those of the prompt included: a vocabulary of floats per token."""
    group: str = ""
    """Requests of a group are submitted together, at most as many as an engine has slots, and generate in step: none
    before the prompts of all have been read."""
    measures: int = 0
    """Number of the likeliest tokens to report with entropy and partition sums of the distribution that each token was
    chosen from, as plain lists; 0: no statistics. With `prompt_logprobs` or `logits` for the prompt's tokens, too.
    """
    is_background: bool = False
    """Wait after all requests that are not in the background. Requests of a group are alike in this."""
    perturbation: Recipe | None = None
    """Perturb the model for this request. Requests with other recipes, or none, share no step with it; requests of a
    group are alike in this."""
    sample: int = 0
    """Index among the prompts or choices of one call: the noise of perturbations differs between them."""

    prompt_length: int | None = None
    """Length of the prompt for perturbations, where some of its tokens were generated before; None: all of it."""
    source_of: PatchSource | None = None
    """Recipe with a patch whose source this request reads; of requests of the engine itself."""
    compared: ComparedBranch | None = None
    """Branch of a comparison."""

    @property
    def is_branch_of_pair(self) -> bool:
        """Return true for a branch that takes its steps alternately with another one."""
        return self.compared is not None and bool(self.group)

    @property
    def digest(self) -> str | None:
        """Return the name of the recipe; None without perturbation."""
        return None if self.perturbation is None else self.perturbation.digest

    def __post_init__(self) -> None:
        _check_tokens("prompt", self.prompt)
        for stop in self.stop_tokens:
            _check_tokens("stop_tokens", stop)
        _check_prompt(self)
        _check_sampling(self)
        _check_stops(self)


def check_fits(request: GenerationRequest, *, capacity: int, vocab_size: int, has_text: bool) -> None:
    """Raise RequestError where the request is too much for an engine of this size."""
    if (total := len(request.prompt) + request.max_new_tokens) > capacity:
        free_tokens = capacity - len(request.prompt)
        advice = (
            f"ask for at most {free_tokens}"
            if free_tokens > 0
            else f"shorten the prompt to at most {capacity - 1} tokens"
        )
        raise RequestError(
            "max_new_tokens",
            f"{len(request.prompt)} tokens of the prompt and {request.max_new_tokens} new ones are {total}, and a "
            f"sequence may have {capacity}; {advice}",
        )
    for index, token in enumerate(request.prompt):
        if not 0 <= token < vocab_size:
            raise RequestError("prompt", f"token {index} is {token}; the vocabulary has ids 0 to {vocab_size - 1}")
    if request.candidates > vocab_size:
        raise RequestError("candidates", f"{request.candidates} are more than the vocabulary's {vocab_size} tokens")
    if request.stop_texts and not has_text:
        raise RequestError("stop_texts", "this engine has no tokenizer; give stop_tokens instead")


def digests_with_sources(requests: Iterable[GenerationRequest]) -> set[str]:
    """Return the recipes some of whose sources have not been read to their end."""
    return {request.source_of.recipe.digest for request in requests if request.source_of is not None}


def source_requests(
    sources_of: Callable[[Recipe], Mapping[int, tuple[int, ...]]], requests: Iterable[GenerationRequest]
) -> dict[str, list[GenerationRequest]]:
    """Return the requests that read the sources of patches, by digest of their recipe.

    Raises RequestError for a source that cannot be read, or a prompt that does not fit its length.
    """
    found: dict[str, list[GenerationRequest]] = {}
    try:
        for request in requests:
            if (recipe := request.perturbation) is None or not (sources := sources_of(recipe)):
                continue
            lengths = lengths_of(sources)
            check_lengths(recipe, request.prompt_length or len(request.prompt), lengths)
            found[recipe.digest] = [
                GenerationRequest(
                    id=name_of_source(recipe.digest, place),
                    prompt=tokens,
                    max_new_tokens=0,
                    temperature=0,
                    source_of=PatchSource(recipe=recipe, place=place, lengths=lengths),
                )
                for place, tokens in sources.items()
            ]
    except RecipeError as error:
        raise RequestError("perturbation", str(error)) from error
    return found


def _check_tokens(field: str, tokens: object) -> None:
    """Check the type of tokens: JSON may have any, and a list would never equal the tuple that it is compared with."""
    if not isinstance(tokens, tuple) or not all(type(token) is int for token in tokens):
        raise RequestError(field, "tokens must be tuples of whole numbers")


def _check_prompt(request: GenerationRequest) -> None:
    if not request.id:
        raise RequestError("id", "must not be empty; give a name that no open request has")
    if not request.prompt:
        raise RequestError("prompt", "must hold one token or more; begin with the end-of-document token")
    if request.max_new_tokens < 0:
        raise RequestError("max_new_tokens", f"{request.max_new_tokens} must be 0 or more")


def _check_sampling(request: GenerationRequest) -> None:
    if not math.isfinite(request.temperature) or request.temperature < 0:
        raise RequestError("temperature", f"{request.temperature} must be 0 (the likeliest token) or above")
    if 0 < request.temperature < 1e-3:
        raise RequestError("temperature", f"{request.temperature} must be 0 or at least 0.001")
    if request.top_k < 0:
        raise RequestError("top_k", f"{request.top_k} must be 0 (all tokens) or more")
    if not 0 < request.top_p <= 1:
        raise RequestError("top_p", f"{request.top_p} must be above 0 and at most 1")
    if not 0 <= request.seed < _SEEDS:
        raise RequestError("seed", f"{request.seed} must be 0 or more and below 2**64")
    if not 0 <= request.candidates <= MOST_CANDIDATES:
        raise RequestError("candidates", f"{request.candidates} must be 0 to {MOST_CANDIDATES}")


def _check_stops(request: GenerationRequest) -> None:
    for field, stops in (("stop_tokens", request.stop_tokens), ("stop_texts", request.stop_texts)):
        if len(stops) > MOST_STOPS:
            raise RequestError(field, f"{len(stops)} are given; at most {MOST_STOPS} are taken")
        if any(not 0 < len(stop) <= LONGEST_STOP for stop in stops):
            raise RequestError(field, f"each must have 1 to {LONGEST_STOP} elements")
