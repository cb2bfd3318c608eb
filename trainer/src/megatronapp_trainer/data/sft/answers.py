"""Tokens of conversations, and which of them are answers."""

import dataclasses
import pathlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from megatronapp_trainer.data import tokenizer as tokenizers
from megatronapp_trainer.data.chat_template import ChatTemplate, TemplateError, compiled, read_template
from megatronapp_trainer.data.sft.conversations import ASSISTANT, Conversation
from megatronapp_trainer.data.tokenizer import Tokenizer
from megatronapp_trainer.data.vocabulary import VocabularyConfig
from megatronapp_trainer.errors import DataError

DEFAULT, IDENTITY = "default", "identity"
_CONTENTS = "{% for message in messages %}{{ message['content'] or '' }}{% endfor %}"


@dataclasses.dataclass(frozen=True, slots=True)
class RenderedConversation:
    """Text of a conversation, and the characters [begin, end) of each answer."""

    text: str
    answers: tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True, slots=True)
class TokenizedConversation:
    """Tokens of a conversation, int32 [n], and whether each belongs to an answer, bool [n]."""

    tokens: npt.NDArray[np.int32]
    is_answer: npt.NDArray[np.bool_]


def template_of(prompt_format: str, config: VocabularyConfig) -> ChatTemplate:
    """Return the template of `--sft-tokenizer-prompt-format`.

    `default` is the tokenizer's, `identity` the contents of the messages, and other values are paths of files.

    Raises:
        DataError: there is no template, or it cannot be used.
    """
    path = pathlib.Path(config.tokenizer_file or config.vocab_file or "")
    own = read_template(path if path.is_dir() else path.parent)
    flag = f"--sft-tokenizer-prompt-format {prompt_format}"
    if prompt_format == IDENTITY:
        return ChatTemplate(text=_CONTENTS, tokens=own.tokens)
    if prompt_format != DEFAULT:
        try:
            text = pathlib.Path(prompt_format).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(
                f"{flag}: write {DEFAULT}, {IDENTITY}, or the path of a Jinja template ({error})"
            ) from error
        own = compiled(text, own.tokens)
        if own.flaw is not None:
            raise DataError(f"{flag}: this is no template that Jinja can compile: {own.flaw}")
    if own.flaw is not None:
        raise DataError(f"{flag}: the chat template of {path} cannot be used: {own.flaw}")
    if own.text is None:
        raise DataError(
            f"{flag}: {path} has no chat template next to it (chat_template.jinja or tokenizer_config.json); "
            f"copy it there, give the path of a Jinja template, or write {IDENTITY}"
        )
    return own


class AnswerTokenizer:
    """Renders conversations by a template and tokenizes them."""

    def __init__(self, config: VocabularyConfig, prompt_format: str) -> None:
        """Load tokenizer and template. Raises DataError if either is missing or cannot be used."""
        self.template = template_of(prompt_format, config)
        self.tokenizer: Tokenizer = tokenizers.load(
            vocab_file=config.vocab_file,
            merge_file=config.merge_file,
            tokenizer_file=config.tokenizer_file,
            tokenizer_type=config.tokenizer_type,
        )
        ids, end = self.tokenizer.vocab, self.template.tokens.get("eos_token")
        if end is not None and end not in ids:
            raise DataError(f"eos_token {end!r} of tokenizer_config.json is no token of the tokenizer; copy both again")
        self.end: int = _end_of_text(self.tokenizer) if end is None else ids[end]
        """Token that ends a conversation, and fills up samples."""

    def tokenize(self, rendered: Sequence[RenderedConversation]) -> list[TokenizedConversation]:
        """Tokenize conversations together, on all processors."""
        encoded = self.tokenizer.backend.encode_batch([part.text for part in rendered], add_special_tokens=False)
        return [self._marked(part, encoding) for part, encoding in zip(rendered, encoded, strict=True)]

    def _marked(self, rendered: RenderedConversation, encoding: object) -> TokenizedConversation:
        tokens = np.array(encoding.ids, dtype=np.int32)  # type: ignore[attr-defined] # of the Rust library
        starts, ends = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2).T  # type: ignore[attr-defined]
        is_answer = np.zeros(len(tokens), dtype=np.bool_)
        for begin, end in rendered.answers:
            is_answer |= (ends > begin) & (starts < end)
        last_begin, last_end = rendered.answers[-1]
        ends_with_answer = last_end == len(rendered.text)
        if not (ends_with_answer and (tokens[starts >= last_begin] == self.end).any()):
            tokens = np.append(tokens, np.int32(self.end))
            is_answer = np.append(is_answer, ends_with_answer)
        return TokenizedConversation(tokens, is_answer)


def _end_of_text(tokenizer: Tokenizer) -> int:
    try:
        return tokenizer.eod
    except DataError as error:
        raise DataError(
            "--sft: nothing says which token ends a conversation; name it as eos_token in a tokenizer_config.json next "
            "to the tokenizer"
        ) from error


def render(messages: Conversation, template: ChatTemplate) -> RenderedConversation:
    """Render a conversation, and find its answers: what an assistant's message adds to the prompt before it.

    Raises:
        DataError: the template refuses the messages, or renders the beginning of a conversation in another way where
            it continues.
    """
    try:
        text = template.render(messages, add_generation_prompt=False)
        answers = tuple(
            _answer(messages, place, text, template)
            for place, message in enumerate(messages)
            if message["role"] == ASSISTANT
        )
    except TemplateError as error:
        raise DataError(f"the chat template refuses a conversation: {error}") from error
    return RenderedConversation(text, answers)


def _answer(messages: Conversation, place: int, text: str, template: ChatTemplate) -> tuple[int, int]:
    prompt = template.render(messages[:place], add_generation_prompt=True)
    answered = template.render(messages[: place + 1], add_generation_prompt=False)
    if not answered.startswith(prompt) or not text.startswith(answered):
        raise DataError(
            f"the chat template renders message {place + 1} of a conversation in another way where the conversation "
            "continues, so that its answer cannot be found; write a template that only appends, and give its file by "
            "--sft-tokenizer-prompt-format"
        )
    return len(prompt), len(answered)
