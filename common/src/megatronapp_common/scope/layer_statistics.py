"""Statistics of the values at a site of a layer in one training step, as ranks send them and the hub merges them.

All fields merge by sum, except `largest` by maximum: over microbatches and slices on a rank, over ranks in the hub.
Values that are NaN or infinite are counted, and are in no other field but `count`.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatronapp_common.errors import FrameError
from megatronapp_common.frames import Frame

BINS = 40
"""Bins of the histogram of magnitudes."""
FIRST_EXPONENT = -24
"""Bin b holds magnitudes in [2^(b - 24), 2^(b - 23)); the first one also smaller, the last one also larger ones."""
MOMENTS = ("sum", "squares", "largest")
COUNTS = ("count", "nan", "inf", "zero")
RECORD = np.dtype(
    [*((name, "<f8") for name in MOMENTS), *((name, "<i8") for name in COUNTS), ("histogram", "<i8", (BINS,))]
)
"""Statistics of one site of one layer. `sum` and `squares` are sums of the finite values and of their squares,
`largest` is the largest finite magnitude; `histogram` counts the finite values other than 0, which are in `zero`."""
NO_LAYER = -1
"""Layer of a site without layers."""
MAX_ROWS = 1 << 14
MAX_LAYER = 1 << 16
MAX_NAME = 64

COMPUTED = ("embedding", "attention_output", "mlp1", "mlp2", "residual", "final_norm")
"""Sites of forward passes, in the order of computation."""
GRADIENT = "gradient"
"""Gradients of the weights of a layer, as the optimizer gets them, without a loss scale."""
WEIGHT = "weight"
"""Weights of a layer before the step changes them."""
UPDATE = "update"
"""Change of the weights of a layer by the step."""
SITES = (*COMPUTED, GRADIENT, WEIGHT, UPDATE)

PERTURBATION = "perturbation"
"""Field of a frame's header with the digest of the recipe that was in force in the step; absent: none was."""
REPEATED = "repeated"
"""Field of a frame's header: true if the step was computed before, and its loss or gradient norm was not finite."""
_DIGEST = re.compile("[0-9a-f]{12}")

Records = NDArray[Any]
"""Array of RECORD."""


class SiteLayer(NamedTuple):
    """A site of a layer; `NO_LAYER` for one without layers, and for the weights outside of the layers."""

    site: str
    layer: int


def merge(into: Records, other: Records) -> None:
    """Add `other` to `into`, row by row."""
    largest = np.maximum(into["largest"], other["largest"])
    for name in ("sum", "squares", *COUNTS, "histogram"):
        into[name] += other[name]
    into["largest"] = largest


def of_values(values: NDArray[Any]) -> Records:
    """Return the statistics of some values, one record."""
    flat = np.asarray(values, np.float64).reshape(-1)
    finite = flat[np.isfinite(flat)]
    found = np.zeros(1, RECORD)
    found["sum"], found["squares"] = finite.sum(), np.square(finite).sum()
    found["largest"] = np.abs(finite).max(initial=0.0)
    found["count"], found["nan"], found["inf"] = flat.size, np.isnan(flat).sum(), np.isinf(flat).sum()
    nonzero = np.abs(finite[finite != 0])
    found["zero"] = finite.size - nonzero.size
    exponents = np.clip(np.frexp(nonzero)[1] - 1 - FIRST_EXPONENT, 0, BINS - 1)
    found["histogram"] = np.bincount(exponents, minlength=BINS)
    return found


def statistics_frame(kind: int, header: Mapping[str, Any], rows: Sequence[SiteLayer], body: bytes) -> Frame:
    """Return a frame with the records of `rows`, whose bytes are `body`."""
    return Frame(kind, {**header, "rows": [[row.site, row.layer] for row in rows]}, body)


def read_statistics(frame: Frame) -> tuple[list[SiteLayer], Records]:
    """Return the rows of a frame and their records. Raises FrameError for others than `statistics_frame` makes."""
    rows = frame.header.get("rows")
    if not isinstance(rows, list) or len(rows) > MAX_ROWS:
        raise FrameError(f"statistics: rows is not a list of at most {MAX_ROWS}")
    found = [_row(row) for row in rows]
    if len(set(found)) != len(found):
        raise FrameError("statistics: a row is named twice")
    if len(frame.body) != len(rows) * RECORD.itemsize:
        raise FrameError(f"statistics: {len(frame.body)} bytes for {len(rows)} rows of {RECORD.itemsize} bytes")
    records = np.frombuffer(frame.body, RECORD).copy()
    if any((records[name] < 0).any() for name in (*COUNTS, "histogram", "squares", "largest")):
        raise FrameError("statistics: a count, a sum of squares or a magnitude is negative")
    return found, records


def perturbation_of(header: Mapping[str, Any]) -> str | None:
    """Return the digest of the recipe that was in force in the step of a frame; None: none was.

    Raises FrameError for a digest that no recipe has.
    """
    digest = header.get(PERTURBATION)
    if digest is not None and not (isinstance(digest, str) and _DIGEST.fullmatch(digest)):
        raise FrameError(f"{PERTURBATION} is {str(digest)[:40]!r}; it is a digest of 12 hex digits")
    return digest


def _row(row: object) -> SiteLayer:
    if not (isinstance(row, list) and [type(part) for part in row] == [str, int]):
        raise FrameError(f"statistics: row {str(row)[:80]} is not a site and a layer")
    site, layer = row
    if not 1 <= len(site) <= MAX_NAME or not NO_LAYER <= layer <= MAX_LAYER:
        raise FrameError(f"statistics: row {str(row)[:80]} has a long name or no possible layer")
    return SiteLayer(site, layer)


def first_not_finite(rows: Iterable[SiteLayer], records: Iterable[Any]) -> SiteLayer | None:
    """Return the first site in the order of computation with NaN or infinite values; None without such values.

    Weights are before all others, as NaN in them reaches every site; then the embedding, layer by layer, and the last
    norm; then gradients in the opposite order of layers.
    """
    marked = [row for row, record in zip(rows, records, strict=True) if record["nan"] or record["inf"]]
    return min(marked, key=_place, default=None)


def _place(row: SiteLayer) -> tuple[int, int, int]:
    if row.site == WEIGHT:
        return 0, row.layer, 0
    if row.site == GRADIENT:
        return 3, -row.layer, 0
    if row.site == UPDATE:
        return 4, row.layer, 0
    if row.site not in COMPUTED:
        return 2, row.layer, 0
    after_layers = row.site == "final_norm"
    return 1, MAX_LAYER + 1 if after_layers else row.layer, COMPUTED.index(row.site)
