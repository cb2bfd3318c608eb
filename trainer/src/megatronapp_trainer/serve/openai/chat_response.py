"""Answers of /v1/chat/completions: the chunks of a completion in the form of chat."""

import dataclasses

from megatronapp_trainer.serve.openai.completion import CompletionResponse
from megatronapp_trainer.serve.openai.schemas_chat import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    ChatToken,
    ScoredToken,
)
from megatronapp_trainer.serve.openai.schemas_completions import Choice, Logprobs, Usage
from megatronapp_trainer.serve.served_model import BY_ID


@dataclasses.dataclass(kw_only=True)
class ChatResponse(CompletionResponse):
    """A `CompletionResponse` in the form of chat messages."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._begun: set[int] = set()

    def whole(self, choices: list[Choice]) -> ChatCompletion:
        """Return the answer with these texts."""
        return ChatCompletion(
            id=self.name,
            created=self.created,
            model=self.model.name,
            seed=self.seed,
            choices=[
                ChatChoice(
                    message=ChatMessage(content=choice.text), logprobs=_logprobs(choice.logprobs), **_common(choice)
                )
                for choice in choices
            ],
            usage=self.usage(),
            perturbation=self.perturbation,
        )

    def chunk(self, choices: list[Choice], usage: Usage | None = None) -> ChatChunk:
        """Return a chunk of a stream with these texts."""
        return ChatChunk(
            id=self.name,
            created=self.created,
            model=self.model.name,
            seed=self.seed,
            choices=[
                ChatChunkChoice(delta=self._delta(choice), logprobs=_logprobs(choice.logprobs), **_common(choice))
                for choice in choices
            ],
            usage=usage,
            perturbation=self.perturbation,
        )

    def _delta(self, choice: Choice) -> ChatDelta:
        is_first = choice.index not in self._begun
        self._begun.add(choice.index)
        return ChatDelta(role="assistant" if is_first else None, content=choice.text)


def _common(choice: Choice) -> dict[str, object]:
    return choice.model_dump(include={"index", "token_ids", "finish_reason", "stop_reason"})


def _logprobs(given: Logprobs | None) -> ChatLogprobs | None:
    if given is None:
        return None
    rows = zip(given.tokens, given.token_logprobs, given.top_logprobs, strict=True)
    return ChatLogprobs(
        content=[
            ChatToken(
                **_scored(name, value or 0.0).model_dump(),
                top_logprobs=[_scored(other, logprob) for other, logprob in (top or {}).items()],
            )
            for name, value, top in rows
        ]
    )


def _scored(name: str, logprob: float) -> ScoredToken:
    data = None if name.startswith(BY_ID) else list(name.encode())
    return ScoredToken(token=name, logprob=logprob, bytes=data)
