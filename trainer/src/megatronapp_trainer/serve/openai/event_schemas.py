"""Descriptions that FastAPI does not add by itself to /openapi.json: the events of streams."""

from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from megatronapp_trainer.serve.openai.schemas_chat import ChatChunk
from megatronapp_trainer.serve.openai.schemas_completions import Completion, Problem, QueueNotice

_PLACE = "#/components/schemas/{model}"
_MODELS = (Completion, ChatChunk, Problem, QueueNotice)
_DONE = "[DONE]"


def streamed(chunk: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    """Return the responses of an operation that answers with JSON, or on request with a stream of such chunks."""
    item = {"anyOf": [_done(), _event("message", chunk), _event("queue", QueueNotice), _event("error", Problem)]}
    return {200: {"content": {"text/event-stream": {"itemSchema": item}}}}


def describe(app: FastAPI) -> None:
    """Add the models of events to the document of `app`."""
    plain = app.openapi

    def openapi() -> dict[str, Any]:
        document = plain()
        _, found = models_json_schema([(model, "serialization") for model in _MODELS], ref_template=_PLACE)
        document["components"]["schemas"] = found["$defs"] | document["components"]["schemas"]
        return document

    app.openapi = openapi  # type: ignore[method-assign] # as FastAPI's documentation has it


def _event(name: str, model: type[BaseModel]) -> dict[str, Any]:
    """Describe an event with JSON in it; streams omit the name `message`, which readers add."""
    content = {"$ref": _PLACE.format(model=model.__name__)}
    data = {"type": "string", "contentMediaType": "application/json", "contentSchema": content}
    return _object(name, data)


def _done() -> dict[str, Any]:
    return _object("message", {"const": _DONE})


def _object(name: str, data: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "required": ["data"], "properties": {"event": {"const": name}, "data": data}}
