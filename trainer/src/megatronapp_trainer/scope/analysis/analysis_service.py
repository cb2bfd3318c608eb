"""Rank 0's side of analyses: turns them into requests of the engine, and their results into frames."""

import secrets

from megatronapp_common.frames import Frame
from megatronapp_common.scope.analysis_requests import (
    AnalysisRequest,
    AttributionRequest,
    HeadScoreRequest,
    LensRequest,
)
from megatronapp_trainer.hooks.errors import CaptureError
from megatronapp_trainer.inference.engine import Engine
from megatronapp_trainer.inference.errors import AnalysisMemoryError
from megatronapp_trainer.inference.request import GenerationRequest
from megatronapp_trainer.scope.analysis.analysis_frames import analysis_frame
from megatronapp_trainer.scope.analysis.analyzer import RankAnalyzer
from megatronapp_trainer.scope.analysis.commands import TOPIC, BeginAnalysis, EndAnalysis
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
            **perturbed_fields(body.perturbation if isinstance(body, LensRequest) else None, 0),
        )
        return name, request

    def frame(self, name: str, body: AnalysisRequest, text_of: TextOf | None) -> Frame:
        """Build the frame SCOPE_ANALYSIS of an analysis whose text has been read.

        Raises AnalysisMemoryError if a rank lacked memory for it.
        """
        if name in self._analyzer.out_of_memory:
            raise AnalysisMemoryError("a rank has too little free memory for this analysis")
        return analysis_frame(body, self._analyzer.results[name], self._analyzer.shard, text_of)

    def end(self, name: str) -> None:
        """Forget an analysis on all ranks."""
        self._engine.command(TOPIC, EndAnalysis(name=name))

    def _check(self, body: AnalysisRequest) -> None:
        shard = self._analyzer.shard
        if isinstance(body, HeadScoreRequest):
            return
        check_token("token", body.token, shard.vocabulary)
        if isinstance(body, AttributionRequest):
            check_token("against", body.against, shard.vocabulary)
            return
        for place, layer in enumerate(body.layers):
            if layer >= shard.num_layers:
                raise CaptureError(f"layers.{place}: there is no layer {layer}; the model has {shard.num_layers}")


def check_token(name: str, token: int | None, vocabulary: int) -> None:
    """Raise CaptureError for a token that is not in the vocabulary."""
    if token is not None and token >= vocabulary:
        raise CaptureError(f"{name}: there is no token {token}; the vocabulary has {vocabulary}")
