"""Attributions and scores of heads as JSON or CSV, from frames SCOPE_ANALYSIS. Pure."""

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatronapp_analyzer.scope.views.lens_answer import numbers
from megatronapp_common.errors import FrameError
from megatronapp_common.frames import Frame
from megatronapp_common.scope.protocol import unpack

PER_LAYER = {"attention_bias": "attentionBias", "mlp": "mlp", "mlp_bias": "mlpBias"}
NEURON = ("index", "activation", "contribution")


def attribution_json(frame: Frame) -> dict[str, Any]:
    """Return the fields of `schemas_analysis.Attribution`. Raises FrameError, KeyError."""
    header, found = frame.header, _tensors(frame)
    columns = [found[f"neuron.{name}"] for name in NEURON]
    layers = zip(columns[0].tolist(), numbers(columns[1]), numbers(columns[2]), strict=True)
    names = ("token", "against", "logit", "embedding", "constant", "sample")
    return {name: header[name] for name in names} | {
        "position": header["row"],
        "tokens": header.get("tokens", []),
        "texts": header.get("texts", []),
        "heads": numbers(found["heads"]),
        **{name: numbers(found[tensor]) for tensor, name in PER_LAYER.items()},
        "neurons": [[dict(zip(NEURON, cells, strict=True)) for cells in zip(*layer, strict=True)] for layer in layers],
    }


def attribution_csv(frame: Frame) -> bytes:
    """Return one line for each component: name, layer, index, contribution, activation. Raises FrameError, KeyError."""
    header, found = frame.header, _tensors(frame)
    lines: list[Iterable[Any]] = [("embedding", "", "", header["embedding"], "")]
    for layer, heads in enumerate(found["heads"]):
        lines += [("head", layer, head, contribution, "") for head, contribution in enumerate(heads)]
        lines += [(tensor, layer, "", found[tensor][layer], "") for tensor in PER_LAYER]
    lines += [("final_norm_bias", "", "", header["constant"], ""), ("logit", "", "", header["logit"], "")]
    for layer, row in enumerate(found["neuron.index"]):
        for place, index in enumerate(row):
            contribution, activation = (
                found[f"neuron.{name}"][layer, place] for name in ("contribution", "activation")
            )
            lines.append(("neuron", layer, index, contribution, activation))
    return _csv(("component", "layer", "index", "contribution", "activation"), lines)


def heads_json(frame: Frame) -> dict[str, Any]:
    """Return the fields of `schemas_analysis.HeadScores`. Raises FrameError, KeyError."""
    header, found = frame.header, _tensors(frame)
    return {
        "sample": header["sample"],
        "tokens": header["count"],
        "scores": header["scores"],
        "counts": header["counts"],
        "values": numbers(np.moveaxis(found["scores"], -1, 0)),
    }


def heads_csv(frame: Frame) -> bytes:
    """Return one line for each head with all of its scores. Raises FrameError, KeyError."""
    scores = _tensors(frame)["scores"]
    places = np.ndindex(*scores.shape[:2])
    lines = [(layer, head, *scores[layer, head]) for layer, head in places]
    return _csv(("layer", "head", *frame.header["scores"]), lines)


def _tensors(frame: Frame) -> dict[str, NDArray[Any]]:
    found = {tensor.name: tensor.data for tensor in unpack(frame)}
    if not found:
        raise FrameError("it has no tensors")
    return found


def _csv(names: Iterable[str], lines: Iterable[Iterable[Any]]) -> bytes:
    """Nine digits give every 32-bit float exactly."""
    rows = [",".join(names), *(",".join(map(_cell, line)) for line in lines)]
    return ("\n".join(rows) + "\n").encode()


def _cell(value: Any) -> str:  # noqa: ANN401
    return f"{value:.9g}" if isinstance(value, float | np.floating) else str(value)
