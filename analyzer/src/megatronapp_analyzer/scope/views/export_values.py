"""Exact numbers of a site as files to download: JSON, CSV or NPY. Pure."""

import dataclasses
import io
import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Format = Literal["json", "csv", "npy"]
MEDIA = {"json": "application/json", "csv": "text/csv; charset=utf-8", "npy": "application/octet-stream"}
MAX_TEXT_NUMBERS = 4_000_000
"""In JSON and CSV; more only as NPY."""
LAYERLESS = frozenset({"embedding", "final_norm", "logits"})
HEADED = frozenset({"q", "k", "v", "head_output", "attention"})
LAYERED = frozenset({"attention_output", "mlp_in", "mlp1", "mlp2", "residual"})
SITES = LAYERLESS | HEADED | LAYERED


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ValueBlock:
    """Numbers of a site at some positions. `layer` and `head` are None where the site has none."""

    site: str
    sample: int
    layer: int | None
    head: int | None
    positions: Sequence[int]
    values: NDArray[Any]


def block(
    site: str, key: tuple[int, int | None, int | None], rows: Mapping[int, NDArray[Any]], positions: Sequence[int]
) -> ValueBlock:
    """Rows of these positions; shorter ones (attention) are filled with 0. `key`: sample, layer and head."""
    width = max((rows[place].size for place in positions), default=0)
    values = np.zeros((len(positions), width), "<f4")
    for index, place in enumerate(positions):
        values[index, : rows[place].size] = rows[place].reshape(-1)
    sample, layer, head = key
    return ValueBlock(site=site, sample=sample, layer=layer, head=head, positions=positions, values=values)


def render(found: ValueBlock, form: Format) -> bytes:
    """The file. In JSON numbers that are none (NaN, infinities) are null."""
    if form == "npy":
        buffer = io.BytesIO()
        np.save(buffer, found.values)
        return buffer.getvalue()
    if form == "csv":
        return _csv(found)
    rows = [[float(value) if np.isfinite(value) else None for value in row] for row in found.values]
    said = {"site": found.site, "sample": found.sample, "layer": found.layer, "head": found.head}
    return json.dumps(said | {"positions": list(found.positions), "values": rows}, allow_nan=False).encode()


def _csv(found: ValueBlock) -> bytes:
    """One line for each position. Nine digits say every 32-bit float exactly."""
    lines = [",".join(["position", *map(str, range(found.values.shape[1]))])]
    for position, row in zip(found.positions, found.values, strict=True):
        lines.append(",".join([str(position), *(f"{float(value):.9g}" for value in row)]))
    return ("\n".join(lines) + "\n").encode()
