"""A logit lens as JSON or CSV, from a frame SCOPE_ANALYSIS. Pure."""

import io
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from megatronapp_common.errors import FrameError
from megatronapp_common.frames import Frame
from megatronapp_common.scope.protocol import unpack

LensFormat = Literal["json", "csv"]
NAMES = ("id", "logprob", "entropy", "target.rank", "target.logprob")


def lens_tensors(frame: Frame) -> dict[str, NDArray[Any]]:
    """Return the tensors of a lens by their names, each [layers, positions, ..]. Raises FrameError."""
    header = frame.header
    size = len(header["layers"]), header["rows"][1] - header["rows"][0]
    found = {tensor.name.removeprefix("lens."): tensor.data for tensor in unpack(frame)}
    wrong = [name for name in NAMES if name not in found or found[name].shape[:2] != size]
    if wrong:
        raise FrameError(f"a lens of {size[0]} layers by {size[1]} positions lacks {', '.join(wrong)}")
    return found


def lens_json(frame: Frame) -> dict[str, Any]:
    """Return the fields of `schemas.Lens`. Raises FrameError."""
    header, found = frame.header, lens_tensors(frame)
    first, end = header["rows"]
    answer: dict[str, Any] = {
        "sample": header["sample"],
        "layers": list(header["layers"]),
        "positions": list(range(first, end)),
        "tokens": header.get("tokens", []),
        "texts": header.get("texts", []),
        "ids": found["id"].tolist(),
        "logprobs": numbers(found["logprob"]),
        "entropy": numbers(found["entropy"]),
        "targetRank": ranks(found["target.rank"]),
        "targetLogprob": numbers(found["target.logprob"]),
        "token": header.get("token"),
    }
    if answer["token"] is not None:
        answer |= {"tokenRank": ranks(found["token.rank"]), "tokenLogprob": numbers(found["token.logprob"])}
    return answer


def numbers(values: NDArray[Any]) -> Any:  # noqa: ANN401 - nested lists
    """Return nested lists with seven significant digits, as float32 has; None for what is not finite."""
    flat = [float(f"{value:.7g}") if np.isfinite(value) else None for value in values.reshape(-1).tolist()]
    return nested(flat, values.shape)


def ranks(values: NDArray[Any]) -> Any:  # noqa: ANN401 - nested lists
    """Return nested lists of ranks; None in place of -1."""
    return nested([value if value >= 0 else None for value in values.reshape(-1).tolist()], values.shape)


def nested(flat: list[Any], shape: tuple[int, ...]) -> Any:  # noqa: ANN401 - nested lists
    """Return a flat list as nested lists of this shape."""
    for size in reversed(shape[1:]):
        flat = [flat[place : place + size] for place in range(0, len(flat), size)] if size else [[]] * shape[0]
    return flat


def lens_csv(frame: Frame) -> bytes:
    """Return one line for each layer and position, with the likeliest tokens as pairs of columns. Raises FrameError."""
    found = lens_tensors(frame)
    first, end = frame.header["rows"]
    top = found["id"].shape[2]
    watched = ["target", *(["token"] if "token.rank" in found else [])]
    out = io.StringIO()
    names = ["layer", "position", "entropy"]
    names += [f"{name}_{column}" for name in watched for column in ("rank", "logprob")]
    names += [f"{column}_{place}" for place in range(top) for column in ("id", "logprob")]
    out.write(",".join(names) + "\n")
    for row, layer in enumerate(frame.header["layers"]):
        for column, position in enumerate(range(first, end)):
            cells = [str(layer), str(position), f"{found['entropy'][row, column]:.9g}"]
            for name in watched:
                rank, logprob = found[f"{name}.rank"][row, column], found[f"{name}.logprob"][row, column]
                cells += ["", ""] if rank < 0 else [str(rank), f"{logprob:.9g}"]
            for place in range(top):
                cells += [str(found["id"][row, column, place]), f"{found['logprob'][row, column, place]:.9g}"]
            out.write(",".join(cells) + "\n")
    return out.getvalue().encode()
