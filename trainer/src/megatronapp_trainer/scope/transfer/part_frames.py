"""PART frames of what has been copied to the host. Without torch: it runs in the thread that sends."""

import collections
import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatronapp_common.frames import Frame, FrameType
from megatronapp_common.scope.protocol import build_frame, pack
from megatronapp_trainer.scope.transfer.device_copy import NamedTensor, PendingCopy
from megatronapp_trainer.scope.transfer.frame_template import CODES, VERSION, template_of
from megatronapp_trainer.scope.transfer.publisher import DropPolicy
from megatronapp_trainer.scope.transfer.split_frames import MOST_ROWS, RowTensor, split_into_frames

TARGET_FRAME_BYTES = 2 << 20
"""Approximate size of a frame; the protocol allows twice as many."""
ATLAS = "atlas "
"""Before run and sample, in the names of pictures on their way."""
EVERY = -1
"""The group of tensors that frames of all groups may take from."""
Arrays = Sequence[tuple[NamedTensor, NDArray[Any]]]


class TrackedRow(NamedTuple):
    """Token of a run in one step."""

    token: int
    """Place among the tokens that the layers get: at decode the slot."""
    sample: int
    position: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class FrameSpec:
    """One frame, or several of equal kind, to be made of the tensors of one group."""

    group: int
    header: Mapping[str, Any]
    rows: Sequence[TrackedRow] = ()
    select: Sequence[int] = ()
    """Places of the rows in the tensors."""
    pinned: Sequence[tuple[int, int, int]] = ()
    """Pins of `attention`: place in the tensor, layer, head."""
    atlas: str = ""
    """Name of a picture, which is then a separate frame; its sample is that of the single row."""
    is_probe: bool = False

    @property
    def kind(self) -> DropPolicy:
        """How it may be dropped."""
        if self.is_probe:
            return DropPolicy.PROBE
        return DropPolicy.PROMPTS if self.header["step"] == 0 else DropPolicy.STEP

    def mark(self) -> Frame:
        """Build the frame that marks this one as dropped."""
        header = {"rows": ranges(self.rows), "dropped": True, "tensors": []}
        return Frame(FrameType.SCOPE_PART, {**self.header, **header})


class StepFrames:
    """All frames of one step: a job for the publisher. They are made one by one, as there is room for them."""

    def __init__(self, copy: PendingCopy, specs: Sequence[FrameSpec], *, part_bytes: int = TARGET_FRAME_BYTES) -> None:
        self._copy = copy
        self._specs = collections.deque(specs)
        self._part_bytes = part_bytes

    @property
    def kind(self) -> DropPolicy:
        """Policy of the frames that matter most."""
        kinds = {spec.kind for spec in self._specs} or {DropPolicy.NEWS}
        return next(
            kind for kind in (DropPolicy.NEWS, DropPolicy.PROBE, DropPolicy.PROMPTS, DropPolicy.STEP) if kind in kinds
        )

    @property
    def nbytes(self) -> int:
        """Size in the host's memory."""
        return self._copy.nbytes

    def split(self) -> "list[StepFrames]":
        """Separate probes from steps, as they wait in another queue."""
        probes = [spec for spec in self._specs if spec.is_probe]
        others = [spec for spec in self._specs if not spec.is_probe]
        if not probes or not others:
            return [self]
        return [StepFrames(self._copy, specs, part_bytes=self._part_bytes) for specs in (others, probes)]

    def ready(self) -> bool:
        """Return true once the copy is done."""
        return self._copy.ready()

    def build(self) -> Iterator[Frame]:
        """The frames, in their order."""
        arrays = self._copy.open()
        while self._specs:
            spec = self._specs[0]
            mine = [pair for pair in arrays if pair[0].group in {spec.group, EVERY}]
            whole = _whole(spec, self._copy, mine, self._part_bytes)
            yield from _frames(spec, mine, self._part_bytes) if whole is None else [whole]
            self._specs.popleft()

    def marks(self) -> list[Frame]:
        """Build marks for all frames that have not been built."""
        return [spec.mark() for spec in self._specs]


def ranges(rows: Iterable[TrackedRow]) -> list[list[int]]:
    """`[[sample, first position, count], ..]`."""
    out: list[list[int]] = []
    for row in rows:
        if out and out[-1][0] == row.sample and out[-1][1] + out[-1][2] == row.position:
            out[-1][2] += 1
        else:
            out.append([row.sample, row.position, 1])
    return out


def _whole(spec: FrameSpec, copy: PendingCopy, arrays: Arrays, part_bytes: int) -> Frame | None:
    """Build the single frame of a decode step from a template; None if rows or size do not allow it."""
    count = len(spec.rows)
    if spec.kind is not DropPolicy.STEP or not 0 < count <= MOST_ROWS or list(spec.select) != list(range(count)):
        return None
    template = template_of(copy.layout, spec.group, count)
    row_tensors = [tensor for found, values in arrays if found.name == "pinned" for tensor in _pinned(spec, values)]
    if template.size + sum(tensor.row_bytes for tensor in row_tensors) * count > part_bytes:
        return None
    entries, body = pack(tensor.whole().tensor(slice(0, count)) for tensor in row_tensors)
    pinned_entries = [entry | {"o": entry["o"] + template.size} for entry in entries]
    header = {"rows": ranges(spec.rows), "tensors": [*template.entries, *pinned_entries]}
    return Frame(FrameType.SCOPE_PART, {**spec.header, **header, **template.header}, template.body(copy.data) + body)


def _frames(spec: FrameSpec, arrays: Arrays, part_bytes: int) -> Iterator[Frame]:
    for content in split_into_frames(list(_row_tensors(spec, arrays)), len(spec.rows), part_bytes):
        names = {tensor.name for tensor in content.tensors}
        header = {"rows": ranges(spec.rows[content.rows]), "more": bool(spec.header["more"]) or not content.is_last}
        for found, _ in arrays:
            if found.name in names and VERSION in found.header:
                header[VERSION] = found.header[VERSION]
        yield build_frame(FrameType.SCOPE_PART, {**spec.header, **header}, content.tensors)


def _row_tensors(spec: FrameSpec, arrays: Arrays) -> Iterator[RowTensor]:
    """Give the tensors of a part as rows that can be split."""
    if spec.atlas:
        for found, values in arrays:
            if found.name == spec.atlas:
                yield _row_tensor(found, values[None], None, "atlas")
        return
    in_order = list(spec.select) == list(range(len(spec.select)))
    select = None if in_order else np.asarray(spec.select, dtype=np.intp)
    for found, values in arrays:
        if found.name == "pinned":
            yield from _pinned(spec, values)
        elif not found.name.startswith(ATLAS):
            yield _row_tensor(found, values, select)


def _pinned(spec: FrameSpec, values: NDArray[Any]) -> Iterator[RowTensor]:
    """Each head by itself, as many keys as the longest row has."""
    keys = max((row.position for row in spec.rows), default=0) + 1
    select = np.asarray(spec.select, dtype=np.intp)
    for place, layer, head in spec.pinned:
        header = {"site": "attention", "heads": [head, head + 1], "replicated": False}
        rows = values[place, :, None, None, :keys]
        yield RowTensor(name="attention", code="u8s", values=rows, select=select, layers=(layer,), header=header)


def _row_tensor(
    found: NamedTensor, values: NDArray[Any], select: NDArray[np.intp] | None, name: str | None = None
) -> RowTensor:
    return RowTensor(
        name=name or found.name,
        code=CODES[values.dtype],
        values=values,
        select=select,
        layers=found.layers,
        header={key: value for key, value in found.header.items() if key != VERSION},
        is_picture=name is not None,
    )
