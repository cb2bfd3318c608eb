"""Bodies of /v1/chat/completions, /tokenize and /detokenize."""

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, Discriminator, Field, Tag, model_validator

from megatronapp_trainer.serve.body import RequestBody
from megatronapp_trainer.serve.openai.neutral_fields import AllowedValues
from megatronapp_trainer.serve.openai.schemas_completions import (
    MOST_LOGPROBS,
    Count,
    GenerationBody,
    Text,
    Token,
    Usage,
)
from megatronapp_trainer.serve.openai.schemas_neutral import Name, NeutralChatBody
from megatronapp_trainer.serve.perturbation.named_recipes import AppliedPerturbation

MOST_MESSAGES = 4096
Role = Literal["system", "developer", "user", "assistant"]


class TextPart(RequestBody):
    """A part of a message."""

    type: Literal["text"]
    text: Text


Content = Annotated[
    Annotated[Text, Tag("<text>")] | Annotated[list[TextPart], Field(max_length=MOST_MESSAGES), Tag("<parts>")],
    Discriminator(
        lambda value: "<text>" if isinstance(value, str) else "<parts>" if isinstance(value, list) else None,
        custom_error_type="content",
        custom_error_message="must be a string or a list of parts of type text",
    ),
]


class Message(RequestBody):
    """A message. The fields from `refusal` on are those that an assistant's message of OpenAI's clients has."""

    role: Role
    content: Content | None = None
    """A string, or parts of type text, which are joined by line ends. An assistant's may be null, if it is empty."""
    name: Name | None = None
    """Name of the author, for templates that use it."""
    refusal: None = None
    annotations: Annotated[list[Any] | None, AllowedValues(([],), "messages have no annotations")] = None
    audio: None = None
    function_call: None = None
    tool_calls: Annotated[list[Any] | None, AllowedValues(([],), "there are no tools")] = None
    reasoning: None = None
    reasoning_content: None = None

    @model_validator(mode="after")
    def _check_content(self) -> Self:
        if self.content is None and self.role != "assistant":
            raise ValueError(f"content must be given; it may be null for the role assistant alone, not for {self.role}")
        return self

    def plain(self) -> dict[str, str]:
        """Return the message as templates take it."""
        parts = [] if self.content is None else self.content
        text = parts if isinstance(parts, str) else "\n".join(part.text for part in parts)
        return {"role": self.role, "content": text, **({} if self.name is None else {"name": self.name})}


Messages = Annotated[list[Message], Field(min_length=1, max_length=MOST_MESSAGES)]


class ResponseFormat(RequestBody):
    """Format of an answer."""

    type: Literal["text"]


class ChatRequest(GenerationBody, NeutralChatBody):
    """A request to answer messages."""

    messages: Messages
    max_tokens: Count | None = None
    """Limit of new tokens; default: as many as fit."""
    max_completion_tokens: Count | None = None
    """The same limit, by its newer name."""
    logprobs: bool = False
    """Return the log-probability of each token."""
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] = 0
    """With `logprobs`: return this many of the likeliest tokens, too."""
    response_format: ResponseFormat | None = None
    """Format of the answer, which is always text."""
    add_generation_prompt: bool = True
    """End the prompt with the beginning of an answer."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise ValueError("max_tokens and max_completion_tokens are one setting; give one of them")
        return self

    @property
    def with_logprobs(self) -> bool:
        return self.logprobs

    @property
    def most_new(self) -> int | None:
        """Return the limit of new tokens, by either name."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class ChatMessage(BaseModel):
    """Message that the model has generated."""

    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ScoredToken(BaseModel):
    """A token with its log-probability."""

    token: str
    """Text of the token; `id:N` for a part of a character."""
    logprob: float
    bytes: list[int] | None
    """Bytes of the text; null for a part of a character."""


class ChatToken(ScoredToken):
    """A token of the answer."""

    top_logprobs: list[ScoredToken]


class ChatLogprobs(BaseModel):
    """Log-probabilities of each token of the answer."""

    content: list[ChatToken]
    refusal: None = None


FinishReason = Literal["stop", "length", "cancelled"] | None


class ChatChoice(BaseModel):
    """One of the answers."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    token_ids: list[int]
    finish_reason: FinishReason
    stop_reason: str | int | list[int] | None = None
    """Text or tokens that ended it."""


class ChatCompletion(BaseModel):
    """Answer to a chat request."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    seed: int
    """Seed that was used."""
    choices: list[ChatChoice]
    usage: Usage
    perturbation: AppliedPerturbation | None = None
    """null: the model as it is."""


class ChatDelta(BaseModel):
    """Next part of an answer."""

    role: Literal["assistant"] | None = None
    """Only in the first chunk."""
    content: str


class ChatChunkChoice(BaseModel):
    """A part of one answer."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    token_ids: list[int]
    finish_reason: FinishReason
    stop_reason: str | int | list[int] | None = None


class ChatChunk(BaseModel):
    """A chunk of a stream."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    seed: int
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    perturbation: AppliedPerturbation | None = None


class TokenizeRequest(RequestBody):
    """A text, or messages, to convert to tokens."""

    model: Name | None = None
    """Name as in /v1/models; there is one."""
    prompt: Text | None = None
    messages: Messages | None = None
    """In place of `prompt`: messages for the chat template."""
    add_special_tokens: bool = True
    """With `prompt`: also the tokens around it that the model expects."""
    add_generation_prompt: bool = True
    """With `messages`: end with the beginning of an answer."""
    return_token_strs: bool = False
    """Also the text of each token."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give prompt or messages, one of them")
        return self


class TokenizeResponse(BaseModel):
    """The tokens of a text."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(RequestBody):
    """Tokens to convert to text."""

    model: Name | None = None
    tokens: Annotated[list[Token], Field(fail_fast=True, max_length=1_048_576)]


class DetokenizeResponse(BaseModel):
    """The text of tokens."""

    prompt: str


class TokenizerInfo(BaseModel):
    """Settings of the tokenizer."""

    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    chat_template: str | None
