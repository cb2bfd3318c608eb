"""What the API knows of the model: its name, its sizes, its tokenizer; and how a request becomes the engine's."""

import dataclasses
import functools
import itertools
import secrets
from collections.abc import Callable, Sequence
from typing import Any

from megatronapp_common.scope.protocol_requests import RunRequest
from megatronapp_trainer.data.text_tokens import TextTokens
from megatronapp_trainer.data.tokenizer import Tokenizer
from megatronapp_trainer.errors import DataError
from megatronapp_trainer.inference.detokenizer import Decode, TextStream
from megatronapp_trainer.inference.request import GenerationRequest
from megatronapp_trainer.serve.logprobs import check_logprobs
from megatronapp_trainer.serve.openai.chat_template import ChatTemplate, TemplateError
from megatronapp_trainer.serve.openai.schemas_chat import ChatRequest, Message
from megatronapp_trainer.serve.openai.schemas_completions import CompletionRequest, GenerationBody
from megatronapp_trainer.serve.problems import ApiError

Ids = tuple[int, ...]
Prompt = str | Sequence[int]
SEEDS = 2**63
_DRAWN_SEEDS = 2**53 - 2**17
"""Seeds that are drawn: a JSON number in a browser holds them exactly, also with the largest index added."""
MOST_TEXTS = 1 << 16
"""Texts of single tokens that are remembered."""
_PIECE = "\ufffd"
BY_ID = "id:"
_ANCHOR = "a"
_NO_TEMPLATE = (
    "Ask /v1/completions with a prompt, or serve with --tokenizer-file in a folder that holds chat_template.jinja or "
    "a tokenizer_config.json with chat_template."
)
_TEMPLATE_REFUSED = "Change the messages to what the template takes; /tokenizer_info shows it."


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
    """Most tokens of a prompt and what follows it."""
    vocab_size: int
    most_prompts: int
    """Most prompts of a run of MegaScope: they are generated together."""
    most_open: int
    """Most texts of a request: those that are generated together, and those that may wait."""
    most_tokens: int
    tokenizer: Tokenizer | None = None
    tokens: TextTokens = dataclasses.field(default_factory=TextTokens)
    """What the model expects around a text, and what ends one."""
    chat: ChatTemplate = dataclasses.field(default_factory=ChatTemplate)

    @property
    def end_tokens(self) -> tuple[int, ...]:
        """Each of them ends what is generated."""
        return self.tokens.ends or self._document_end

    @property
    def _document_end(self) -> tuple[int, ...]:
        """The tokenizer's end-of-document token, where there is one."""
        try:
            return () if self.tokenizer is None else (self.tokenizer.eod,)
        except DataError:
            return ()

    @property
    def decode(self) -> Decode | None:
        """Text of tokens within a text; None without a tokenizer."""
        return None if self.tokenizer is None else incremental_decoder(self.tokenizer)

    @property
    def decode_plain(self) -> Decode | None:
        """As `decode`, without special tokens."""
        return None if self.tokenizer is None else incremental_decoder(self.tokenizer, skip_special=True)

    @functools.cached_property
    def text_of(self) -> Callable[[int], str]:
        """The text of one token within a text; empty without a tokenizer."""
        if (decode := self.decode) is None:
            return lambda _: ""
        return functools.lru_cache(MOST_TEXTS)(lambda token: decode([token]))

    def names_of(self, tokens: Sequence[int]) -> list[str]:
        """Each token's text where that tells it from those before it, else `id:N`: several are pieces of characters.

        No two names are the same.
        """
        names: list[str] = []
        for token in tokens:
            text = self.text_of(token)
            plain = text and _PIECE not in text and text not in names and not text.startswith(BY_ID)
            names.append(text if plain else f"{BY_ID}{token}")
        return names

    def ids_of(self, prompt: Prompt, *, special: bool = True) -> tuple[int, ...]:
        """Ids of a prompt; an empty text begins a document. Raises ApiError.

        `special`: a text gets the tokens around it that the model expects; ids are taken as they are.
        """
        if not isinstance(prompt, str):
            return tuple(prompt)
        return self.tokens_of(prompt, special=special) or (self._document_end + self.tokens.ends)[:1]

    def tokens_of(self, text: str, *, special: bool) -> Ids:
        """Ids of a text, none of an empty one. Raises ApiError where there is no tokenizer."""
        ids = tuple(self._needed_tokenizer("prompt").tokenize(text))
        return (*self.tokens.before, *ids, *self.tokens.after) if special else ids

    def text_of_all(self, ids: Sequence[int]) -> str:
        """The text of tokens. Raises ApiError for those that are not in the vocabulary."""
        tokenizer = self._needed_tokenizer("tokens")
        for place, token in enumerate(ids):
            if token >= self.vocab_size:
                words = f"tokens.{place}: {token} must be below {self.vocab_size}, the size of the vocabulary"
                raise ApiError(422, "invalid-request", words, param="tokens")
        return tokenizer.detokenize(ids)

    @property
    def document_end_text(self) -> str | None:
        """Text of the tokenizer's end-of-document token, where there is one."""
        return None if self.tokenizer is None or not self._document_end else self.text_of_all(self._document_end)

    def _needed_tokenizer(self, param: str) -> Tokenizer:
        if self.tokenizer is None:
            hint = "Give ids, or serve with --tokenizer-file."
            raise ApiError(422, "no-tokenizer", f"{param}: this model has no tokenizer", hint=hint, param=param)
        return self.tokenizer

    def describe_prompt(self, text: str, ids: Sequence[int]) -> dict[str, Any]:
        """A prompt as frames tell it: offsets in UTF-16 units, null where a token ends no character.

        Tokens that stand around the text are none of its characters.
        """
        pieces = self.token_texts(ids, self._inner(ids))
        ends = list(itertools.accumulate(map(utf16_units, pieces), initial=0))
        pairs = zip(pieces, itertools.pairwise(ends), strict=True)
        return {"text": text, "ids": list(ids), "offsets": [list(pair) if piece else None for piece, pair in pairs]}

    def token_texts(self, ids: Sequence[int], inner: tuple[int, int] | None = None) -> list[str]:
        """The characters that each token completes, of those in the range `inner`; empty for the others."""
        pieces = [""] * len(ids)
        if self.tokenizer is not None:
            first, last = inner or (0, len(ids))
            pieces[first:last] = map(TextStream(self.tokenizer.detokenize).feed, ids[first:last])
        return pieces

    def echo_of(self, prompt: Prompt, ids: Sequence[int]) -> PromptEcho:
        """A prompt as an answer repeats it: a text as it came, ids as their text."""
        is_text = isinstance(prompt, str)
        pieces = self.token_texts(ids, self._inner(ids) if is_text else None)
        text = prompt if isinstance(prompt, str) else "" if self.tokenizer is None else self.tokenizer.detokenize(ids)
        starts = itertools.accumulate(map(len, pieces[:-1]), initial=0)
        return PromptEcho(text=text, ids=tuple(ids), offsets=tuple(min(start, len(text)) for start in starts))

    def _inner(self, ids: Sequence[int]) -> tuple[int, int]:
        """Where the tokens of a text begin and end among those of a prompt."""
        before, after = self.tokens.before, self.tokens.after
        first = len(before) if tuple(ids[: len(before)]) == before else 0
        last = len(ids) - (len(after) if after and tuple(ids[-len(after) :]) == after else 0)
        return first, max(first, last)

    def completion_requests(self, body: CompletionRequest, name: str, seed: int) -> list[GenerationRequest]:
        """One for each text that is asked for. Raises ApiError, RequestError."""
        self.check_name(body.model)
        prompts = prompts_of(body)
        self._check_count(len(prompts) * body.n, self.most_open, "prompt" if body.n == 1 else "n")
        self._check_tokens(body.max_tokens, "max_tokens")
        common = GenerationRequest(
            id=name,
            prompt=(0,),
            max_new_tokens=body.max_tokens,
            candidates=body.logprobs or 0,
            prompt_logprobs=body.echo and body.logprobs is not None,
            **_choosing(body),
        )
        ids = [self.ids_of(one, special=body.add_special_tokens) for one in prompts]
        requests = _copies(common, ids, body.n, seed)
        check_logprobs(body, requests)
        return requests

    def chat_requests(self, body: ChatRequest, name: str, seed: int) -> list[GenerationRequest]:
        """One for each answer that is asked for. Raises ApiError, RequestError."""
        self.check_name(body.model)
        self._check_count(body.n, self.most_open, "n")
        ids = self.chat_ids(body.messages, add_generation_prompt=body.add_generation_prompt)
        room = max(self.capacity - len(ids), 1)
        most = min(room, self.most_tokens) if body.most_new is None else body.most_new
        self._check_tokens(most, "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens")
        common = GenerationRequest(
            id=name, prompt=ids, max_new_tokens=most, candidates=body.top_logprobs, **_choosing(body)
        )
        requests = _copies(common, [ids], body.n, seed)
        check_logprobs(body, requests)
        return requests

    def chat_ids(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> tuple[int, ...]:
        """What the model's chat template makes of messages. Raises ApiError."""
        if self.chat.text is None:
            flaw = "has none" if self.chat.flaw is None else f"has one that cannot be used: {self.chat.flaw}"
            words = f"messages need the model's chat template, and {self.name} {flaw}"
            raise ApiError(422, "no-chat-template", words, hint=_NO_TEMPLATE, param="messages")
        try:
            text = self.chat.render([one.plain() for one in messages], add_generation_prompt=add_generation_prompt)
        except TemplateError as error:
            words = f"messages: the model's chat template refused them: {error}"
            raise ApiError(422, "chat-template", words, hint=_TEMPLATE_REFUSED, param="messages") from error
        return self.ids_of(text, special=False)  # the template writes what is around a text

    def check_name(self, name: str | None) -> None:
        """Raise ApiError for another model's name."""
        if name not in {None, self.name}:
            hint = f"Write {self.name}, or leave model out."
            raise ApiError(
                404, "no-such-model", f"there is no model {name}, only {self.name}", hint=hint, param="model"
            )

    def echoes_of(self, body: CompletionRequest, requests: Sequence[GenerationRequest]) -> list[PromptEcho]:
        """The prompt of each text, as the answer repeats it."""
        firsts = zip(prompts_of(body), requests[:: body.n], strict=True)
        return [echo for prompt, one in firsts for echo in [self.echo_of(prompt, one.prompt)] * body.n]

    def run_requests(self, body: RunRequest, name: str, seed: int) -> list[GenerationRequest]:
        """One for each prompt of a run. Raises ApiError, RequestError."""
        self._check_count(len(body.prompts), self.most_prompts, "prompts")
        self._check_tokens(body.tokens, "tokens")
        sampling = body.sampling
        return [
            GenerationRequest(
                id=f"{name}-{sample}",
                prompt=self.ids_of(prompt),
                max_new_tokens=body.tokens,
                temperature=sampling.temperature,
                top_k=sampling.top_k,
                top_p=sampling.top_p,
                seed=(seed + sample) % SEEDS,
                stop_texts=sampling.stop,
            )
            for sample, prompt in enumerate(body.prompts)
        ]

    def _check_count(self, texts: int, most: int, param: str) -> None:
        if texts > most:
            words = f"{param}: {texts} texts are asked for; a request may ask for {most}"
            raise ApiError(413, "too-many", words, hint="Send several requests.", param=param)

    def _check_tokens(self, tokens: int, param: str) -> None:
        if tokens > self.most_tokens:
            words = f"{param}: {tokens} is over {self.most_tokens}, the most that this server generates"
            raise ApiError(413, "too-long", words, hint="Ask for less.", param=param)


def _choosing(body: GenerationBody) -> dict[str, Any]:
    """How tokens are chosen, and what ends a text."""
    return {
        "temperature": body.temperature,
        "top_k": max(body.top_k, 0),
        "top_p": body.top_p,
        "stop_texts": body.stops,
        "stop_tokens": body.stop_sequences,
        "ignore_end": body.ignore_eos,
        "skip_special": body.skip_special_tokens,
    }


def _copies(common: GenerationRequest, prompts: Sequence[Ids], n: int, seed: int) -> list[GenerationRequest]:
    """`n` requests for each prompt, each with a seed of its own."""
    return [
        dataclasses.replace(common, id=f"{common.id}-{index}", prompt=ids, seed=(seed + index) % SEEDS)
        for index, ids in enumerate(ids for ids in prompts for _ in range(n))
    ]


def incremental_decoder(tokenizer: Tokenizer, *, skip_special: bool = False) -> Decode:
    """Text of tokens in the middle of a text.

    Tokenizers with words' beginnings (Llama 2, Mistral) leave out the space before the first word of what they are
    given, which of a text that goes on from a prompt is none.
    """
    decode = functools.partial(tokenizer.detokenize, skip_special=skip_special)
    anchor = tokenizer.tokenize(_ANCHOR)
    once = decode(anchor)
    if not once or decode(anchor + anchor) == once + once:
        return decode
    return lambda ids: decode([*anchor, *ids]).removeprefix(once)


def prompts_of(body: CompletionRequest) -> list[Prompt]:
    """The prompts of a request, each by itself."""
    given = body.prompt
    if isinstance(given, str):
        return [given]
    return [given] if isinstance(given[0], int) else list(given)


def utf16_units(text: str) -> int:
    """Length of a text as JavaScript counts it."""
    return len(text.encode("utf-16-le")) // 2


def new_seed(given: int | None) -> int:
    """The seed that was asked for, or a fresh one."""
    return secrets.randbelow(_DRAWN_SEEDS) if given is None else given
