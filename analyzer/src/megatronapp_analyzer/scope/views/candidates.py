"""Candidates for each token, from the stored frames of steps. Pure."""

from collections.abc import Iterable
from typing import Any

from megatronapp_analyzer.scope.parts.merge import Row
from megatronapp_common import frames
from megatronapp_common.frames import Frame
from megatronapp_common.scope.protocol import unpack


def candidates_of(steps: Iterable[bytes]) -> dict[Row, list[dict[str, Any]]]:
    """Return by sample and position of the token: `{"id", "text", "probability"}`, the likeliest first."""
    found: dict[Row, list[dict[str, Any]]] = {}
    for data in steps:
        frame = frames.decode(data)
        tensors = {tensor.name: tensor.data for tensor in unpack(frame)}
        if "top.id" in tensors and "top.p" in tensors:
            found |= _of_step(frame, tensors)
    return found


def _of_step(frame: Frame, tensors: dict[str, Any]) -> dict[Row, list[dict[str, Any]]]:
    rows = frame.header["rows"]
    texts = frame.header.get("topTexts") or [[] for _ in rows]
    lines = zip(rows, tensors["top.id"].tolist(), tensors["top.p"].tolist(), texts, strict=True)
    return {(sample, place + 1): _line(ids, chances, names) for (sample, place), ids, chances, names in lines}


def _line(ids: list[int], chances: list[float], names: list[str]) -> list[dict[str, Any]]:
    texts = names if len(names) == len(ids) else [None] * len(ids)
    return [
        {"id": token, "text": text, "probability": chance}
        for token, text, chance in zip(ids, texts, chances, strict=True)
    ]
