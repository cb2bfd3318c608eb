"""Conversations in JSON lines, as Megatron-LM reads them: `{"messages": [{"role": ..., "content": ...}, ...]}`."""

import json
import pathlib
from collections.abc import Iterator
from typing import Any

from megatronapp_trainer.errors import DataError

Message = dict[str, Any]
Conversation = list[Message]
ASSISTANT = "assistant"


def read_conversations(path: str) -> Iterator[tuple[int, Conversation]]:
    """Yield the conversations of a file with the numbers of their lines.

    A line with several system messages holds several conversations, each of which begins with one.

    Raises:
        DataError: the file cannot be read, or a line holds no conversation with an answer.
    """
    try:
        with pathlib.Path(path).open(encoding="utf-8") as stream:
            for number, line in enumerate(stream, 1):
                if line.strip():
                    for conversation in _conversations(line, f"{path}, line {number}"):
                        yield number, conversation
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"{path} cannot be read: {error}; give files of conversations, one JSON object a line"
        ) from error


def check_conversations(path: str) -> None:
    """Raise DataError unless the file begins with a conversation."""
    if next(read_conversations(path), None) is None:
        raise DataError(f"{path} holds no conversation")


def _messages(line: str, place: str) -> Conversation:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{place} is not valid JSON: {error}") from error
    messages = found.get("messages") if isinstance(found, dict) else None
    if not isinstance(messages, list) or not messages:
        raise DataError(f'{place} has no messages; write {{"messages": [{{"role": "user", "content": "..."}}, ...]}}')
    if found.get("tools"):
        raise DataError(
            f'{place} has "tools", which --sft does not give to the chat template; write them into a system message as '
            'the template renders them, and leave "tools" out'
        )
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise DataError(f"{place}: each message must be an object with a role, such as user or assistant")
        if not isinstance(message.get("content"), str | list) and not message.get("tool_calls"):
            raise DataError(f'{place}: message {number} has no content; write {{"role": "user", "content": "..."}}')
    return messages


def _conversations(line: str, place: str) -> Iterator[Conversation]:
    """Yield the conversations of a line. Raises DataError if one of them has no answer."""
    for conversation in _split(_messages(line, place)):
        if not any(message["role"] == ASSISTANT for message in conversation):
            raise DataError(
                f"{place} has {_described(conversation)} without a message of the role {ASSISTANT}, so nothing would "
                "be learnt from it; add the answer, or leave it out (a system message begins another conversation)"
            )
        yield conversation


def _described(conversation: Conversation) -> str:
    return f"a conversation of the roles {', '.join(message['role'] for message in conversation[:4])}"


def _split(messages: Conversation) -> Iterator[Conversation]:
    """Yield the conversations of a line: all but the first begin with a system message."""
    first = 0
    for place, message in enumerate(messages):
        if message["role"] == "system" and place > first:
            yield messages[first:place]
            first = place
    yield messages[first:]
