"""Generation and capture on devices: tokens of plain PyTorch, in every layout, captured or not, graphs or not."""

import pathlib
import subprocess
import sys
from collections.abc import Callable
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

from megatronapp_trainer.generate.request import GenerationRequest

RunRanks = Callable[..., list[Any]]
BENCH = pathlib.Path(__file__).resolve().parents[2] / "bench"
LENGTHS = (3, 17, 9, 1, 30, 2)


def generate(flags: str, variant: str, options: dict[str, Any]) -> list[list[int]] | None:
    """Tokens of greedy and sampled requests, on rank 0."""
    with groups_of(flags) as (layout, device):
        config = config_of(f"{flags} {variant}")
        gang, engine = open_engine(model_of(config, layout, device), config, layout, device, fuse=False, **options)
        if engine is None:
            gang.follow()
            return None
        requests = [
            GenerationRequest(id=str(place), prompt=prompt, max_new_tokens=14, temperature=float(place % 2), seed=place)
            for place, prompt in enumerate(prompts(LENGTHS))
        ]
        engine.submit(*requests)
        events = drain(engine)
        engine.close()
    return [generated(events, request.id) for request in requests]


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=list(VARIANTS))
def test_tokens_are_those_of_the_processor(run_ranks: RunRanks, on_processor: RunRanks, variant: str) -> None:
    (wanted,) = on_processor(1, generate, "", variant, {})  # which the unit tests compare with plain PyTorch
    for graphs in (True, False):
        assert run_ranks(1, generate, "", variant, {"cuda_graphs": graphs}) == [wanted]


@pytest.mark.gpus(2)
@pytest.mark.parametrize("split", ["tensor", "pipeline"])
def test_layouts_generate_the_tokens_of_one_device(run_ranks: RunRanks, split: str) -> None:
    variant = VARIANTS["rotary-grouped"]
    (alone,) = run_ranks(1, generate, "", variant, {})
    assert run_ranks(2, generate, f"--{split}-model-parallel-size 2", variant, {})[0] == alone


@pytest.mark.parametrize("gpus", [1, pytest.param(2, marks=pytest.mark.gpus(2))])
def test_captured_numbers_agree_over_layouts(gpus: int, tmp_path: pathlib.Path) -> None:
    command = [sys.executable, str(BENCH / "gpu_look_layouts.py"), f"--gpus={gpus}", "--layers=2", "--hidden=256"]
    ended = subprocess.run(
        [*command, "--out", str(tmp_path / "out.json")], capture_output=True, text=True, check=False, timeout=240
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
