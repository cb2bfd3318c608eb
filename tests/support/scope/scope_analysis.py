"""Analyses of the tiny model, as rank 0 answers them."""

from typing import Any

import numpy as np
import scope_session
from numpy.typing import NDArray

from megatronapp_common.frames import Frame, FrameType
from megatronapp_common.scope.analysis_requests import (
    HEAD_SCORES,
    AttributionRequest,
    HeadScoreRequest,
    LensRequest,
)
from megatronapp_common.scope.protocol import Tensor, build_frame


def analysis_frame(recording: scope_session.Recording, document: dict[str, Any]) -> Frame:
    """Return the frame SCOPE_ANALYSIS of a request."""
    if document["kind"] == "lens":
        return _lens(recording, LensRequest.model_validate(document))
    if document["kind"] == "heads":
        return _heads(recording, HeadScoreRequest.model_validate(document))
    return _attribution(recording, AttributionRequest.model_validate(document))


def _heads(recording: scope_session.Recording, body: HeadScoreRequest) -> Frame:
    """Scores that say where they belong: score, layer and head as digits. Those of the ranks are tested there."""
    shape = recording.shape
    places = np.indices((shape.layers, shape.heads, len(HEAD_SCORES)))
    values = places[0] / 10 + places[1] / 100 + places[2] / 1000
    header = {"kind": "heads", "scores": list(HEAD_SCORES), "counts": [len(body.ids) - 1, len(body.ids) - 1, 3, 2]}
    return build_frame(FrameType.SCOPE_ANALYSIS, header, [Tensor("scores", "f32", values.astype("<f4"))])


def _attribution(recording: scope_session.Recording, body: AttributionRequest) -> Frame:
    """Contributions of layers that are true as a sum, of which the heads of a layer have equal parts."""
    sample = _sample_of(recording, list(body.ids))
    sites = {name: values[body.row].astype(np.float64) for name, values in recording.sites[sample].items()
             if name in {"embedding", "attention_output", "mlp2", "residual", "logits"}}  # fmt: skip
    final = recording.sites[sample]["final_norm"].astype(np.float64)
    unembedding = np.linalg.lstsq(final, recording.sites[sample]["logits"].astype(np.float64), rcond=None)[0]
    direction = unembedding[:, body.token] / np.sqrt((sites["residual"][-1] ** 2).mean() + 1e-5)
    shape, zeros = recording.shape, np.zeros(recording.shape.layers, "<f4")
    heads = np.repeat((sites["attention_output"] @ direction)[:, None] / shape.heads, shape.heads, axis=1)
    header = {"kind": "attribution", "row": body.row, "token": body.token, "against": body.against}
    header |= {"embedding": float(sites["embedding"] @ direction), "constant": 0.0}
    header |= {"logit": float(sites["logits"][body.token]), "order": body.order}
    index = np.tile(np.arange(body.neurons, dtype="<u4"), (shape.layers, 1))
    tensors = [
        Tensor("heads", "f32", heads.astype("<f4")),
        Tensor("attention_bias", "f32", zeros),
        Tensor("mlp", "f32", (sites["mlp2"] @ direction).astype("<f4")),
        Tensor("mlp_bias", "f32", zeros),
        Tensor("neuron.index", "u32", index),
        Tensor("neuron.activation", "f32", index.astype("<f4")),
        Tensor("neuron.contribution", "f32", -index.astype("<f4")),
    ]
    texts = {"tokens": [body.token], "texts": [scope_session.text_of(body.token)]}
    return build_frame(FrameType.SCOPE_ANALYSIS, header | texts, tensors)


def recorded_lens(recording: scope_session.Recording, sample: int, token: int | None = None) -> Frame:
    """Return the lens of all rows that were read, as the page asks for it, in the form of a session file."""
    ids = recording.prompts[sample] + recording.generated[sample]
    layers = list(range(recording.shape.layers))
    request = {"kind": "lens", "rows": [0, len(ids) - 1], "layers": layers, "top": 10, "token": token}
    return recorded(recording, sample, request, ids)


def recorded(recording: scope_session.Recording, sample: int, request: dict[str, Any], ids: list[int]) -> Frame:
    """Return an analysis in the form of a session file."""
    frame = analysis_frame(recording, request | {"ids": ids})
    place = {"run": scope_session.RUN, "sample": sample, "request": request, "count": len(ids)}
    return Frame(frame.type, {**frame.header, **place}, frame.body)


def lens_logs(recording: scope_session.Recording, sample: int) -> NDArray[Any]:
    """Return log-probabilities [rows, layers, vocabulary] of every residual through norm and unembedding."""
    residual = recording.sites[sample]["residual"].astype(np.float64)
    normed = residual / np.sqrt((residual**2).mean(-1, keepdims=True) + 1e-5)
    # The tiny model's unembedding is its embedding, which the logits of its final norm show.
    final, logits = recording.sites[sample]["final_norm"], recording.sites[sample]["logits"]
    unembedding = np.linalg.lstsq(final.astype(np.float64), logits.astype(np.float64), rcond=None)[0]
    found = normed @ unembedding
    return np.asarray(found - np.log(np.exp(found).sum(-1, keepdims=True)))


def _sample_of(recording: scope_session.Recording, ids: list[int]) -> int:
    texts = [prompt + generated for prompt, generated in zip(recording.prompts, recording.generated, strict=True)]
    return next(sample for sample, text in enumerate(texts) if text[: len(ids)] == ids)


def _lens(recording: scope_session.Recording, body: LensRequest) -> Frame:
    ids = list(body.ids)
    first, end = body.rows
    logs = lens_logs(recording, _sample_of(recording, ids))[first:end, list(body.layers)].transpose(1, 0, 2)
    best = np.argsort(-logs, axis=-1, kind="stable")[..., : body.top]
    tensors = [
        Tensor("lens.id", "u32", best.astype("<u4")),
        Tensor("lens.logprob", "f32", np.take_along_axis(logs, best, -1).astype("<f4")),
        Tensor("lens.entropy", "f32", -(np.exp(logs) * logs).sum(-1).astype("<f4")),
    ]
    following = [*ids[first + 1 : end + 1], *[-1] * (end - len(ids) + 1)]
    watched = {"target": following} | ({} if body.token is None else {"token": [body.token] * (end - first)})
    for name, tokens in watched.items():
        known = np.array(tokens) >= 0
        mine = np.take_along_axis(logs, np.array(tokens).clip(0)[None, :, None], -1)
        rank, logprob = (logs > mine).sum(-1), mine[..., 0]
        tensors.append(Tensor(f"lens.{name}.rank", "i32", np.where(known, rank, -1).astype("<i4")))
        tensors.append(Tensor(f"lens.{name}.logprob", "f32", np.where(known, logprob, np.nan).astype("<f4")))
    named = sorted(set(best.reshape(-1).tolist()))
    header = {"kind": "lens", "rows": [first, end], "layers": list(body.layers), "token": body.token}
    texts = [scope_session.text_of(token) for token in named]
    return build_frame(FrameType.SCOPE_ANALYSIS, header | {"tokens": named, "texts": texts}, tensors)
