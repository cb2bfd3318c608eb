"""Ranks that analyze texts, for tests: the frames of rank 0, and what plain torch computes."""

from typing import Any

import pytest
import torch
from generating_ranks import VARIANTS, config_of, drain, groups_of, model_of, open_engine, plain_of, prompts
from plain_sites import SeenGpt

from megatronapp_common.frames import decode, encode
from megatronapp_common.scope.protocol import unpack
from megatronapp_trainer.inference.errors import AnalysisMemoryError
from megatronapp_trainer.inference.events import TokenEvent
from megatronapp_trainer.inference.request import GenerationRequest
from megatronapp_trainer.scope.analysis import analyzer as analyzer_module
from megatronapp_trainer.scope.analysis.analysis_service import AnalysisService
from megatronapp_trainer.scope.analysis.analyzer import RankAnalyzer


def text() -> list[int]:
    """A text that is read in several chunks of 16 tokens."""
    return list(prompts((37,))[0])


def prompt_of_other() -> tuple[int, ...]:
    """Return the prompt of the request that generates in the same steps."""
    return prompts((9,))[0]


REPLICATED = ("linear_proj.bias", "linear_fc2.bias", "final_layernorm.bias", "final_layernorm.weight")


def with_biases(model: Any) -> Any:
    """Give a model biases and a norm that are not those of its initialisation, which are zero and one."""
    for name, parameter in model.named_parameters():
        if name.endswith(REPLICATED):
            parameter.copy_(torch.linspace(-0.5, 1.5, parameter.numel()).roll(len(name)))
    return model


def analyze(flags: str, variants: dict[str, str], bodies: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """On rank 0: the tensors and headers of each request, by variant, and the tokens generated meanwhile."""
    out = {}
    with groups_of(flags) as (layout, device):
        for name, variant in variants.items():
            config = config_of(f"{flags} {variant}")
            out[name] = _analyze_single(with_biases(model_of(config, layout, device)), config, layout, device, bodies)
    return out


def _analyze_single(model: Any, config: Any, layout: Any, device: Any, bodies: dict[str, Any]) -> dict[str, Any]:
    gang, engine = open_engine(model, config, layout, device)
    analyzer = RankAnalyzer(gang)
    analyzer.attach(gang)
    if engine is None:
        gang.follow()
        return {}
    service = AnalysisService(engine, analyzer)
    # One that generates in the same steps must neither change nor be changed.
    engine.submit(
        GenerationRequest(id="plain", prompt=prompt_of_other(), max_new_tokens=6, temperature=0, candidates=5)
    )
    names = {}
    for key, body in bodies.items():
        names[key], request = service.begin(body)
        engine.submit(request)
    events = drain(engine)
    out: dict[str, Any] = {}
    for key, name in names.items():
        frame = decode(encode(service.frame(name, bodies[key], lambda token: f"<{token}>")))
        out[key] = dict(frame.header), {tensor.name: tensor.data.copy() for tensor in unpack(frame)}
        service.end(name)
    engine.step()
    assert analyzer.results == {}
    assert not any(module._forward_hooks for module in gang.runner.model.modules())
    engine.close()
    tokens = [event for event in events if isinstance(event, TokenEvent)]
    out["tokens"] = [event.token for event in tokens]
    out["candidates"] = [(candidate.token, candidate.logprob) for candidate in tokens[0].candidates]
    return out


def without_memory(flags: str, body: Any) -> list[list[int]]:
    """Let the last rank lack memory for the first of two analyses; tokens of a request and chunks of the second."""
    with groups_of(flags) as (layout, device):
        config = config_of(f"{flags} {VARIANTS['rotary-grouped']}")
        gang, engine = open_engine(model_of(config, layout, device), config, layout, device)
        analyzer = RankAnalyzer(gang)
        analyzer.attach(gang)
        if layout.rank == layout.world_size - 1:
            reserves = iter([None])
            reserve, analyzer_module.reserve = analyzer_module.reserve, lambda *size: next(reserves, reserve(*size))
        if engine is None:
            gang.follow()
            return []
        service = AnalysisService(engine, analyzer)
        engine.submit(GenerationRequest(id="plain", prompt=prompt_of_other(), max_new_tokens=6, temperature=0))
        (first, text), (second, again) = service.begin(body), service.begin(body)
        engine.submit(text)
        events = drain(engine)
        with pytest.raises(AnalysisMemoryError, match="a rank has too little free memory"):
            service.frame(first, body, None)
        engine.submit(again)
        drain(engine)
        chunks = [len(parts) for parts in analyzer.results[second]]
        assert analyzer.results[first] == []
        service.frame(second, body, None)
        engine.close()
        return [[event.token for event in events if isinstance(event, TokenEvent)], chunks]


def plain(variants: dict[str, str]) -> dict[str, SeenGpt]:
    """Alone: the models in plain torch, by variant."""
    out = {}
    with groups_of("") as (layout, device):
        for name, variant in variants.items():
            config = config_of(variant)
            whole = plain_of(with_biases(model_of(config, layout, device)), config)
            out[name] = SeenGpt(whole._weights, whole._shape)
    return out
