"""Templates of the frames of decode steps, derived once.

Steps of one graph bring tensors of equal names and shapes. Where a frame takes the first rows of all of them, only
bytes change from step to step, and the packed buffer has them in the order of the frame.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatronapp_trainer.scope.transfer.device_copy import BufferLayout

VERSION = "pcaVersion"
"""Field of `pca` that moves to the header of the part."""
CODES = {np.dtype("<f4"): "f32", np.dtype("<f2"): "f16", np.dtype("u1"): "u8s"}
_ALIGNED = 8


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class FrameTemplate:
    """Entries of `tensors` of a frame's header, and the places of their bytes in a packed buffer."""

    entries: Sequence[Mapping[str, Any]]
    spans: Sequence[tuple[int, int]]
    size: int
    """Size of the body."""
    header: Mapping[str, Any]
    """Further fields of the frame's header."""

    def body(self, data: NDArray[np.uint8]) -> bytes:
        """Build the body of a frame."""
        parts: list[bytes] = []
        for first, end in self.spans:
            parts += (data[first:end].tobytes(), bytes((first - end) % _ALIGNED))
        return b"".join(parts)


@functools.lru_cache(maxsize=64)
def template_of(layout: BufferLayout, group: int, rows: int) -> FrameTemplate:
    """Derive the template of the first rows of all tensors of a group."""
    entries: list[Mapping[str, Any]] = []
    spans: list[tuple[int, int]] = []
    header: dict[str, Any] = {}
    size = 0
    for found, place, shape, dtype in layout.tensors():
        if found.group != group:
            continue
        width = rows * math.prod(shape[1:]) * dtype.itemsize
        entry = {"n": found.name, "c": CODES[dtype], "s": [rows, *shape[1:]], "o": size}
        layers = {} if found.layers is None else {"layers": list(found.layers)}
        entries.append(entry | layers | {key: value for key, value in found.header.items() if key != VERSION})
        header |= {key: value for key, value in found.header.items() if key == VERSION}
        spans.append((place, place + width))
        size += width + -width % _ALIGNED
    return FrameTemplate(tuple(entries), tuple(spans), size, header)
