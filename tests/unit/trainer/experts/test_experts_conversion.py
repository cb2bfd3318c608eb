"""Mixtral and Qwen2-MoE, converted, compute what transformers computes; and the way back gives the same bits."""

import pathlib
import warnings
from collections.abc import Callable
from typing import Any

import convert_models as models
import convert_ranks as ranks
import pytest

RunRanks = Callable[..., list[Any]]

pytestmark = pytest.mark.torch

OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
LAYOUTS = {
    "alone": (1, ""),
    "EP2": (2, "--expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall"),
    "TP2xPP2": (4, "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2"),
}


def make_and_convert(root: str) -> dict[str, list[str]]:
    """Every model as `NAME/hf`, converted to `NAME/ours` and back; returns tensors that differ from those of `hf`."""
    warnings.simplefilter("ignore")
    import torch
    from safetensors.torch import load_file

    from megatronapp_trainer.checkpoint.convert.job import convert
    from megatronapp_trainer.checkpoint.convert.options import ConversionOptions

    flaws = {}
    for name in models.EXPERT_MODELS:
        here = pathlib.Path(root) / name
        model = models.save_model(name, here / "hf")
        torch.save(models.logits_of(model), here / "logits")
        convert(ConversionOptions(load_dir=here / "hf", save_dir=here / "ours"))
        convert(ConversionOptions(load_dir=here / "ours", save_dir=here / "back"))
        there, back = (load_file(here / folder / "model.safetensors") for folder in ("hf", "back"))
        flaws[name] = [
            key
            for key in there.keys() | back.keys()
            if key not in there or key not in back or not torch.equal(there[key], back[key])
        ]
        if (here / "hf" / "config.json").read_bytes() != (here / "back" / "config.json").read_bytes():
            flaws[name].append("config.json")
    return flaws


def differences(root: str, flags: str) -> dict[str, float]:
    """Largest difference of each model's logits in this layout, on ranks that compute logits."""
    warnings.simplefilter("ignore")
    return ranks.logit_differences(pathlib.Path(root), tuple(models.EXPERT_MODELS), flags)


@pytest.fixture(scope="module")
def converted(run_ranks: RunRanks, tmp_path_factory: pytest.TempPathFactory) -> tuple[pathlib.Path, dict[str, Any]]:
    """The folder of all models, converted, and what differs after the way back."""
    path = tmp_path_factory.mktemp("models")
    (flaws,) = run_ranks(1, make_and_convert, str(path), environment=OFFLINE)
    return path, flaws


def test_the_way_back_gives_the_same_bits(converted: tuple[pathlib.Path, dict[str, Any]]) -> None:
    assert converted[1] == {name: [] for name in models.EXPERT_MODELS}


@pytest.mark.full("a sweep of layouts", but=("EP2",))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_logits_are_those_of_transformers(
    run_ranks: RunRanks, converted: tuple[pathlib.Path, Any], layout: str
) -> None:
    world, flags = LAYOUTS[layout]
    found: dict[str, float] = {}
    for result in run_ranks(world, differences, str(converted[0]), flags):
        found |= result
    assert list(found) == list(models.EXPERT_MODELS)
    assert {name: value for name, value in found.items() if not value < 1e-4} == {}
