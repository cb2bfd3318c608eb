"""Tensors in the frames of MegaScope (docs/scope-protocol.md, section 4): bytes with a name, a code and a shape."""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from megatronapp_common.errors import FrameError
from megatronapp_common.frames import Frame
from megatronapp_common.scope import codes

SUBPROTOCOL = "megatronapp.scope.1"
PROTOCOL = 1
SOCKET = "scope.sock"
"""Name of the agent's Unix socket in RUN_DIR, to which ranks connect."""
RunState = Literal["queued", "prefill", "decoding", "done", "cancelled", "failed"]
ENDED_STATES = frozenset({"done", "cancelled", "failed"})
MAX_MESSAGE_BYTES = 256 << 10
"""Largest message to a page."""
MAX_PART_BYTES = 4 << 20
"""Largest frame of a rank; longer content is sent in several, with `more` in all but the last."""
MAX_COMMAND_BYTES = 4 << 10
"""Largest message from a page."""
GRANTED_BYTES = 4 << 20
"""Credit of a page when it connects."""
TEMPERATURES = (0.1, 0.25, 0.5, 0.7, 0.85, 1.0, 1.2, 1.5, 2.0)
"""Temperatures of `partition`."""
COMPONENTS = 8
"""Number of components of `pca`."""
ATLAS = 8
"""Side of a head's thumbnail in `atlas`, in cells."""
MAX_TENSORS = 4096
MAX_AXES = 6
ENTRY_KEYS = frozenset({"n", "c", "s", "o", "so"})
DTYPES: Mapping[str, str] = {
    **{code.value: dtype.str for code, dtype in codes.DTYPES.items()},
    "u32": "<u4",
    "i32": "<i4",
}
"""Codes and the types of their numbers in a body."""


@dataclasses.dataclass(frozen=True, slots=True)
class Tensor:
    """Numbers in a frame. Code `i8` has `scales` (f32, one for each row of the last axis)."""

    name: str
    code: str
    data: NDArray[Any]
    scales: NDArray[np.float32] | None = None
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Further entries of the header, such as `layers` in a part."""

    @property
    def nbytes(self) -> int:
        """Length in a body without padding, in bytes."""
        return self.data.nbytes + (0 if self.scales is None else self.scales.nbytes)


def pack(tensors: Iterable[Tensor]) -> tuple[list[dict[str, Any]], bytes]:
    """Return `header.tensors` and the body. Raises FrameError for numbers that are not of their code."""
    entries: list[dict[str, Any]] = []
    body = bytearray()

    def put(values: NDArray[Any], code: str) -> int:
        place = len(body)
        body.extend(np.ascontiguousarray(values, DTYPES[code]).tobytes())
        body.extend(bytes(-len(body) % 8))
        return place

    for tensor in tensors:
        _check(tensor)
        entry = {"n": tensor.name, "c": tensor.code, "s": list(tensor.data.shape), "o": put(tensor.data, tensor.code)}
        if tensor.scales is not None:
            entry["so"] = put(tensor.scales, "f32")
        entries.append(entry | dict(tensor.extra))
    return entries, bytes(body)


def _check(tensor: Tensor) -> None:
    dtype = DTYPES.get(tensor.code)
    if dtype is None or tensor.data.dtype != np.dtype(dtype):
        raise FrameError(f"tensor {tensor.name}: {tensor.data.dtype} is not what code {tensor.code!r} holds")
    scales = None if tensor.scales is None else tensor.scales.shape
    if scales != (tensor.data.shape[:-1] if tensor.code == "i8" else None):
        raise FrameError(f"tensor {tensor.name}: scales of shape {scales} do not fit code {tensor.code}")


def build_frame(kind: int, header: Mapping[str, Any], tensors: Iterable[Tensor] = ()) -> Frame:
    """Build a frame with these tensors as its body."""
    entries, body = pack(tensors)
    return Frame(kind, {**header, "tensors": entries}, body)


def unpack(frame: Frame) -> list[Tensor]:
    """Return the tensors of a frame, as views of its body. Raises FrameError that names the tensor."""
    entries = frame.header.get("tensors", [])
    if not isinstance(entries, list) or len(entries) > MAX_TENSORS:
        raise FrameError(f"tensors is not a list of at most {MAX_TENSORS}")
    return [_tensor(entry, memoryview(frame.body)) for entry in entries]


def _tensor(entry: object, body: memoryview) -> Tensor:
    if not isinstance(entry, dict) or not isinstance(entry.get("n"), str):
        raise FrameError("a tensor is not a map with a name")
    name, code, shape = entry["n"], entry.get("c"), entry.get("s")
    if not isinstance(code, str) or code not in DTYPES:
        raise FrameError(f"tensor {name[:64]!r}: there is no code {str(code)[:64]!r}; codes: {', '.join(DTYPES)}")
    if not isinstance(shape, list) or not 1 <= len(shape) <= MAX_AXES or not all(_is_count(size) for size in shape):
        raise FrameError(f"tensor {name[:64]!r}: the shape is not a list of 1 to {MAX_AXES} sizes")
    data = _view(name, body, entry.get("o"), shape, DTYPES[code])
    scales = _view(name, body, entry.get("so"), shape[:-1], "<f4") if code == "i8" else None
    return Tensor(name, code, data, scales, {key: value for key, value in entry.items() if key not in ENTRY_KEYS})


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 32


def _view(name: str, body: memoryview, offset: object, shape: list[int], dtype: str) -> NDArray[Any]:
    size = math.prod(shape) * np.dtype(dtype).itemsize
    if not _is_count(offset) or int(str(offset)) % 8 or int(str(offset)) + size > len(body):
        raise FrameError(f"tensor {name[:64]!r}: {size} bytes at {offset!r} are not within {len(body)} bytes of body")
    place = int(str(offset))
    return np.frombuffer(body[place : place + size], dtype).reshape(shape)
