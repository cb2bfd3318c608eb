"""Needs of the model families: a window, GELU by tanh, long rotary contexts; and their fields in manifests."""

import json
import math
import pathlib
import warnings
from collections.abc import Callable
from typing import Any

import pytest
from recording_reporter import RecordingReporter

from megatronapp_trainer.checkpoint import arguments
from megatronapp_trainer.config import ModelConfig, parse
from megatronapp_trainer.errors import UsageError

RunRanks = Callable[..., list[Any]]

MODEL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 2 "
    "--global-batch-size 4 --train-iters 4 --lr 2e-3 --lr-decay-style constant --mock-data "
    "--vocab-size 120 --attention-dropout 0 --hidden-dropout 0 --eval-iters 0"
)
WINDOW = "--window-size 7,0"
ROPE = f"--position-embedding-type rope --rotary-base 5e5 --use-rope-scaling --rope-scaling-factor 32 {WINDOW}"
TANH = f"--openai-gelu {WINDOW}"
TP2 = "--tensor-model-parallel-size 2"


def train(*runs: str) -> list[list[float] | None]:
    """Losses of several runs in one process each after the other."""
    warnings.simplefilter("ignore")
    from megatronapp_trainer.device import prepare_device
    from megatronapp_trainer.parallel.groups import destroy_groups, initialize_groups
    from megatronapp_trainer.training.build import build_iterators, build_run, build_schedule, layout_of, vocab_size_of
    from megatronapp_trainer.training.loop import Trainer
    from megatronapp_trainer.training.signals import StopRequest

    losses: list[list[float] | None] = []
    for index, flags in enumerate(runs):
        config = parse(f"{MODEL} {flags}".split())
        layout = layout_of(config)
        device = prepare_device(layout.local_rank)
        if index == 0:
            initialize_groups(config, layout, device)
        run = build_run(config, layout, device, vocab_size=vocab_size_of(config))
        recorder: Any = RecordingReporter() if layout.is_reporter else None
        Trainer(
            run, build_iterators(config, layout, 0), build_schedule(run), stop_request=StopRequest(), reporter=recorder
        ).train()
        losses.append(None if recorder is None else recorder.losses)
    destroy_groups()
    return losses


@pytest.mark.torch
def test_training_with_the_flags_is_alike_in_every_layer_kind_and_layout(run_ranks: RunRanks) -> None:
    variants = ("", WINDOW, TANH, ROPE, "--window-size 31,0")
    (alone,) = run_ranks(1, train, *variants, *(f"{flags} --transformer-impl local" for flags in variants))
    torch_layers, local_layers = alone[: len(variants)], alone[len(variants) :]
    for ours, theirs in zip(torch_layers, local_layers, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)
    plain, *others, wide = torch_layers
    assert wide == plain  # a window that covers the sequence changes nothing, to the last bit
    for losses in others:
        assert not math.isclose(losses[1], plain[1], rel_tol=1e-6)
    assert all(losses[-1] < losses[0] for losses in torch_layers)

    split = run_ranks(2, train, f"{TANH} {TP2}", f"{ROPE} {TP2}", f"{ROPE} {TP2} --sequence-parallel")
    (tanh, rope, sequence) = next(result for result in split if result[0] is not None)
    assert tanh == pytest.approx(torch_layers[2], rel=1e-5)
    assert rope == pytest.approx(torch_layers[3], rel=1e-5)
    assert sequence == pytest.approx(torch_layers[3], rel=1e-5)


def masks() -> list[list[list[bool]]]:
    """Attention weights above zero, for each key, under a window of two before, with and without a mask."""
    import torch

    from megatronapp_trainer.models.masks import causal_mask

    device = torch.device("cpu")
    return [causal_mask(5, device, window=window).tolist() for window in (None, (2, 0))]


@pytest.mark.torch
def test_a_window_hides_what_lies_further_back(run_ranks: RunRanks) -> None:
    ((causal, window),) = run_ranks(1, masks)
    for query in range(5):
        assert [not hidden for hidden in causal[query]] == [key <= query for key in range(5)]
        assert [not hidden for hidden in window[query]] == [query - 2 <= key <= query for key in range(5)]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--window-size 4,1", "never looks ahead"),
        ("--window-size four", "write --window-size 1023,0"),
        ("--openai-gelu --swiglu", "give one"),
        ("--use-rope-scaling", "needs --position-embedding-type rope"),
        ("--position-embedding-type rope --rope-scaling-factor 0", "--rope-scaling-factor must be above 0"),
        ("--rotary-base -1", "--rotary-base must be above 0"),
        ("--qk-layernorm --transformer-impl transformer_engine", "write torch or local"),
        ("--qk-layernorm --model-type bert", "--qk-layernorm is not supported with --model-type bert"),
        ("--qk-layernorm --forward-backward-disaggregating", "cannot be combined yet; leave one of them out"),
    ],
)
def test_what_cannot_work_is_refused(flags: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse(f"{MODEL} {flags}".split())


@pytest.mark.parametrize("spelling", ["7,0", "(7, 0)", "(7,0)"])
def test_a_window_is_written_as_megatron_writes_it(spelling: str) -> None:
    config = parse([*MODEL.split(), "--window-size", spelling])
    assert config.model.window == (7, 0)
    assert config.model.attention_window == 7
    assert parse([*MODEL.split(), "--window-size=-1,0"]).model.attention_window is None


@pytest.mark.parametrize(
    "flags",
    [
        "",
        ROPE,
        f"{TANH} --max-position-embeddings 64",
        "--group-query-attention --num-query-groups 2 --swiglu --normalization RMSNorm --disable-bias-linear "
        "--add-qkv-bias --kv-channels 32 --untie-embeddings-and-output-weights --norm-epsilon 1e-6 --qk-layernorm",
    ],
)
def test_a_manifest_gives_back_its_model(tmp_path: pathlib.Path, flags: str) -> None:
    config = parse(f"{MODEL} {flags}".split())
    stored = json.loads(json.dumps(arguments.record(config)))
    again = arguments.model_of(stored)
    rebuilt = parse([*MODEL.split(), *arguments.model_flags(stored)])
    assert arguments.record(rebuilt) == stored
    assert isinstance(again, ModelConfig)
    assert (again.heads_of_keys, again.head_width, again.mlp_width, again.attention_window, again.rotary_base) == (
        config.model.heads_of_keys,
        config.model.head_width,
        config.model.mlp_width,
        config.model.attention_window,
        config.model.rotary_base,
    )
