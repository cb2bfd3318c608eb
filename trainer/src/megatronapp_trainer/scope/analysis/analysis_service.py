"""Rank 0's side of analyses: turns them into requests of the engine, and their results into frames."""

import secrets
from collections.abc import Iterable
from typing import Any

import numpy as np

from megatronapp_common.frames import Frame, FrameType
from megatronapp_common.scope.analysis_requests import AnalysisRequest, LensRequest
from megatronapp_common.scope.protocol import Tensor, build_frame
from megatronapp_trainer.hooks.errors import CaptureError
from megatronapp_trainer.inference.engine import Engine
from megatronapp_trainer.inference.request import GenerationRequest
from megatronapp_trainer.scope.analysis.analyzer import RankAnalyzer
from megatronapp_trainer.scope.analysis.commands import TOPIC, BeginAnalysis, EndAnalysis
from megatronapp_trainer.scope.analysis.logit_lens import LensRows
from megatronapp_trainer.scope.capture.tracked_requests import request_id
from megatronapp_trainer.scope.coordinator import TextOf, perturbed_fields


class AnalysisService:
    """Analyses of one engine. From any thread; `frame` once the engine has reported the end of the request."""

    def __init__(self, engine: Engine, analyzer: RankAnalyzer) -> None:
        self._engine = engine
        self._analyzer = analyzer

    def begin(self, body: AnalysisRequest) -> tuple[str, GenerationRequest]:
        """Begin an analysis on all ranks; return its name, and the request that the caller submits to the engine.

        Raises CaptureError for a layer or token that the model does not have.
        """
        self._check(body)
        name = secrets.token_hex(6)
        self._engine.command(TOPIC, BeginAnalysis(name=name, request=body))
        request = GenerationRequest(
            id=request_id(name, 0),
            prompt=body.ids,
            max_new_tokens=0,
            temperature=0,
            is_background=True,
            **perturbed_fields(body.perturbation, 0),
        )
        return name, request

    def frame(self, name: str, body: AnalysisRequest, text_of: TextOf | None) -> Frame:
        """Build the frame SCOPE_ANALYSIS of an analysis whose text has been read."""
        return lens_frame(body, self._analyzer.results[name], text_of)

    def end(self, name: str) -> None:
        """Forget an analysis on all ranks."""
        self._engine.command(TOPIC, EndAnalysis(name=name))

    def _check(self, body: AnalysisRequest) -> None:
        shard = self._analyzer.shard
        for place, layer in enumerate(body.layers):
            if layer >= shard.num_layers:
                raise CaptureError(f"layers.{place}: there is no layer {layer}; the model has {shard.num_layers}")
        check_token("token", body.token, shard.vocabulary)


def check_token(name: str, token: int | None, vocabulary: int) -> None:
    """Raise CaptureError for a token that is not in the vocabulary."""
    if token is not None and token >= vocabulary:
        raise CaptureError(f"{name}: there is no token {token}; the vocabulary has {vocabulary}")


def lens_frame(body: LensRequest, chunks: Iterable[list[Any]], text_of: TextOf | None) -> Frame:
    """Build the frame of a lens. `chunks`: for each chunk of the text the parts of all ranks."""
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


def texts_of(tokens: Iterable[int], text_of: TextOf | None) -> dict[str, Any]:
    """Return the fields of a header that give the text of each token, decoded alone."""
    if text_of is None:
        return {}
    found = sorted(set(map(int, tokens)))
    return {"tokens": found, "texts": list(map(text_of, found))}
