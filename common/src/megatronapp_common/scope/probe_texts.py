"""Results of probe texts of a training: fixed texts that are run through the current weights after captured steps.

A rank sends frames of several kinds for each text of a captured step:

    text         the text's tokens as strings, by the rank that has the embedding
    norms        fp32 [tokens]: Euclidean norms of the residual after a layer, of this rank's tokens
    attention    uint8 [heads, P, P]: probabilities of one layer, of this rank's heads; 255 is 1
    predictions  fp32 [tokens]: log-probability of the token that follows in the text; int32 and fp32 [tokens, k]: the
                 likeliest next tokens and their log-probabilities, by the rank that has the logits

A text of T tokens has P = ceil(T / b) blocks of b = ceil(T / 64) tokens: mean over the queries of a block, sum over its
keys, so that each row sums up to 1.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from megatronapp_common.errors import FrameError
from megatronapp_common.frames import Frame
from megatronapp_common.scope.layer_statistics import MAX_LAYER, NO_LAYER, perturbation_of
from megatronapp_common.scope.probe_limits import MAX_CHARACTERS, MAX_TEXTS, MAX_TOKENS

MAX_BLOCKS = 64
CANDIDATES = 5
"""Likeliest next tokens at each position."""
Kind = Literal["text", "norms", "attention", "predictions"]


def block_of(tokens: int) -> int:
    """Return the tokens of a block of an attention map."""
    return math.ceil(tokens / MAX_BLOCKS)


def blocks_of(tokens: int) -> int:
    """Return the rows of an attention map."""
    return math.ceil(tokens / block_of(tokens))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ProbePart:
    """A frame of a rank."""

    kind: Kind
    step: int
    """Steps done."""
    attempt: int
    text: int
    tokens: int
    """Tokens of the text."""
    layer: int
    """Layer of norms and attention; -1: the embedding, or none."""
    first: int
    """First token of norms, first head of attention."""
    source: str
    """The text itself, in frames of kind text."""
    strings: Mapping[str, str] | Sequence[str]
    """Tokens of the text as strings, or those of predictions by id."""
    arrays: tuple[NDArray[Any], ...]
    perturbation: str | None
    """Digest of the recipe that was in force in the step before the texts; None: none was."""


_ARRAYS: Mapping[Kind, tuple[str, ...]] = {
    "text": (),
    "norms": ("<f4",),
    "attention": ("u1",),
    "predictions": ("<f4", "<i4", "<f4"),
}


def read_probe(frame: Frame) -> ProbePart:
    """Parse a TRAINING_PROBE frame. Raises FrameError for one that no rank sends."""
    header = frame.header
    kind = next((known for known in _ARRAYS if known == header.get("kind")), None)
    if kind is None:
        raise FrameError(f"probe text: kind {str(header.get('kind'))[:40]!r} is none of {', '.join(_ARRAYS)}")
    tokens = _number(header, "tokens", 1, MAX_TOKENS)
    part = ProbePart(
        kind=kind,
        step=_number(header, "step", 0, 1 << 53),
        attempt=_number(header, "attempt", 0, 1 << 31),
        text=_number(header, "text", 0, MAX_TEXTS - 1),
        tokens=tokens,
        layer=_number(header, "layer", NO_LAYER, MAX_LAYER, default=NO_LAYER),
        first=_number(header, "first", 0, MAX_LAYER, default=0),
        source=str(header.get("source", ""))[:MAX_CHARACTERS],
        strings=_strings(header.get("strings", ())),
        arrays=tuple(_arrays(frame, _ARRAYS[kind])),
        perturbation=perturbation_of(header),
    )
    _check_shapes(part)
    return part


def _number(header: Mapping[str, Any], name: str, least: int, most: int, *, default: int | None = None) -> int:
    value = header.get(name, default)
    if type(value) is not int or not least <= value <= most:
        raise FrameError(f"probe text: {name} is {str(value)[:40]!r}; it is a number from {least} to {most}")
    return value


def _strings(found: object) -> Mapping[str, str] | Sequence[str]:
    if isinstance(found, Mapping):
        return {str(key): str(value) for key, value in found.items()}
    if isinstance(found, list | tuple):
        return [str(value) for value in found]
    raise FrameError("probe text: strings is neither a list nor a map")


def _arrays(frame: Frame, dtypes: Sequence[str]) -> Iterator[NDArray[Any]]:
    entries, place = frame.header.get("arrays"), 0
    if not isinstance(entries, list) or not all(isinstance(entry, list) and len(entry) == 2 for entry in entries):
        raise FrameError("probe text: arrays is no list of types with their shapes")
    if [dtype for dtype, _ in entries] != list(dtypes):
        raise FrameError(f"probe text: arrays are not {list(dtypes)} with their shapes")
    for dtype, shape in entries:
        if not isinstance(shape, list) or not all(type(size) is int and 0 <= size <= MAX_LAYER for size in shape):
            raise FrameError(f"probe text: {str(shape)[:40]} is no shape")
        count = math.prod(shape)
        if place + count * np.dtype(dtype).itemsize > len(frame.body):
            raise FrameError(f"probe text: the body has {len(frame.body)} bytes, fewer than its arrays")
        yield np.frombuffer(frame.body, dtype, count, place).reshape(shape)
        place += count * np.dtype(dtype).itemsize


def _check_shapes(part: ProbePart) -> None:
    shapes = [array.shape for array in part.arrays]
    if not _fits(part, shapes):
        raise FrameError(f"probe text: {part.kind} of {part.tokens} tokens has arrays of shapes {shapes}")


def _fits(part: ProbePart, shapes: Sequence[tuple[int, ...]]) -> bool:
    if part.kind == "text":
        return not isinstance(part.strings, Mapping) and len(part.strings) == part.tokens
    if part.kind == "norms":
        return len(shapes[0]) == 1 and part.first + shapes[0][0] <= part.tokens
    if part.kind == "attention":
        blocks = blocks_of(part.tokens)
        return shapes[0][1:] == (blocks, blocks)
    candidates = (part.tokens, shapes[1][-1] if shapes[1] else 0)
    return isinstance(part.strings, Mapping) and shapes == [(part.tokens,), candidates, candidates]
