"""Generation and capture on devices: tokens of plain PyTorch, in every layout, captured or not, graphs or not."""

import pathlib
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from generating_ranks import (
    VARIANTS,
    config_of,
    drain,
    generated,
    groups_of,
    model_of,
    open_engine,
    prompts,
)

from megatronapp_trainer.inference.request import GenerationRequest

RunRanks = Callable[..., list[Any]]
Tokens = list[list[int]]
BENCH = pathlib.Path(__file__).resolve().parents[2] / "bench"
LENGTHS = (3, 17, 9, 1, 30, 2)


def generate(flags: str, variants: dict[str, str], graphs: Sequence[bool]) -> list[dict[str, Tokens]] | None:
    """Tokens of greedy and sampled requests by variant of the model, with CUDA graphs and without; on rank 0."""
    with groups_of(flags) as (layout, device):
        answers = [
            {name: generate_with(f"{flags} {variant}", layout, device, enabled) for name, variant in variants.items()}
            for enabled in graphs
        ]
    return answers if layout.rank == 0 else None


def generate_with(flags: str, layout: Any, device: Any, graphs: bool) -> Tokens:
    config = config_of(flags)
    model = model_of(config, layout, device)
    gang, engine = open_engine(model, config, layout, device, fuse=False, cuda_graphs=graphs)
    if engine is None:
        gang.follow()
        return []
    requests = [
        GenerationRequest(id=str(place), prompt=prompt, max_new_tokens=14, temperature=float(place % 2), seed=place)
        for place, prompt in enumerate(prompts(LENGTHS))
    ]
    engine.submit(*requests)
    events = drain(engine)
    engine.close()
    return [generated(events, request.id) for request in requests]


@pytest.fixture(scope="module")
def expected(on_processor: RunRanks) -> dict[str, Tokens]:
    """Tokens of the processor, which the unit tests compare with those of plain PyTorch."""
    ((answers,),) = on_processor(1, generate, "", VARIANTS, [False])
    return dict(answers)


def test_tokens_are_those_of_the_processor(run_ranks: RunRanks, expected: dict[str, Tokens]) -> None:
    assert run_ranks(1, generate, "", VARIANTS, [True, False]) == [[expected, expected]]


@pytest.mark.gpus(2)
@pytest.mark.parametrize("split", ["tensor", "pipeline"])
def test_layouts_generate_the_same_tokens(run_ranks: RunRanks, expected: dict[str, Tokens], split: str) -> None:
    (answers, _) = run_ranks(2, generate, f"--{split}-model-parallel-size 2", VARIANTS, [True])
    assert answers == [expected]


@pytest.mark.parametrize("gpus", [1, pytest.param(2, marks=pytest.mark.gpus(2))])
def test_captured_numbers_agree_over_layouts(gpus: int, tmp_path: pathlib.Path) -> None:
    command = [sys.executable, str(BENCH / "gpu_look_layouts.py"), f"--gpus={gpus}", "--layers=2", "--hidden=256"]
    ended = subprocess.run(
        [*command, "--out", str(tmp_path / "out.json")], capture_output=True, text=True, check=False, timeout=240
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
