"""Models that were made and saved here, in a split layout, compute the same in transformers."""

import json
import pathlib
import warnings
from collections.abc import Callable
from typing import Any

import convert_models as models
import convert_ranks as ranks
import pytest

pytestmark = pytest.mark.torch

RunRanks = Callable[..., list[Any]]

SIZES = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 48 --micro-batch-size 1 --train-iters 1 "
    "--lr 1e-3 --mock-data --vocab-size 120 --init-method-std 0.2 --tensor-model-parallel-size 2"
)
ROPE = "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear"
MODELS = {
    "gpt2": "",
    "llama": f"{ROPE} --rotary-base 5e5 --use-rope-scaling --untie-embeddings-and-output-weights",
    "mistral": f"{ROPE} --window-size 7,0 --kv-channels 32",
    "qwen2": f"{ROPE} --add-qkv-bias --group-query-attention --num-query-groups 1 --seq-length 64 --norm-epsilon 1e-6",
    "qwen3": f"{ROPE} --qk-layernorm --kv-channels 32 --norm-epsilon 1e-6",
}
TOLERANCE = 1e-4


def differences(root: str) -> dict[str, float | None]:
    """Largest difference between our logits at TP2 and those of transformers with what was converted."""
    warnings.simplefilter("ignore")
    import torch.distributed as dist
    import transformers

    from megatronapp_trainer.checkpoint.convert.job import convert
    from megatronapp_trainer.checkpoint.convert.options import ConversionOptions
    from megatronapp_trainer.checkpoint.manager import CheckpointManager
    from megatronapp_trainer.device import prepare_device
    from megatronapp_trainer.parallel.groups import destroy_groups, initialize_groups
    from megatronapp_trainer.training.build import build_run

    found: dict[str, float | None] = {}
    for name, flags in MODELS.items():
        save, back = pathlib.Path(root) / name / "ours", pathlib.Path(root) / name / "hf"
        config, layout = ranks.configure([*SIZES.split(), *flags.split(), "--save", str(save)])
        device = prepare_device(layout.local_rank)
        if not found:
            initialize_groups(config, layout, device)
        run = build_run(config, layout, device, vocab_size=120)
        CheckpointManager(config, layout).save(run.state)
        logits = ranks.forward(run, layout, models.tokens())
        found[name] = None
        if layout.rank == 0:
            auto: Any = transformers.AutoModelForCausalLM
            convert(ConversionOptions(load_dir=save, save_dir=back))
            expected = models.logits_of(auto.from_pretrained(back).eval())
            found[name] = float((logits[..., :120] - expected).abs().max())
        dist.barrier()
    destroy_groups()
    return found


def test_transformers_computes_what_we_do(run_ranks: RunRanks, tmp_path: pathlib.Path) -> None:
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    found, _ = run_ranks(2, differences, str(tmp_path), environment=offline)
    assert {name: value for name, value in found.items() if not value < TOLERANCE} == {}
    assert list(found) == list(MODELS)
    for name in MODELS:
        config = json.loads((tmp_path / name / "hf" / "config.json").read_text())
        assert (config["model_type"], config["vocab_size"], config["torch_dtype"]) == (name, 120, "float32")
