"""Bodies of requests and answers. Names and meanings are those of OpenAI's completions; all others are refused."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Discriminator, Field, Tag

from megatronapp_common.scope.perturbation.choice import PerturbationChoice
from megatronapp_trainer.inference.request import LONGEST_STOP, MOST_STOPS
from megatronapp_trainer.serve.body import RequestBody
from megatronapp_trainer.serve.openai.neutral_fields import AllowedValues
from megatronapp_trainer.serve.openai.schemas_neutral import NeutralBody
from megatronapp_trainer.serve.perturbation.named_recipes import AppliedPerturbation

MOST_LOGPROBS = 20
MOST_PROMPTS = 1024
MOST_TEXT = 4_000_000
Text = Annotated[str, Field(max_length=MOST_TEXT)]
Token = Annotated[int, Field(ge=0, lt=2**31)]
Tokens = Annotated[list[Token], Field(fail_fast=True, min_length=1, max_length=1_048_576)]
"""Token ids, validated up to the first bad one: a list of a million errors would have no reader."""
Texts = Annotated[list[Text], Field(fail_fast=True, min_length=1, max_length=MOST_PROMPTS)]
TokenLists = Annotated[list[Tokens], Field(fail_fast=True, min_length=1, max_length=MOST_PROMPTS)]


def _kind_of_prompt(value: Any) -> str | None:  # noqa: ANN401 - whatever JSON holds
    """Return the member of the union that a value is meant to be, so that errors concern that one alone."""
    if isinstance(value, list):
        first = value[0] if value else ""
        return "<texts>" if isinstance(first, str) else "<token lists>" if isinstance(first, list) else "<tokens>"
    return "<text>" if isinstance(value, str) else None


def _holds_lists(value: list[Any]) -> bool:
    return bool(value) and isinstance(value[0], list)


Prompts = Annotated[
    Annotated[Text, Tag("<text>")]
    | Annotated[Texts, Tag("<texts>")]
    | Annotated[Tokens, Tag("<tokens>")]
    | Annotated[TokenLists, Tag("<token lists>")],
    Discriminator(
        _kind_of_prompt,
        custom_error_type="prompt",
        custom_error_message="must be a string, a list of strings, a list of token ids, or a list of such lists",
    ),
]
StopText = Annotated[str, Field(min_length=1, max_length=LONGEST_STOP)]
SingleStopText = Annotated[str, Field(max_length=LONGEST_STOP)]
StopTokens = Annotated[list[Token], Field(min_length=1, max_length=LONGEST_STOP)]
StopTexts = Annotated[list[StopText], Field(max_length=MOST_STOPS)]
Stop = Annotated[
    Annotated[SingleStopText, Tag("<text>")] | Annotated[StopTexts, Tag("<texts>")],
    Discriminator(
        lambda value: "<text>" if isinstance(value, str) else "<texts>" if isinstance(value, list) else None,
        custom_error_type="stop",
        custom_error_message="must be a string or a list of strings",
    ),
]
StopIds = Annotated[
    Annotated[list[Token], Field(max_length=MOST_STOPS), Tag("<tokens>")]
    | Annotated[list[StopTokens], Field(min_length=1, max_length=MOST_STOPS), Tag("<token lists>")],
    Discriminator(
        lambda value: None if not isinstance(value, list) else "<token lists>" if _holds_lists(value) else "<tokens>",
        custom_error_type="stop_token_ids",
        custom_error_message="must be a list of token ids, or a list of such lists",
    ),
]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Temperature = Annotated[float, Field(ge=0, le=100)]
TopK = Annotated[int, Field(ge=-1, lt=2**31)]
TopP = Annotated[float, Field(gt=0, le=1)]
Count = Annotated[int, Field(ge=0, lt=2**31)]


class StreamOptions(RequestBody):
    """Additional content of a stream, besides the text."""

    include_usage: bool = False
    """A last chunk with the numbers of tokens."""
    include_queue: bool = False
    """Events `queue` with the position in the queue; without, these are comments, which all clients skip."""
    include_obfuscation: Annotated[bool, AllowedValues((False,), "events are not padded")] = False
    continuous_usage_stats: Annotated[
        bool, AllowedValues((False,), "include_usage gives the numbers in the last event")
    ] = False


class GenerationBody(NeutralBody):
    """Fields that requests for texts and for answers to messages have in common."""

    model: Annotated[str, Field(max_length=256)] | None = None
    """Name as in /v1/models; there is one."""
    temperature: Temperature = 1.0
    """Sampling temperature; 0: always the likeliest token."""
    top_p: TopP = 1.0
    """Choose among the fewest likeliest tokens that have this probability together."""
    top_k: TopK = 0
    """Choose among this many of the likeliest tokens; 0 or -1: among all."""
    seed: Seed | None = None
    """The same seed gives the same text again; default: a new one each time."""
    n: Annotated[int, Field(ge=1, le=128)] = 1
    """Texts for each prompt. The choice of index i is drawn with seed + i."""
    stop: Stop | None = None
    """Texts that end the generation; they are no part of the answer. An empty text ends nothing."""
    stop_token_ids: StopIds | None = None
    """Tokens that end the generation, each by itself, or sequences of tokens."""
    skip_special_tokens: bool = False
    """Omit the texts of special tokens from the answer; the token that ends it is never in its text."""
    ignore_eos: bool = False
    """Continue after the end of a document."""
    perturbation: PerturbationChoice | None = None
    """Perturb the model for this request: a recipe, or the name or digest of one of this server. `none`: the model as
    it is; default: the active recipe of the server, if it has one."""
    stream: bool = False
    """Send the text while it is generated, as server-sent events."""
    stream_options: StreamOptions | None = None
    """Additional content of a stream, besides the text."""

    @property
    def stops(self) -> tuple[str, ...]:
        """Return the texts that end the generation."""
        return tuple(([self.stop] if isinstance(self.stop, str) else self.stop) if self.stop else ())

    @property
    def stop_sequences(self) -> tuple[tuple[int, ...], ...]:
        """Return the sequences of tokens that end the generation."""
        return tuple((ids,) if isinstance(ids, int) else tuple(ids) for ids in self.stop_token_ids or ())

    @property
    def with_logprobs(self) -> bool:
        raise NotImplementedError


class CompletionRequest(GenerationBody):
    """A request to continue one or more prompts."""

    prompt: Prompts
    """A text, ids of tokens, or a list of either."""
    max_tokens: Count = 16
    """Limit of new tokens of each prompt."""
    add_special_tokens: bool = True
    """Add the tokens that the model expects around a prompt that is a text (Llama: <|begin_of_text|>)."""
    logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    """Return the log-probability of each token, and of this many of the likeliest tokens."""
    echo: bool = False
    """Begin each text with its prompt; with `logprobs` also the log-probabilities of the prompt's tokens."""
    suffix: Annotated[str, AllowedValues(("",), "a text has no end that is given")] = ""

    @property
    def with_logprobs(self) -> bool:
        """Return True if log-probabilities are requested; 0 requests those of the tokens alone."""
        return self.logprobs is not None


class Logprobs(BaseModel):
    """Log-probabilities of each token of the text."""

    tokens: list[str]
    """Names as in `top_logprobs`."""
    token_ids: list[int]
    token_logprobs: list[float | None]
    """null for the first token of a prompt, which nothing predicts."""
    top_logprobs: list[dict[str, float] | None]
    """By text, the likeliest first; `id:N` for parts of characters, and for a text that a likelier token has, too."""
    top_token_ids: list[list[int] | None]
    """Ids of the same tokens in the same order."""
    text_offset: list[int]
    """Characters of text before it."""


class Choice(BaseModel):
    """One of the texts."""

    index: int
    text: str
    logprobs: Logprobs | None = None
    token_ids: list[int]
    finish_reason: Literal["stop", "length", "cancelled"] | None
    stop_reason: str | int | list[int] | None = None
    """Text or tokens that ended it."""


class Usage(BaseModel):
    """Numbers of tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Completion(BaseModel):
    """Answer to a request for completions."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    seed: int
    """Seed that was used."""
    choices: list[Choice]
    usage: Usage | None = None
    perturbation: AppliedPerturbation | None = None
    """null: the model as it is."""


class QueueNotice(BaseModel):
    """An event `queue` of a stream."""

    id: str
    position: int | None
    """Prompts that wait before this request's first; null: none of it waits any more."""


class ModelCard(BaseModel):
    """Description of the model."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["megatronapp"] = "megatronapp"
    max_model_len: int
    """Limit of the tokens of a prompt and the answer together."""
    vocab_size: int
    has_tokenizer: bool
    """If false, prompts must be ids of tokens."""


class ModelList(BaseModel):
    """All models: there is one."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class Problem(BaseModel):
    """Body of an error."""

    code: str
    message: str
    hint: str
    error: dict[str, Any]
    """The same error in the form of OpenAI's clients: message, type, param, code."""


class Health(BaseModel):
    """Health of the server."""

    status: Literal["ok", "starting", "stopping"]


class RunStarted(BaseModel):
    """A run that was accepted."""

    run: str
    position: int | None
    """Prompts before it in the queue; null: it does not wait."""


class ProbeStarted(BaseModel):
    """A probe that was accepted."""

    probe: str


class StreamEnd(BaseModel):
    """Answer without any content."""


class RunStatus(BaseModel):
    """State of a run."""

    run: str
    state: Literal["queued", "prefill", "decoding", "done", "cancelled", "failed"]
    position: int | None
    prompts: list[str]
    capture: dict[str, Any]
    texts: list[str]
    ids: list[list[int]]
    tokens: int
    seed: int
    perturbation: dict[str, Any] | None
    """Digest and recipe; null: the model as it is."""
    error: dict[str, str] | None
    startedAt: str
