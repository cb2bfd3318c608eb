"""PART frames of what has come to the host. No torch: it runs in the thread that sends."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatronapp_common.frames import Frame, FrameType
from megatronapp_common.scope.protocol import Tensor, frame_of
from megatronapp_trainer.scope.parcel import Arrival, Found
from megatronapp_trainer.scope.runs import Row

PART_BYTES = 2 << 20
"""Of a probe's frame, about: what holds few frames can drop few."""
ATLAS = "atlas "
"""Before run and sample, in the names of pictures on their way."""
EVERY = -1
"""The group of tensors that frames of all groups may take from."""
_CODES = {np.dtype("<f4"): "f32", np.dtype("<f2"): "f16", np.dtype("u1"): "u8s"}
Arrays = Sequence[tuple[Found, NDArray[Any]]]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Told:
    """One frame, or several of equal kind, to be made of the tensors of one group."""

    group: int
    header: Mapping[str, Any]
    rows: Sequence[Row] = ()
    select: Sequence[int] = ()
    """Where the rows stand in the tensors."""
    pinned: Sequence[tuple[int, int, int]] = ()
    """Of `attention`: place in the tensor, layer, head."""
    atlas: str = ""
    """Name of a picture, which is then a frame of its own; its sample is that of the one row."""
    is_probe: bool = False


class Parts:
    """All frames of one step: a job for the publisher."""

    def __init__(self, arrival: Arrival, told: Sequence[Told]) -> None:
        self._arrival = arrival
        self._told = told

    def ready(self) -> bool:
        """The copy has come."""
        return self._arrival.ready()

    def build(self) -> Iterator[Frame]:
        """The frames, in their order."""
        arrays = self._arrival.open()
        for told in self._told:
            yield from _frames(told, [pair for pair in arrays if pair[0].group in {told.group, EVERY}])


def ranges(rows: Iterable[Row]) -> list[list[int]]:
    """`[[sample, first position, count], ..]`."""
    out: list[list[int]] = []
    for row in rows:
        if out and out[-1][0] == row.sample and out[-1][1] + out[-1][2] == row.position:
            out[-1][2] += 1
        else:
            out.append([row.sample, row.position, 1])
    return out


def _frames(told: Told, arrays: Arrays) -> Iterator[Frame]:
    if told.atlas:
        tensors = [_tensor(found, values, "atlas") for found, values in arrays if found.name == told.atlas]
        yield frame_of(FrameType.SCOPE_PART, {**told.header, "rows": ranges(told.rows)}, tensors)
        return
    numbers = [(found, values) for found, values in arrays if not found.name.startswith(ATLAS)]
    for first, end, last in _cuts(told, numbers):
        rows, select = told.rows[first:end], told.select[first:end]
        tensors = list(_tensors(told, numbers, rows, select))
        header = {**told.header, "rows": ranges(rows), "more": bool(told.header["more"]) or not last}
        yield frame_of(FrameType.SCOPE_PART, header, tensors)


def _cuts(told: Told, arrays: Arrays) -> Iterator[tuple[int, int, bool]]:
    """Rows of each frame."""
    count = len(told.rows)
    row_bytes = sum(values.nbytes // max(1, values.shape[0]) for _, values in arrays)
    at_once = max(1, PART_BYTES // max(1, row_bytes)) if told.is_probe else max(1, count)
    for first in range(0, max(1, count), at_once):
        yield first, min(count, first + at_once), first + at_once >= count


def _tensors(told: Told, arrays: Arrays, rows: Sequence[Row], select: Sequence[int]) -> Iterator[Tensor]:
    places, first = np.asarray(select, dtype=np.intp), list(range(len(select)))
    in_order = list(select) == first
    for found, values in arrays:
        if found.name == "pinned":
            keys = max(row.position for row in rows) + 1
            for place, layer, head in told.pinned:
                said = {"site": "attention", "layers": [layer], "heads": [head, head + 1], "replicated": False}
                data = np.ascontiguousarray(values[place, places, None, None, :keys])
                yield Tensor("attention", "u8s", data, None, said)
        else:
            yield _tensor(found, values[: len(first)] if in_order else values[places])


def _tensor(found: Found, values: NDArray[Any], name: str | None = None) -> Tensor:
    code = _CODES[values.dtype]
    layers = {} if found.layers is None else {"layers": list(found.layers)}
    return Tensor(name or found.name, code, np.ascontiguousarray(values), None, {**layers, **found.said})
