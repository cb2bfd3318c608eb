"""Checkpoints that megatron-core wrote as Megatron-LM does compute the same here from any layout."""

import json
import pathlib
from collections.abc import Callable
from typing import Any

import convert_ranks as ranks
import megatron_ranks
import pytest

from megatronapp_trainer.checkpoint.convert.job import convert
from megatronapp_trainer.checkpoint.convert.megatron.arguments import vocabulary_from
from megatronapp_trainer.checkpoint.convert.options import MEGATRON, OURS, ConversionOptions, ConversionSummary
from megatronapp_trainer.checkpoint.directory import read_manifest
from megatronapp_trainer.errors import CheckpointError, UsageError

pytestmark = pytest.mark.torch

RunRanks = Callable[..., list[Any]]
TOLERANCE = 1e-5
LAYOUTS = {
    "one": (1, ""),
    "TP2": (2, "--tensor-model-parallel-size 2"),
    "PP2": (2, "--pipeline-model-parallel-size 2"),
    "TP2 PP2": (4, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"),
}


def logits_here(found: list[tuple[str, list[str], str]]) -> list[Any]:
    """Logits of our model with each converted checkpoint and its flags, on one rank."""
    import warnings

    warnings.simplefilter("ignore")
    from megatronapp_trainer.device import prepare_device
    from megatronapp_trainer.parallel.groups import destroy_groups, initialize_groups

    outcome: list[Any] = []
    for load, flags, layout_flags in found:
        config, layout = ranks.configure([*flags, *layout_flags.split(), "--load", load])
        device = prepare_device(layout.local_rank)
        if not outcome:
            initialize_groups(config, layout, device)
        outcome.append(ranks.loaded_logits(config, layout, device, megatron_ranks.tokens()))
    destroy_groups()
    return outcome


def converted(source: pathlib.Path, **options: Any) -> ConversionSummary:
    return convert(ConversionOptions(load_dir=source, save_dir=source.with_name(f"{source.name}-here"), **options))


@pytest.mark.full("a sweep of layouts", but=("TP2 PP2",))
@pytest.mark.parametrize("name", LAYOUTS)
def test_the_same_logits_as_in_megatron_core(run_ranks: RunRanks, tmp_path: pathlib.Path, name: str) -> None:
    world, flags = LAYOUTS[name]
    there = run_ranks(world, megatron_ranks.write, str(tmp_path), flags)[-1]
    made = {
        (model, kind): converted(tmp_path / f"{model}-{kind}", true_vocab_size=megatron_ranks.VOCABULARY)
        for model in megatron_ranks.MODELS
        for kind in ("torch_dist", "legacy")
    }
    (here,) = run_ranks(
        1, logits_here, [(str(conversion.path), list(conversion.flags), "") for conversion in made.values()]
    )
    width = megatron_ranks.VOCABULARY
    differences = {
        key: float((found - there[key[0]])[..., :width].abs().max()) for key, found in zip(made, here, strict=True)
    }
    assert {key: value for key, value in differences.items() if not value < TOLERANCE} == {}


@pytest.fixture(scope="module")
def split(run_ranks: RunRanks, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Written by two stages with two chunks each."""
    root = tmp_path_factory.mktemp("split")
    flags = "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 --micro-batch-size 1"
    run_ranks(2, megatron_ranks.write, str(root), f"{flags} --global-batch-size 2")
    return root


def weights_of(folder: pathlib.Path) -> dict[str, Any]:
    from megatronapp_trainer.checkpoint.tensor_files import StoredTensors

    stored = StoredTensors(folder)
    found = {name: stored.find(name) for name in stored.names()}
    return {name: stored.read(name) for name, kind in found.items() if kind is not None}


def test_chunks_of_an_interleaved_schedule_are_put_in_their_order(split: pathlib.Path) -> None:
    import torch

    weights = weights_of(converted(split / "llama-legacy", overwrite=True).path / "iter_0000000")
    other = weights_of(converted(split / "llama-torch_dist", overwrite=True).path / "iter_0000000")
    assert weights.keys() == other.keys()
    assert {name for name in weights if not torch.equal(weights[name], other[name])} == set()
    layers = weights["decoder.layers.mlp.linear_fc2.weight"]
    assert len({layer.sum().item() for layer in layers}) == 4


def test_a_conversion_prints_what_it_is_and_what_it_omits(split: pathlib.Path, tmp_path: pathlib.Path) -> None:
    lines: list[str] = []
    summary = convert(
        ConversionOptions(load_dir=split / "gpt-legacy", save_dir=tmp_path / "out", dtype="bf16"), lines.append
    )
    assert lines[0].startswith("the weights of iteration 20 are converted, not the optimizer's state")
    assert "trained with --tokenizer-type GPT2BPETokenizer" in lines[1]
    manifest = read_manifest(tmp_path / "out" / "iter_0000000")
    assert (summary.written, summary.dtype, manifest.arguments["--vocab-size"]) == (OURS, "bf16", megatron_ranks.ROWS)
    assert manifest.arguments["--openai-gelu"] is False
    again = convert(ConversionOptions(load_dir=tmp_path / "out", save_dir=tmp_path / "fp32", to=OURS, dtype="fp32"))
    assert again.dtype == "fp32"
    convert(ConversionOptions(load_dir=tmp_path / "out", save_dir=tmp_path / "exact", to=OURS, source=MEGATRON))
    assert weights_of(tmp_path / "exact" / "iter_0000000").keys() == weights_of(summary.path / "iter_0000000").keys()
    back = convert(ConversionOptions(load_dir=tmp_path / "out", save_dir=tmp_path / "hf"))
    assert back.family == "gpt2"


@pytest.mark.parametrize(
    ("arguments", "tokens"),
    [
        ({"vocab_size": 100}, 100),
        ({"vocab_size": 100, "tokenizer_type": "Llama2Tokenizer"}, 100),
        ({"vocab_size": 100, "tokenizer_type": "NullTokenizer"}, 101),
        ({"vocab_size": 127, "tokenizer_type": "NullMultimodalTokenizer"}, 128),
        ({"vocab_size": 128, "tokenizer_type": "NullTokenizer"}, 128),
        ({"vocab_size": None, "tokenizer_type": "NullTokenizer"}, 128),
        ({"vocab_size": 129}, 128),
    ],
)
def test_the_end_of_documents_of_a_null_tokenizer_is_a_token_more(arguments: dict[str, Any], tokens: int) -> None:
    assert vocabulary_from(arguments, 128) == tokens


def test_an_iteration_may_be_named_by_number_or_by_folder(split: pathlib.Path, tmp_path: pathlib.Path) -> None:
    source = split / "gpt-legacy"
    convert(ConversionOptions(load_dir=source, save_dir=tmp_path / "number", iteration=megatron_ranks.ITERATION))
    convert(ConversionOptions(load_dir=source / "iter_0000020", save_dir=tmp_path / "folder", source=MEGATRON))
    with pytest.raises(CheckpointError, match="no checkpoint of Megatron-LM of iteration 21"):
        convert(ConversionOptions(load_dir=source, save_dir=tmp_path / "none", source=MEGATRON, iteration=21))
    with pytest.raises(UsageError, match="which become ours first: megatronapp checkpoint convert --load-dir"):
        convert(ConversionOptions(load_dir=source, save_dir=tmp_path / "hf", to="hf"))
    with pytest.raises(UsageError, match="--true-vocab-size 129 is more than the 128 rows"):
        convert(ConversionOptions(load_dir=source, save_dir=tmp_path / "more", true_vocab_size=129))
    with pytest.raises(UsageError, match="--family is for models of Hugging Face"):
        convert(ConversionOptions(load_dir=source, save_dir=tmp_path / "family", family="gpt2"))
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["folder", "number"]


def rewritten(source: pathlib.Path, target: pathlib.Path, change: Callable[[dict[str, Any]], None]) -> pathlib.Path:
    """A copy of legacy files with a change to each."""
    import torch

    from megatronapp_trainer.checkpoint.pickles import read_torch

    for file in source.glob("iter_*/mp_rank_*/*.pt"):
        content = read_torch(file)
        change(content)
        copy = target / file.relative_to(source)
        copy.parent.mkdir(parents=True)
        torch.save(content, copy)
    return target


def test_what_cannot_be_trained_here_is_refused_by_its_argument(split: pathlib.Path, tmp_path: pathlib.Path) -> None:
    def experts(content: dict[str, Any]) -> None:
        content["args"].num_experts = 8

    def lost(content: dict[str, Any]) -> None:
        del content["args"]

    def half(content: dict[str, Any]) -> None:
        content["model0"] = {name: value for name, value in content["model0"].items() if "fc2.bias" not in name}

    def more(content: dict[str, Any]) -> None:
        content["model0"]["binary_head.weight"] = content["model0"]["decoder.layers.0.mlp.linear_fc2.bias"]

    cases = (
        (experts, "its num_experts is 8: mixtures of experts cannot be converted"),
        (lost, "holds no arguments"),
        (half, r"lacks decoder\.layers\.0\.mlp\.linear_fc2\.bias"),
        (more, r"has binary_head\.weight, which no such model"),
    )
    for change, message in cases:
        source = rewritten(split / "gpt-legacy", tmp_path / change.__name__, change)
        with pytest.raises(CheckpointError, match=message):
            convert(ConversionOptions(load_dir=source, save_dir=tmp_path / "out"))
    (tmp_path / "more" / "iter_0000020" / "mp_rank_00_001" / "model_optim_rng.pt").unlink()
    with pytest.raises(CheckpointError, match=r"lacks decoder\.layers"):
        convert(ConversionOptions(load_dir=tmp_path / "more", save_dir=tmp_path / "out"))


OLD = {
    "self_attention.linear_qkv.": "self_attention.query_key_value.",
    "self_attention.linear_proj.": "self_attention.dense.",
    "mlp.linear_fc1.": "mlp.dense_h_to_4h.",
    "mlp.linear_fc2.": "mlp.dense_4h_to_h.",
    "pre_mlp_layernorm.": "post_attention_layernorm.",
    "decoder.": "encoder.",
}


@pytest.mark.parametrize("version", [0, 1.0, 2.0])
def test_names_and_orders_from_before_megatron_core(
    split: pathlib.Path, tmp_path: pathlib.Path, version: float
) -> None:
    """Convert nested dictionaries, other names, and query, key and value in the orders that they once had."""
    import torch

    def old(content: dict[str, Any]) -> None:
        content["checkpoint_version"] = version
        for chunk in ("model0", "model1"):
            content[chunk] = {"language_model": {}}
        for chunk, tensors in originals[content["rank"]].items():
            content[chunk]["language_model"] = {
                renamed(name): reordered(name, value) for name, value in tensors.items() if "_extra_state" not in name
            }

    def renamed(name: str) -> str:
        for new, before in OLD.items():
            name = name.replace(new, before)
        return name

    def reordered(name: str, value: Any) -> Any:
        if "linear_qkv" not in name or version >= 2:
            return value
        heads = value.reshape(4, 3, 8, *value.shape[1:])
        order = heads.transpose(0, 1) if version < 1 else heads.transpose(1, 2)
        return order.reshape(value.shape)

    originals: dict[int, Any] = {}

    def keep(content: dict[str, Any]) -> None:
        content["rank"] = len(originals)
        originals[content["rank"]] = {key: content[key] for key in ("model0", "model1")}

    first = rewritten(split / "gpt-legacy", tmp_path / "kept", keep)
    source = rewritten(first, tmp_path / "old", old)
    convert(ConversionOptions(load_dir=source, save_dir=tmp_path / "from-old"))
    convert(ConversionOptions(load_dir=first, save_dir=tmp_path / "from-new"))
    old_weights, new_weights = (weights_of(tmp_path / name / "iter_0000000") for name in ("from-old", "from-new"))
    assert old_weights.keys() == new_weights.keys()
    assert {name for name in old_weights if not torch.equal(old_weights[name], new_weights[name])} == set()


class Runs:
    """Object whose code runs when Python's own pickle reads it."""

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return exec, ("raise SystemExit('the code of a checkpoint ran')",)


def test_no_code_of_a_checkpoint_runs(split: pathlib.Path, tmp_path: pathlib.Path) -> None:
    def hostile(content: dict[str, Any]) -> None:
        content["rng_state"] = Runs()

    source = rewritten(split / "gpt-legacy", tmp_path / "hostile", hostile)
    assert converted(source).written == OURS


def test_manifest_flags_are_json(split: pathlib.Path) -> None:
    path = converted(split / "gpt-torch_dist", overwrite=True).path / "iter_0000000" / "megatronapp.json"
    stored = json.loads(path.read_text())["arguments"]
    assert stored["--rotary-base"] is None
    assert stored["--num-layers"] == 4
