"""Ranks that generate, for tests: models by their flags, the engine, and what it should have said."""

import contextlib
import math
import pathlib
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from plain_gpt import PlainGpt, PlainGptShape

from megatronapp_trainer.config import TrainerConfig, parse
from megatronapp_trainer.device import Device, prepare_device
from megatronapp_trainer.inference.build import build_model, generation_layout, load_weights, open_worker_group
from megatronapp_trainer.inference.engine import Engine
from megatronapp_trainer.inference.events import Event, FinishedEvent, PromptEvent, TokenEvent
from megatronapp_trainer.inference.model.sampling import gumbel_noise, noise_keys
from megatronapp_trainer.inference.model_runner import RunnerOptions
from megatronapp_trainer.inference.request import GenerationRequest
from megatronapp_trainer.inference.worker_group import WorkerGroup
from megatronapp_trainer.parallel.groups import destroy_groups, initialize_groups
from megatronapp_trainer.parallel.layout import Layout

VOCABULARY = 120
BASE = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --micro-batch-size 1 --mock-data "
    f"--global-batch-size 1 --train-iters 1 --lr 1e-3 --vocab-size {VOCABULARY} --init-method-std 0.2"
)
ROTARY = "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear"
VARIANTS = {
    "learned-tied": "",
    "learned-untied": "--untie-embeddings-and-output-weights",
    "rotary-grouped": f"{ROTARY} --group-query-attention --num-query-groups 2 --untie-embeddings-and-output-weights",
    "rotary-tied-window": f"{ROTARY} --group-query-attention --num-query-groups 2 --window-size 9,0 --add-qkv-bias",
}
MORE_VARIANTS = {
    "rotary-one-key-head": (f"{ROTARY} --group-query-attention --num-query-groups 1 --kv-channels 32 --qk-layernorm"),
    "half-rotary-local": (
        "--position-embedding-type rope --rotary-percent 0.5 --transformer-impl local --qk-layernorm"
    ),
}
LAYOUTS = {
    "alone": (1, ""),
    "TP2": (2, "--tensor-model-parallel-size 2"),
    "PP2": (2, "--pipeline-model-parallel-size 2"),
    "PP2-uneven": (2, "--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 3"),
    "TP2xPP2": (4, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"),
}


def prompts(lengths: Sequence[int]) -> list[tuple[int, ...]]:
    """Prompts of these lengths, the same in every process."""
    source = torch.Generator().manual_seed(5)
    return [tuple(torch.randint(0, VOCABULARY, (length,), generator=source).tolist()) for length in lengths]


def config_of(flags: str) -> TrainerConfig:
    return parse(f"{BASE} {flags}".split())


@contextlib.contextmanager
def groups_of(flags: str) -> Iterator[tuple[Layout, Device]]:
    """The layout that the flags say, with its groups; models of any kind fit into them."""
    warnings.simplefilter("ignore")
    config = config_of(flags)
    layout = generation_layout(config)
    device = prepare_device(layout.local_rank)
    initialize_groups(config, layout, device)
    yield layout, device
    destroy_groups()


def model_of(config: TrainerConfig, layout: Layout, device: Device, load: pathlib.Path | None = None) -> Any:
    model = build_model(config, layout, device, vocab_size=VOCABULARY, drawn=load is None)
    if load is not None:
        load_weights(model, config, load)
    return model


def open_engine(
    model: Any, config: TrainerConfig, layout: Layout, device: Device, **options: Any
) -> tuple[WorkerGroup, Engine | None]:
    """The gang, and on rank 0 its engine."""
    options = {"slots": 4, "capacity": 64, "prefill_chunk": 16, "async_scheduling": True} | options
    gang = open_worker_group(model, config, layout, device, RunnerOptions(**options), vocab_size=VOCABULARY)
    return gang, Engine(gang) if layout.rank == 0 else None


def drain(engine: Engine) -> list[Event]:
    """Step until nothing is open."""
    events: list[Event] = []
    while engine.is_busy:
        events += engine.step()
    return events


def generated(events: list[Event], request_id: str) -> list[int]:
    """Tokens of one request."""
    return [event.token for event in events if isinstance(event, TokenEvent) and event.request_id == request_id]


def finish_of(events: list[Event], request_id: str) -> FinishedEvent:
    """Return how one request ended; it must end once."""
    (end,) = [end for end in events if isinstance(end, FinishedEvent) and end.request_id == request_id]
    return end


def prompt_events(events: list[Event], request_id: str) -> list[PromptEvent]:
    return [event for event in events if isinstance(event, PromptEvent) and event.request_id == request_id]


def plain_of(model: Any, config: TrainerConfig) -> PlainGpt:
    """The same weights without megatron-core; the model must be whole."""
    shape = config.model
    return PlainGpt(
        dict(model.state_dict()),
        PlainGptShape(
            layers=shape.num_layers,
            heads=shape.num_attention_heads,
            key_heads=shape.heads_of_keys,
            channels=shape.head_width,
            vocab_size=VOCABULARY,
            eps=shape.norm_epsilon,
            rotary_base=shape.rotary_base if shape.position_embedding_type == "rope" else None,
            rotary_channels=int(shape.head_width * shape.rotary_percent),
            window=shape.attention_window,
            swiglu=shape.swiglu,
            rms=shape.normalization == "RMSNorm",
            head_norms=shape.qk_layernorm,
        ),
    )


def expected(plain: PlainGpt, request: GenerationRequest, tokens: list[int]) -> list[tuple[int, float]]:
    """For each generated token: the one that plain torch would have taken after those before it, and by what margin."""
    logits = plain.logits([*request.prompt, *tokens])
    first = len(request.prompt)
    return [choice(logits[place - 1].tolist(), request, place) for place in range(first, first + len(tokens))]


def choice(logits: list[float], request: GenerationRequest, position: int) -> tuple[int, float]:
    """The token for a position by the written rule, and how far ahead of the next one it is."""
    if request.temperature == 0:
        return _best(dict(enumerate(logits)))
    filtered = _filtered([value / request.temperature for value in logits], request.top_k, request.top_p)
    keys = torch.tensor([noise_keys(request.seed, position)])
    noise = gumbel_noise(keys, len(logits))[0].tolist()
    return _best({token: value + noise[token] for token, value in filtered.items()})


def _filtered(scaled: list[float], top_k: int, top_p: float) -> dict[int, float]:
    order = sorted(range(len(scaled)), key=lambda token: -scaled[token])
    order = order[: top_k or len(order)]
    weights = [math.exp(scaled[token] - scaled[order[0]]) for token in order]
    remaining, mass = {}, 0.0
    for token, weight in zip(order, weights, strict=True):
        if mass / math.fsum(weights) >= top_p:
            break
        remaining[token] = scaled[token]
        mass += weight
    return remaining


def _best(scores: dict[int, float]) -> tuple[int, float]:
    first, *others = sorted(scores, key=lambda token: -scores[token])
    return first, scores[first] - scores[others[0]] if others else math.inf
