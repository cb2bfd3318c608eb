"""Coordinates of rows in a basis, as SCOPE_PCA carries them. Pure."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from megatronapp_analyzer.scope.parts.merge import PCA, Row
from megatronapp_analyzer.scope.probes.pca import PcaBasis
from megatronapp_common import frames
from megatronapp_common.frames import Frame, FrameType
from megatronapp_common.scope.protocol import COMPONENTS, MAX_PART_BYTES, Tensor, build_frame, unpack

MAX_STATE_BYTES = 96 << 20
"""Bytes of hidden states that are requested to fit a basis: with a stride over rows of a longer text."""
MAX_POINT_BYTES = MAX_PART_BYTES - (64 << 10)
"""Bytes of coordinates in one frame: with a stride over rows of a longer text."""
ROW_HEADER_BYTES = 24


@dataclasses.dataclass(frozen=True, slots=True)
class PcaPoints:
    """Coordinates [rows, layers, 8] of some rows."""

    rows: list[Row]
    values: NDArray[np.float32]

    @classmethod
    def empty(cls, layers: int) -> Self:
        """Return points without rows."""
        return cls([], np.zeros((0, layers, COMPONENTS), "<f4"))

    @classmethod
    def of_frame(cls, data: bytes | None) -> Self:
        """Return the points of a SCOPE_PCA frame."""
        if data is None:
            return cls.empty(0)
        frame = frames.decode(data)
        (tensor,) = unpack(frame)
        return cls([(sample, place) for sample, place in frame.header["rows"]], tensor.data)

    def with_more(self, other: "PcaPoints") -> "PcaPoints":
        """Merge with other points, which win where both have a row. Rows are in order."""
        if not self.rows:
            return other
        found = dict(zip(self.rows, self.values, strict=True)) | dict(zip(other.rows, other.values, strict=True))
        rows = sorted(found)
        return PcaPoints(rows, np.stack([found[row] for row in rows]))


def stride_of(rows: int, layers: int, hidden: int) -> int:
    """Return the stride at which rows of hidden states are within bounds."""
    return max(1, -(-rows * layers * hidden * 4 // MAX_STATE_BYTES))


def coordinates_of(
    states: Mapping[int, NDArray[np.floating]], rows: Sequence[Row], bases: Mapping[int, PcaBasis]
) -> PcaPoints:
    """Project hidden states by layer; layers of the basis without states are NaN."""
    values = np.full((len(rows), len(bases), COMPONENTS), np.nan, "<f4")
    for place, layer in enumerate(sorted(bases)):
        if layer in states:
            values[:, place] = bases[layer].project(states[layer])
    return PcaPoints(list(rows), values)


def frame_of_points(said: Mapping[str, Any], points: PcaPoints) -> Frame:
    """Build a SCOPE_PCA frame."""
    room = MAX_POINT_BYTES // (points.values.shape[1] * COMPONENTS * 4 + ROW_HEADER_BYTES)
    every = max(1, -(-len(points.rows) // room))
    header = {**said, "rows": [list(row) for row in points.rows[::every]]}
    return build_frame(FrameType.SCOPE_PCA, header, [Tensor(PCA, "f32", points.values[::every])])
