"""Converted models compute what transformers computes, in every layout; and the way back gives the same bits."""

import pathlib
import warnings
from collections.abc import Callable
from typing import Any

import convert_models as models
import convert_ranks as ranks
import pytest
from convert_models import MODELS

pytestmark = pytest.mark.torch

RunRanks = Callable[..., list[Any]]

TOLERANCE = 1e-4
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
LAYOUTS = {
    "alone": (1, ""),
    "local-layers": (1, "--transformer-impl local"),
    "TP2": (2, "--tensor-model-parallel-size 2"),
    "TP2+SP": (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "PP2": (2, "--pipeline-model-parallel-size 2"),
    "TP2xPP2+SP": (4, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel"),
}


def make_and_convert(root: str) -> None:
    """Every model as `NAME/hf`, converted to `NAME/ours` and back to `NAME/back`, with its logits in `NAME/logits`."""
    warnings.simplefilter("ignore")
    import torch

    from megatronapp_trainer.checkpoint.convert.job import convert
    from megatronapp_trainer.checkpoint.convert.options import ConversionOptions
    from megatronapp_trainer.data.tokenizer import train

    for name in MODELS:
        here = pathlib.Path(root) / name
        model = models.save_model(name, here / "hf")
        torch.save(models.logits_of(model), here / "logits")
        train(["a text"], 257).backend.save(str(here / "hf" / "tokenizer.json"))
        shard_bytes = 100_000 if name == models.SHARDED else 10**9
        convert(ConversionOptions(load_dir=here / "hf", save_dir=here / "ours"))
        convert(ConversionOptions(load_dir=here / "ours", save_dir=here / "back", shard_bytes=shard_bytes))


def differences(root: str, flags: str) -> dict[str, float]:
    """Largest difference of each model's logits in this layout, on ranks that compute logits."""
    warnings.simplefilter("ignore")
    return ranks.logit_differences(pathlib.Path(root), tuple(MODELS), flags)


@pytest.fixture(scope="module")
def root(run_ranks: RunRanks, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Return the folder of all models, converted."""
    path = tmp_path_factory.mktemp("models")
    run_ranks(1, make_and_convert, str(path), environment=OFFLINE)
    return path


@pytest.mark.full("a sweep of layouts", but=("TP2xPP2+SP",))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_logits_are_those_of_transformers(run_ranks: RunRanks, root: pathlib.Path, layout: str) -> None:
    world, flags = LAYOUTS[layout]
    found: dict[str, float] = {}
    for result in run_ranks(world, differences, str(root), flags):
        found |= result
    assert list(found) == list(MODELS)
    assert {name: value for name, value in found.items() if not value < TOLERANCE} == {}


def tensors_of(folder: str) -> dict[str, tuple[str, list[int], bytes]]:
    """Type, size and bits of every tensor of a Hugging Face folder."""
    import torch
    from safetensors import safe_open

    found = {}
    for path in sorted(pathlib.Path(folder).glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - no mapping
                tensor = file.get_tensor(name)
                found[name] = (str(tensor.dtype), list(tensor.shape), tensor.view(torch.uint8).numpy().tobytes())
    return found


def way_back(root: str) -> dict[str, list[str]]:
    """Return what differs after converting back, for each model; transformers must compute the same bits with it."""
    warnings.simplefilter("ignore")
    import torch
    import transformers

    auto: Any = transformers.AutoModelForCausalLM
    flaws: dict[str, list[str]] = {}
    for name in MODELS:
        here = pathlib.Path(root) / name
        there, back = tensors_of(str(here / "hf")), tensors_of(str(here / "back"))
        flaws[name] = [key for key in there.keys() | back.keys() if there.get(key) != back.get(key)]
        for file in ("config.json", "generation_config.json", "tokenizer.json"):
            flaws[name] += [file] if (here / "hf" / file).read_bytes() != (here / "back" / file).read_bytes() else []
        model = auto.from_pretrained(here / "back", dtype=torch.float32).eval()
        flaws[name] += [] if torch.equal(models.logits_of(model), torch.load(here / "logits")) else ["logits"]
    return flaws


def test_the_way_back_gives_the_same_bits_names_and_types(run_ranks: RunRanks, root: pathlib.Path) -> None:
    (flaws,) = run_ranks(1, way_back, str(root), environment=OFFLINE)
    assert flaws == {name: [] for name in MODELS}
    assert len(list((root / "qwen2" / "hf").glob("*.safetensors"))) > 1
    assert len(list((root / "qwen2" / "back").glob("*.safetensors"))) > 1


def resume(root: str) -> str:
    """Return the message to a user who continues with converted weights as with a training."""
    import dataclasses

    from megatronapp_trainer.checkpoint.arguments import model_flags
    from megatronapp_trainer.checkpoint.directory import read_manifest
    from megatronapp_trainer.device import prepare_device
    from megatronapp_trainer.errors import CheckpointError
    from megatronapp_trainer.parallel.groups import initialize_groups

    ours = pathlib.Path(root) / "gpt2" / "ours"
    flags = model_flags(read_manifest(ours / "iter_0000000").arguments)
    config, layout = ranks.configure([*flags, "--load", str(ours)])
    config = dataclasses.replace(config, checkpoint=dataclasses.replace(config.checkpoint, finetune=False))
    device = prepare_device(layout.local_rank)
    initialize_groups(config, layout, device)
    try:
        ranks.loaded_logits(config, layout, device, models.tokens())
    except CheckpointError as error:
        return str(error)
    return ""


def test_converted_weights_cannot_be_resumed_without_finetune(run_ranks: RunRanks, root: pathlib.Path) -> None:
    (message,) = run_ranks(1, resume, str(root))
    assert message.endswith("was converted and holds weights alone; give --finetune to start from them")
