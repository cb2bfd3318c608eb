"""The model as the API sees it: name, limits, and conversion between text and tokens."""

import dataclasses
import functools
import itertools
import secrets
from collections.abc import Callable, Sequence
from typing import Any

from megatronapp_common.web.problems import HttpError
from megatronapp_trainer.data.chat_template import ChatTemplate
from megatronapp_trainer.data.text_tokens import TextTokens
from megatronapp_trainer.data.tokenizer import Tokenizer
from megatronapp_trainer.errors import DataError
from megatronapp_trainer.inference.detokenizer import Decode, TextStream
from megatronapp_trainer.serve.perturbation.named_recipes import ServedPerturbations

Ids = tuple[int, ...]
Prompt = str | Sequence[int]
SEEDS = 2**63
_DRAWN_SEEDS = 2**53 - 2**17
"""Range of drawn seeds: a JSON number in a browser is exact for them, also with the largest index added."""
MOST_TEXTS = 1 << 16
"""Limit of cached texts of single tokens."""
_INCOMPLETE = "\ufffd"
BY_ID = "id:"
_ANCHOR = "a"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PromptEcho:
    """A prompt as an answer repeats it."""

    text: str
    ids: tuple[int, ...]
    offsets: tuple[int, ...]
    """Characters of the text before each token."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServedModel:
    """The one model of a server."""

    name: str
    created: int
    capacity: int
    """Limit of the tokens of a prompt and the answer together."""
    vocab_size: int
    most_prompts: int
    """Limit of the prompts of a run of MegaScope, which are generated together."""
    most_open: int
    """Limit of the texts of a request: those that are generated together, and those that may wait."""
    most_tokens: int
    tokenizer: Tokenizer | None = None
    tokens: TextTokens = dataclasses.field(default_factory=TextTokens)
    """Tokens that the model expects around a text, and those that end one."""
    chat: ChatTemplate = dataclasses.field(default_factory=ChatTemplate)
    perturbations: ServedPerturbations = dataclasses.field(default_factory=ServedPerturbations)

    @property
    def end_tokens(self) -> tuple[int, ...]:
        """Return the tokens each of which ends the generated text."""
        return self.tokens.ends or self._document_end

    @property
    def _document_end(self) -> tuple[int, ...]:
        """Return the tokenizer's end-of-document token, if it has one."""
        try:
            return () if self.tokenizer is None else (self.tokenizer.eod,)
        except DataError:
            return ()

    @property
    def decode(self) -> Decode | None:
        """Return a decoder of tokens within a text; None without a tokenizer."""
        return None if self.tokenizer is None else incremental_decoder(self.tokenizer)

    @property
    def decode_plain(self) -> Decode | None:
        """Return a decoder as `decode`, without special tokens."""
        return None if self.tokenizer is None else incremental_decoder(self.tokenizer, skip_special=True)

    @functools.cached_property
    def text_of(self) -> Callable[[int], str]:
        """Return a function for the text of one token within a text; the text is empty without a tokenizer."""
        if (decode := self.decode) is None:
            return lambda _: ""
        return functools.lru_cache(MOST_TEXTS)(lambda token: decode([token]))

    def names_of(self, tokens: Sequence[int]) -> list[str]:
        """Return each token's text if the tokens before it have another, or `id:N`: several are parts of characters.

        No two names are equal.
        """
        names: list[str] = []
        for token in tokens:
            text = self.text_of(token)
            plain = text and _INCOMPLETE not in text and text not in names and not text.startswith(BY_ID)
            names.append(text if plain else f"{BY_ID}{token}")
        return names

    def ids_of(self, prompt: Prompt, *, special: bool = True) -> tuple[int, ...]:
        """Return the ids of a prompt; an empty text begins a document.

        `special`: add the tokens around a text that the model expects; ids are taken unchanged. Raises HttpError.
        """
        if not isinstance(prompt, str):
            return tuple(prompt)
        return self.tokens_of(prompt, special=special) or (self._document_end + self.tokens.ends)[:1]

    def tokens_of(self, text: str, *, special: bool) -> Ids:
        """Return the ids of a text, none of an empty one. Raises HttpError without a tokenizer."""
        ids = tuple(self._needed_tokenizer("prompt").tokenize(text))
        return (*self.tokens.before, *ids, *self.tokens.after) if special else ids

    def text_of_all(self, ids: Sequence[int]) -> str:
        """Return the text of tokens. Raises HttpError for tokens outside the vocabulary."""
        tokenizer = self._needed_tokenizer("tokens")
        for place, token in enumerate(ids):
            if token >= self.vocab_size:
                reason = f"tokens.{place}: {token} must be below {self.vocab_size}, the size of the vocabulary"
                raise HttpError(422, "invalid-request", reason, param="tokens")
        return tokenizer.detokenize(ids)

    @property
    def document_end_text(self) -> str | None:
        """Return the text of the tokenizer's end-of-document token, or None."""
        return None if self.tokenizer is None or not self._document_end else self.text_of_all(self._document_end)

    def _needed_tokenizer(self, param: str) -> Tokenizer:
        if self.tokenizer is None:
            hint = "Give ids, or serve with --tokenizer-file."
            raise HttpError(422, "no-tokenizer", f"{param}: this model has no tokenizer", hint=hint, param=param)
        return self.tokenizer

    def describe_prompt(self, text: str, ids: Sequence[int]) -> dict[str, Any]:
        """Describe a prompt for frames: offsets in UTF-16 units, null where a token ends no character.

        Tokens around the text have none of its characters.
        """
        texts = self.token_texts(ids, self._inner(ids))
        ends = list(itertools.accumulate(map(utf16_units, texts), initial=0))
        pairs = zip(texts, itertools.pairwise(ends), strict=True)
        return {"text": text, "ids": list(ids), "offsets": [list(pair) if part else None for part, pair in pairs]}

    def token_texts(self, ids: Sequence[int], inner: tuple[int, int] | None = None) -> list[str]:
        """Return the characters that each token completes, of those in the range `inner`; empty for the others."""
        texts = [""] * len(ids)
        if self.tokenizer is not None:
            first, last = inner or (0, len(ids))
            texts[first:last] = map(TextStream(self.tokenizer.detokenize).feed, ids[first:last])
        return texts

    def echo_of(self, prompt: Prompt, ids: Sequence[int]) -> PromptEcho:
        """Return a prompt as an answer repeats it: a text unchanged, ids as their text."""
        is_text = isinstance(prompt, str)
        parts = self.token_texts(ids, self._inner(ids) if is_text else None)
        text = prompt if isinstance(prompt, str) else "" if self.tokenizer is None else self.tokenizer.detokenize(ids)
        starts = itertools.accumulate(map(len, parts[:-1]), initial=0)
        return PromptEcho(text=text, ids=tuple(ids), offsets=tuple(min(start, len(text)) for start in starts))

    def _inner(self, ids: Sequence[int]) -> tuple[int, int]:
        """Return the range of the text's tokens among those of a prompt."""
        before, after = self.tokens.before, self.tokens.after
        first = len(before) if tuple(ids[: len(before)]) == before else 0
        last = len(ids) - (len(after) if after and tuple(ids[-len(after) :]) == after else 0)
        return first, max(first, last)

    def check_name(self, name: str | None) -> None:
        """Raise HttpError for another model's name."""
        if name not in {None, self.name}:
            hint = f"Write {self.name}, or leave model out."
            raise HttpError(
                404, "no-such-model", f"there is no model {name}, only {self.name}", hint=hint, param="model"
            )

    def check_texts(self, texts: int, most: int, param: str) -> None:
        """Raise HttpError for more texts than `most`."""
        if texts > most:
            reason = f"{param}: {texts} texts are requested; the limit is {most}"
            raise HttpError(413, "too-many", reason, hint="Send several requests.", param=param)

    def check_tokens(self, tokens: int, param: str) -> None:
        """Raise HttpError for a longer answer than the server generates."""
        if tokens > self.most_tokens:
            reason = f"{param}: {tokens} is over {self.most_tokens}, the most that this server generates"
            raise HttpError(413, "too-long", reason, hint="Ask for less.", param=param)


def incremental_decoder(tokenizer: Tokenizer, *, skip_special: bool = False) -> Decode:
    """Return a decoder of tokens in the middle of a text.

    Tokenizers that mark beginnings of words (Llama 2, Mistral) omit the space before the first word in their input, but
    the middle of a text is no first word.
    """
    decode = functools.partial(tokenizer.detokenize, skip_special=skip_special)
    anchor = tokenizer.tokenize(_ANCHOR)
    once = decode(anchor)
    if not once or decode(anchor + anchor) == once + once:
        return decode
    return lambda ids: decode([*anchor, *ids]).removeprefix(once)


def utf16_units(text: str) -> int:
    """Return the length of a text as JavaScript counts it."""
    return len(text.encode("utf-16-le")) // 2


def new_seed(given: int | None) -> int:
    """Return the requested seed, or a fresh one."""
    return secrets.randbelow(_DRAWN_SEEDS) if given is None else given
