"""Generated tokens are those of plain torch on the same weights, in every layout, batch and size of chunk."""

import pathlib
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from generating_ranks import (
    LAYOUTS,
    MORE_VARIANTS,
    VARIANTS,
    VOCABULARY,
    config_of,
    drain,
    expected,
    finish_of,
    generated,
    groups_of,
    model_of,
    open_engine,
    plain_of,
    prompts,
)
from plain_gpt import PlainGpt
from pytest_workers import FULL

from megatronapp_trainer.checkpoint.arguments import model_flags
from megatronapp_trainer.checkpoint.directory import CheckpointDirectory, read_manifest
from megatronapp_trainer.device.cuda_graphs import GraphCache
from megatronapp_trainer.hooks.forward_observer import StepContext
from megatronapp_trainer.inference.build import build_model, load_weights
from megatronapp_trainer.inference.request import GenerationRequest

pytestmark = pytest.mark.torch

RunRanks = Callable[..., list[Any]]
Answers = dict[str, dict[str, list[int]]]
"""Tokens by variant and request."""

TOLERANCE = 1e-4
SPLIT = VARIANTS | {"rotary-one-key-head": MORE_VARIANTS["rotary-one-key-head"]}
"""The last has fewer key heads than ranks: all hold the one."""
BOTH = ("learned-tied", "rotary-one-key-head", "rotary-tied-window")
"""Models for splits of tensors and layers at once: `make test-full` tests each split alone with all of them."""
BY_LAYOUT: dict[str, tuple[str, ...]] = (
    {"TP2": tuple(SPLIT), "PP2": tuple(SPLIT), "PP2-uneven": BOTH, "TP2xPP2": BOTH}
    if FULL
    else {
        "TP2": ("rotary-one-key-head",),  # the test of sequence parallelism generates with rotary-grouped
        "TP2xPP2": ("learned-untied", "rotary-tied-window"),
    }
)
SEQUENTIAL = {name: (VARIANTS | MORE_VARIANTS)[name] for name in ("rotary-tied-window", "half-rotary-local")}
"""Prompts that are read token by token take long."""
CHUNKED = VARIANTS | MORE_VARIANTS if FULL else SEQUENTIAL
LENGTHS = (3, 17, 9, 1, 30, 2)


def requests() -> list[GenerationRequest]:
    """More than there are slots: greedy, sampled, and sampled among few, of unequal length."""
    ways: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0, "max_new_tokens": 25},
        {"temperature": 1.3, "seed": 11},
        {"temperature": 0.8, "top_k": 7, "seed": 2**64 - 1},
        {"temperature": 1.0, "top_p": 0.7, "seed": 3},
        {"temperature": 2.0, "top_k": 20, "top_p": 0.9, "seed": 4},
    ]
    return [
        GenerationRequest(id=str(index), prompt=prompt, **({"max_new_tokens": 14} | way))
        for index, (prompt, way) in enumerate(zip(prompts(LENGTHS), ways, strict=True))
    ]


def generate(flags: str, variants: dict[str, str], chunks: tuple[int, ...]) -> list[Answers] | None:
    """Run on every rank of a layout; return the engine's answers for each size of chunk on rank 0 alone."""
    answers: list[Answers] = [{} for _ in chunks]
    with groups_of(flags) as (layout, device):
        for name, variant in variants.items():
            config = config_of(f"{flags} {variant}")
            for index, chunk in enumerate(chunks):
                model = model_of(config, layout, device)
                events = generate_with(model, config, layout, device, prefill_chunk=chunk)
                if events is not None:
                    answers[index][name] = events
    return answers if layout.rank == 0 else None


def generate_with(model: Any, config: Any, layout: Any, device: Any, **options: Any) -> dict[str, list[int]] | None:
    """Tokens by request, on rank 0."""
    gang, engine = open_engine(model, config, layout, device, **options)
    if engine is None:
        gang.follow()
        return None
    engine.warm_up()
    for request in requests():
        engine.submit(request)
    events = drain(engine)
    engine.close()
    assert all(finish_of(events, request.id).reason == "length" for request in requests())
    return {request.id: generated(events, request.id) for request in requests()}


class Replays:
    """Fake of CUDA graphs: a captured graph never changes, and reports when it is released."""

    def __init__(self) -> None:
        self.values: list[weakref.ref[Any]] = []

    def __call__(self, compute: Callable[[], Any], pool: Any) -> tuple[Callable[[], None], Any, Any]:
        def replay() -> None:
            """Do nothing in place of a replay."""

        self.values.append(weakref.ref(replay))
        return replay, compute(), pool

    @property
    def alive(self) -> int:
        return sum(reference() is not None for reference in self.values)


def let_go() -> tuple[int, int]:
    """Return on every rank how many graphs there are while it generates, and when its gang has closed."""
    with groups_of("--tensor-model-parallel-size 2") as (layout, device):
        config = config_of(f"--tensor-model-parallel-size 2 {VARIANTS['learned-tied']}")
        gang, engine = open_engine(model_of(config, layout, device), config, layout, device)
        replays = Replays()
        gang.runner._graphs = GraphCache(enabled=True, capture=replays)
        if engine is None:
            gang.follow()
        else:
            engine.submit(*requests())
            drain(engine)
            engine.close()
        return len(replays.values), replays.alive


def test_graphs_are_let_go_before_communicators_end(run_ranks: RunRanks) -> None:
    """Check the order, as NCCL waits for graphs."""
    first, second = run_ranks(2, let_go)
    assert first == second
    assert first[0] > 0
    assert first[1] == 0


def expectations(variants: dict[str, str], answers: Answers) -> list[str]:
    """Alone: where these answers are not those of plain torch."""
    wrong = []
    with groups_of("") as (layout, device):
        for name, variant in variants.items():
            config = config_of(variant)
            plain = plain_of(model_of(config, layout, device), config)
            wrong += [f"{name}, {text}" for text in differences(plain, answers[name])]
    return wrong


def differences(plain: PlainGpt, generated_tokens: dict[str, list[int]]) -> list[str]:
    """Tokens that plain torch would not have taken, but for those it was undecided about."""
    wrong = []
    for request in requests():
        tokens = generated_tokens[request.id]
        assert len(tokens) == request.max_new_tokens
        for place, (token, margin) in enumerate(expected(plain, request, tokens)):
            if token != tokens[place] and margin > TOLERANCE:
                wrong.append(f"request {request.id}, token {place}: {tokens[place]}, plain torch {token}")
    return wrong


@pytest.fixture(scope="module")
def alone(run_ranks: RunRanks) -> Answers:
    """One process, with prompts read at once."""
    answers: Answers = run_ranks(1, generate, "", VARIANTS | MORE_VARIANTS, (64,))[0][0]
    return answers


def test_a_single_process_generates_what_plain_torch_does(run_ranks: RunRanks, alone: Answers) -> None:
    (wrong,) = run_ranks(1, expectations, VARIANTS | MORE_VARIANTS, alone)
    assert wrong == []


def test_sizes_of_chunks_change_nothing(run_ranks: RunRanks, alone: Answers) -> None:
    for chunk, variants in ((5, CHUNKED), (1, SEQUENTIAL)):
        ((tokens,),) = run_ranks(1, generate, "", variants, (chunk,))
        assert tokens == {name: alone[name] for name in variants}


def test_answers_differ_between_requests_and_models(alone: Answers) -> None:
    token_lists = [tuple(tokens) for model in alone.values() for tokens in model.values()]
    assert len(set(token_lists)) == len(token_lists)


@pytest.mark.parametrize("layout", BY_LAYOUT)
def test_all_layouts_generate_the_same_tokens(run_ranks: RunRanks, alone: Answers, layout: str) -> None:
    (world, flags), variants = LAYOUTS[layout], {name: SPLIT[name] for name in BY_LAYOUT[layout]}
    answers = run_ranks(world, generate, flags, variants, (16,))[0][0]
    if any(answers[name] != alone[name] for name in variants):  # but for ties within rounding
        (wrong,) = run_ranks(1, expectations, variants, answers)
        assert wrong == []


class Reader:
    """Reader of a stage's input until the next step begins, as MegaScope reads it on a GPU."""

    def __init__(self, stage: Any) -> None:
        self.unchanged: list[bool] = []
        self._stage = stage
        self._seen: tuple[torch.Tensor, torch.Tensor] | None = None

    def step_begin(self, _context: StepContext) -> str:
        if self._seen is not None:
            self.unchanged.append(torch.equal(*self._seen))
        return "all"

    def collect(self) -> None:
        """Collect nothing; only the buffer is read."""

    def step_end(self, _result: object) -> None:
        buffers = list(self._stage._transfer.buffers.values())
        self._seen = (buffers[-1], buffers[-1].clone()) if buffers else None

    def settle(self) -> None:
        pass

    def forget(self, _read: object) -> None:
        """Do nothing, as there are no graphs."""


def read_between_steps(flags: str) -> list[bool]:
    with groups_of(flags) as (layout, device):
        config = config_of(flags)
        gang, engine = open_engine(model_of(config, layout, device), config, layout, device)
        reader = Reader(gang.runner)
        gang.runner.observer = reader
        if engine is None:
            gang.follow()
        else:
            engine.submit(requests()[0])
            drain(engine)
            engine.close()
    return reader.unchanged


def test_the_next_step_waits_until_the_readers_of_the_last_step_finish(run_ranks: RunRanks) -> None:
    world, flags = LAYOUTS["PP2"]
    _, second = run_ranks(world, read_between_steps, flags)
    assert (len(second) > 8, all(second)) == (True, True)


def train(flags: str) -> None:
    """Train for a step, and save the checkpoint."""
    from megatronapp_trainer.checkpoint.manager import CheckpointManager
    from megatronapp_trainer.device import prepare_device
    from megatronapp_trainer.parallel.groups import destroy_groups, initialize_groups
    from megatronapp_trainer.training.build import build_iterators, build_run, build_schedule, layout_of, vocab_size_of
    from megatronapp_trainer.training.loop import Trainer
    from megatronapp_trainer.training.signals import StopRequest

    config = config_of(flags)
    layout = layout_of(config)
    device = prepare_device(layout.local_rank)
    initialize_groups(config, layout, device)
    run = build_run(config, layout, device, vocab_size=vocab_size_of(config))
    manager = CheckpointManager(config, layout)
    Trainer(
        run, build_iterators(config, layout, 0), build_schedule(run), stop_request=StopRequest(), checkpoints=manager
    ).train()
    destroy_groups()


def generate_from(load: str, flags: str) -> tuple[dict[str, list[int]] | None, list[str]]:
    """Tokens of a checkpoint's model, on rank 0; alone, also where plain torch differs."""
    newest, *_ = CheckpointDirectory(pathlib.Path(load)).checkpoints()
    config = config_of(f"{' '.join(model_flags(read_manifest(newest).arguments))} {flags}")
    with groups_of(flags) as (layout, device):
        model = model_of(config, layout, device, pathlib.Path(load))
        if layout.world_size == 1:
            same_as_drawn(model, config, layout, device, load)
        plain = plain_of(model, config) if layout.world_size == 1 else None
        events = generate_with(model, config, layout, device)
    return events, [] if plain is None or events is None else differences(plain, events)


def same_as_drawn(model: Any, config: Any, layout: Any, device: Any, load: str) -> None:
    """A model that had no weights before has those of one that had."""
    drawn = build_model(config, layout, device, vocab_size=VOCABULARY)
    load_weights(drawn, config, pathlib.Path(load))
    pairs = zip(model.named_parameters(), drawn.named_parameters(), strict=True)
    assert all(name == other and torch.equal(first, second) for (name, first), (other, second) in pairs)


@pytest.mark.full("trains, saves and loads; test_generate_layouts[TP2] generates alike")
def test_a_checkpoint_trained_with_sequence_parallelism(run_ranks: RunRanks, tmp_path: pathlib.Path) -> None:
    """Train at TP2 with slices of the sequence; generate at TP2 and alone, from what the manifest says."""
    two = LAYOUTS["TP2"][1]
    variant = VARIANTS["rotary-grouped"]
    steps = "--train-iters 1 --eval-iters 0"
    run_ranks(2, train, f"{variant} {two} --sequence-parallel {steps} --save {tmp_path}")
    tokens, wrong = run_ranks(1, generate_from, str(tmp_path), "")[0]
    assert wrong == []
    assert run_ranks(2, generate_from, str(tmp_path), two)[0][0] == tokens
