"""Frames SCOPE_ANALYSIS, from the parts that all ranks have computed of each chunk of a text."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from megatronapp_common.frames import Frame, FrameType
from megatronapp_common.scope.analysis_requests import (
    HEAD_SCORES,
    AnalysisRequest,
    AttributionRequest,
    HeadScoreRequest,
    LensRequest,
)
from megatronapp_common.scope.protocol import Tensor, build_frame
from megatronapp_trainer.scope.analysis.attribution import AttributionPart
from megatronapp_trainer.scope.analysis.head_scores import HeadSums
from megatronapp_trainer.scope.analysis.logit_lens import LensRows
from megatronapp_trainer.scope.capture.rank_shard import RankShard
from megatronapp_trainer.scope.coordinator import TextOf

Chunks = Sequence[list[Any]]
"""For each chunk of the text the parts of all ranks."""


def analysis_frame(body: AnalysisRequest, chunks: Chunks, shard: RankShard, text_of: TextOf | None) -> Frame:
    """Build the frame of an analysis. `shard`: of any rank, for the sizes of the model."""
    match body:
        case LensRequest():
            return lens_frame(body, chunks, text_of)
        case AttributionRequest():
            return attribution_frame(body, chunks, shard, text_of)
        case HeadScoreRequest():
            return head_frame(body, chunks, shard)


def lens_frame(body: LensRequest, chunks: Chunks, text_of: TextOf | None) -> Frame:
    """Build the frame of a lens."""
    parts: list[LensRows] = [part for ranks in chunks for part in ranks if part is not None]
    token, logprob, entropy, watched = (
        np.concatenate([getattr(part, name) for part in parts], axis=1)
        for name in ("token", "logprob", "entropy", "followed")
    )
    tensors = [
        Tensor("lens.id", "u32", token.astype("<u4")),
        Tensor("lens.logprob", "f32", logprob.astype("<f4")),
        Tensor("lens.entropy", "f32", entropy.astype("<f4")),
    ]
    for place, name in enumerate(("target", "token")[: watched.shape[2]]):
        tensors.append(Tensor(f"lens.{name}.rank", "i32", watched[:, :, place, 0].astype("<i4")))
        tensors.append(Tensor(f"lens.{name}.logprob", "f32", watched[:, :, place, 1].astype("<f4")))
    header = {"kind": body.kind, "rows": list(body.rows), "layers": list(body.layers), "token": body.token}
    known = [] if body.token is None else [body.token]
    return build_frame(
        FrameType.SCOPE_ANALYSIS, header | texts_of([*np.unique(token).tolist(), *known], text_of), tensors
    )


def attribution_frame(body: AttributionRequest, chunks: Chunks, shard: RankShard, text_of: TextOf | None) -> Frame:
    """Build the frame of an attribution; one chunk holds the row."""
    parts: list[AttributionPart] = [part for ranks in chunks for part in ranks]
    heads = np.zeros((shard.num_layers, shard.num_heads), "<f4")
    contributions = {name: np.zeros(shard.num_layers, "<f4") for name in ("attention_bias", "mlp", "mlp_bias")}
    neurons: dict[int, list[tuple[int, float, float]]] = {layer: [] for layer in range(shard.num_layers)}
    header: dict[str, Any] = {name: getattr(body, name) for name in ("kind", "row", "token", "against", "order")}
    for part in parts:
        for layer, found in part.layers.items():
            heads[layer, part.first_head : part.first_head + len(found.heads)] = found.heads
            neurons[layer] += found.neurons
            if part.is_first_of_tensor:
                for name, values in contributions.items():
                    values[layer] = getattr(found, name)
        for name in ("embedding", "constant", "logit"):
            if (value := getattr(part, name)) is not None:
                header[name] = value
    tensors = [Tensor("heads", "f32", heads), *(Tensor(name, "f32", values) for name, values in contributions.items())]
    column = 1 if body.order == "activation" else 2
    tensors += _neuron_tensors(list(neurons.values()), min(body.neurons, shard.ffn), column)
    named = [token for token in (body.token, body.against) if token is not None]
    return build_frame(FrameType.SCOPE_ANALYSIS, header | texts_of(named, text_of), tensors)


def _neuron_tensors(layers: Sequence[list[tuple[int, float, float]]], count: int, column: int) -> list[Tensor]:
    """Build tensors [L, count] of the strongest neurons of each layer, by the magnitude of a column."""
    table = np.zeros((len(layers), count, 3))
    for place, neurons in enumerate(layers):
        strongest = sorted(neurons, key=lambda neuron: -abs(neuron[column]))[:count]
        table[place] = np.array(strongest).reshape(count, 3)
    index, activation, contribution = np.moveaxis(table, -1, 0)
    return [
        Tensor("neuron.index", "u32", index.astype("<u4")),
        Tensor("neuron.activation", "f32", activation.astype("<f4")),
        Tensor("neuron.contribution", "f32", contribution.astype("<f4")),
    ]


def head_frame(body: HeadScoreRequest, chunks: Chunks, shard: RankShard) -> Frame:
    """Build the frame of scores of heads: means over the queries that have a score, NaN without any."""
    sums = np.zeros((shard.num_layers, shard.num_heads, len(HEAD_SCORES)))
    counts = np.zeros(len(HEAD_SCORES), dtype=np.int64)
    for ranks in chunks:
        parts: list[HeadSums] = ranks
        counts += parts[0].counts
        for part in parts:
            sums[slice(*part.layers), slice(*part.heads)] += part.sums
    with np.errstate(invalid="ignore"):
        means = np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)
    header = {"kind": body.kind, "scores": list(HEAD_SCORES), "counts": counts.tolist()}
    return build_frame(FrameType.SCOPE_ANALYSIS, header, [Tensor("scores", "f32", means.astype("<f4"))])


def texts_of(tokens: Iterable[int], text_of: TextOf | None) -> dict[str, Any]:
    """Return the fields of a header that give the text of each token, decoded alone."""
    if text_of is None:
        return {}
    found = sorted(set(map(int, tokens)))
    return {"tokens": found, "texts": list(map(text_of, found))}
