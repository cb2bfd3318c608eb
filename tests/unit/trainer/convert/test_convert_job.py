"""Conversions of whole folders: what is refused and with which message, and that a target is whole or unchanged."""

import argparse
import fcntl
import json
import os
import pathlib
import re
import shutil
from collections.abc import Callable
from typing import Any

import convert_folder as tiny_folder
import pytest

from megatronapp_common.names import ExitCode
from megatronapp_trainer.checkpoint.arguments import model_of
from megatronapp_trainer.checkpoint.directory import CheckpointDirectory, OwnershipClaim, read_manifest
from megatronapp_trainer.config import parse
from megatronapp_trainer.data import tokenizer as tokenizers
from megatronapp_trainer.errors import CheckpointError, StorageError, UsageError

LLAMA, GPT2 = tiny_folder.LLAMA, tiny_folder.GPT2
O_BIAS = "model.layers.0.self_attn.o_proj.bias"


def convert(
    load: pathlib.Path, save: pathlib.Path, report: Callable[[str], None] = lambda _: None, **options: Any
) -> Any:
    from megatronapp_trainer.checkpoint.convert.job import convert as run
    from megatronapp_trainer.checkpoint.convert.options import ConversionOptions

    return run(ConversionOptions(load_dir=load, save_dir=save, **options), report)


def equal(left: dict[str, Any], right: dict[str, Any]) -> bool:
    import torch

    return left.keys() == right.keys() and all(
        torch.equal(left[name], right[name]) and left[name].dtype == right[name].dtype for name in left
    )


@pytest.fixture
def hf(tmp_path: pathlib.Path) -> pathlib.Path:
    tiny_folder.write(tmp_path / "hf", LLAMA)
    return tmp_path / "hf"


def test_a_conversion_reports_what_it_wrote(hf: pathlib.Path, tmp_path: pathlib.Path) -> None:
    tokenizers.train(["a text"], 257).backend.save(str(hf / "tokenizer.json"))
    summary = convert(hf, tmp_path / "ours", tensor_size=2)
    folder = tmp_path / "ours" / "iter_0000000"
    assert (summary.family, summary.written, summary.dtype) == ("llama", "megatronapp", "fp32")
    assert summary.parameters == sum(tensor.numel() for tensor in tiny_folder.read(hf).values())
    assert summary.tokenizer == ("--tokenizer-file", str(folder / "tokenizer.json"))
    manifest = read_manifest(folder)
    assert (manifest.iteration, manifest.optimizer, manifest.random_states) == (0, None, False)
    assert manifest.arguments["--tokenizer-file"] == "tokenizer.json"
    assert manifest.arguments["--vocab-size"] == 20
    model = model_of(manifest.arguments)
    assert (model.num_layers, model.heads_of_keys, model.swiglu, model.seq_length) == (2, 2, True, 8)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["hf", "ours"]


def without(tensors: dict[str, Any], config: dict[str, Any]) -> None:
    del tensors["model.layers.1.mlp.up_proj.weight"]


def surplus(tensors: dict[str, Any], config: dict[str, Any]) -> None:
    tensors[O_BIAS] = tensors["model.norm.weight"].clone()


def misshapen(tensors: dict[str, Any], config: dict[str, Any]) -> None:
    config["intermediate_size"] = 23


def quantised(tensors: dict[str, Any], config: dict[str, Any]) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name] = tensors[name].char()


def mixed(tensors: dict[str, Any], config: dict[str, Any]) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name] = tensors[name].half()


def other_head(tensors: dict[str, Any], config: dict[str, Any]) -> None:
    config["tie_word_embeddings"] = True


def unknown(tensors: dict[str, Any], config: dict[str, Any]) -> None:
    config["model_type"] = "mamba"


def classifier(tensors: dict[str, Any], config: dict[str, Any]) -> None:
    config["architectures"] = ["LlamaForSequenceClassification"]


def headless(tensors: dict[str, Any], config: dict[str, Any]) -> None:
    for name in [name for name in tensors if name.startswith("model.")]:
        tensors[name.removeprefix("model.")] = tensors.pop(name)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without, "lacks model.layers.1.mlp.up_proj.weight; is the download complete?"),
        (surplus, f"has {O_BIAS}, which no such llama model has"),
        (misshapen, "model.layers.0.mlp.gate_proj.weight is 24 x 16, but by config.json it must be 23 x 16"),
        (quantised, "up_proj.weight holds I8; supported are F32, F16, BF16"),
        (mixed, "hold different types of numbers"),
        (other_head, "lm_head.weight differs from model.embed_tokens.weight, but tie_word_embeddings says"),
        (unknown, 'model_type is "mamba"; supported: "gpt2", "llama", "mistral", "qwen2"'),
        (classifier, 'architectures is "LlamaForSequenceClassification"; of llama only LlamaForCausalLM is converted'),
        (headless, "has no tensor model.embed_tokens.weight"),
    ],
)
def test_a_source_that_cannot_be_converted(hf: pathlib.Path, tmp_path: pathlib.Path, change: Any, message: str) -> None:
    tensors, config = tiny_folder.read(hf), dict(LLAMA)
    change(tensors, config)
    tiny_folder.rewrite(hf, tensors, config)
    with pytest.raises(CheckpointError) as caught:
        convert(hf, tmp_path / "ours")
    assert message in str(caught.value)
    assert [entry.name for entry in tmp_path.iterdir()] == ["hf"]


def test_files_that_cannot_be_read(hf: pathlib.Path, tmp_path: pathlib.Path) -> None:
    weights = (hf / "model.safetensors").read_bytes()
    (hf / "model.safetensors").write_bytes(weights[:-1])
    with pytest.raises(CheckpointError, match="is the download complete"):
        convert(hf, tmp_path / "ours")
    (hf / "model.safetensors").unlink()
    (hf / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "gone.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"gone\.safetensors cannot be read"):
        convert(hf, tmp_path / "ours")
    (hf / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(CheckpointError, match="index of shards"):
        convert(hf, tmp_path / "ours")
    (hf / "model.safetensors.index.json").unlink()
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors"):
        convert(hf, tmp_path / "ours")
    (hf / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(CheckpointError, match="pickled weights"):
        convert(hf, tmp_path / "ours")
    (hf / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json cannot be read"):
        convert(hf, tmp_path / "ours")


def test_a_source_that_is_nothing(tmp_path: pathlib.Path) -> None:
    with pytest.raises(CheckpointError, match="is not a folder"):
        convert(tmp_path / "absent", tmp_path / "out")
    with pytest.raises(CheckpointError, match=r"neither config\.json"):
        convert(tmp_path, tmp_path / "out")


def test_old_names_and_buffers_of_gpt2(tmp_path: pathlib.Path) -> None:
    """The first folders of GPT-2 have no prefix, and masks among the weights, which the way back leaves out."""
    tensors = tiny_folder.write(tmp_path / "hf", GPT2, prefix="")
    assert "wte.weight" in tensors
    buffers = {f"h.{layer}.attn.bias": tensors["wpe.weight"].clone() for layer in range(2)}
    tiny_folder.rewrite(tmp_path / "hf", tensors | buffers, GPT2)
    convert(tmp_path / "hf", tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "back")
    assert equal(tiny_folder.read(tmp_path / "back"), tensors)
    modes = {name: (tmp_path / "back" / name).stat().st_mode for name in ("config.json", "model.safetensors")}
    assert len(set(modes.values())) == 1  # who may read one may read the other


def test_an_output_head_tied_to_the_embedding_is_restored(hf: pathlib.Path, tmp_path: pathlib.Path) -> None:
    tensors = tiny_folder.read(hf)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tiny_folder.rewrite(hf, tensors, LLAMA | {"tie_word_embeddings": True})
    convert(hf, tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "back")
    assert equal(tiny_folder.read(tmp_path / "back"), tensors)


def test_another_type_of_numbers(hf: pathlib.Path, tmp_path: pathlib.Path) -> None:
    import torch

    tiny_folder.rewrite(hf, tiny_folder.read(hf), LLAMA | {"dtype": "float32"})
    convert(hf, tmp_path / "ours", dtype="bf16")
    assert read_manifest(tmp_path / "ours" / "iter_0000000").arguments["--bf16"] is True
    summary = convert(tmp_path / "ours", tmp_path / "back")
    expected = {name: tensor.to(torch.bfloat16) for name, tensor in tiny_folder.read(hf).items()}
    assert equal(tiny_folder.read(tmp_path / "back"), expected)
    assert json.loads((tmp_path / "back" / "config.json").read_text())["dtype"] == "bfloat16"
    assert summary.dtype == "bf16"


def test_impossible_tensor_sizes_are_refused(hf: pathlib.Path, tmp_path: pathlib.Path) -> None:
    options: list[tuple[dict[str, Any], str]] = [
        ({"tensor_size": 3}, "2 key heads cannot be split over 3 ranks; take a divisor of 2, or a multiple"),
        ({"tensor_size": 8}, "4 query heads cannot be split over 8 ranks"),
        ({"pipeline_size": 3}, "2 layers cannot be split over 3"),
        ({"positions": "learned_absolute"}, "this one has rope"),
        ({"family": "qwen2"}, "is a llama model, not qwen2"),
        ({"source": "megatronapp"}, "holds a Hugging Face model, not checkpoints"),
        ({"to": "hf"}, "is a Hugging Face folder already"),
        ({"tokenizer": hf}, "holds neither tokenizer.json nor vocab.json with merges.txt"),
        ({"tokenizer": hf / "config.json"}, "is neither a tokenizer.json"),
    ]
    for option, message in options:
        with pytest.raises(UsageError, match=message):
            convert(hf, tmp_path / "ours", **option)
    convert(hf, tmp_path / "ours", tensor_size=4)  # two ranks for each key head
    with pytest.raises(UsageError, match="holds checkpoints of this trainer, not a Hugging Face model"):
        convert(tmp_path / "ours", tmp_path / "again", source="hf")
    with pytest.raises(UsageError, match=r"--family gpt2 cannot hold this model: .*--normalization"):
        convert(tmp_path / "ours", tmp_path / "again", family="gpt2")
    with pytest.raises(CheckpointError, match="no whole checkpoint of iteration 7"):
        convert(tmp_path / "ours", tmp_path / "again", iteration=7)


def test_values_outside_the_range_of_a_type_are_refused_in_both_directions(
    hf: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    import torch

    name = "model.layers.1.mlp.down_proj.weight"
    tensors = tiny_folder.read(hf)
    tensors[name][3, 4] = -131072.0
    tiny_folder.rewrite(hf, tensors, LLAMA)
    message = f"{name} has 1.311e\\+05, and fp16 ends at 6.55e\\+04: .* write --dtype bf16 or fp32"
    with pytest.raises(CheckpointError, match=message):
        convert(hf, tmp_path / "half", dtype="fp16")
    convert(hf, tmp_path / "ours", dtype="bf16")
    with pytest.raises(CheckpointError, match=message):
        convert(tmp_path / "ours", tmp_path / "back", dtype="fp16")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["hf", "ours"]
    tensors[name][3, 4] = torch.inf
    tiny_folder.rewrite(hf, tensors, LLAMA)
    convert(hf, tmp_path / "half", dtype="fp16")  # what was infinite before stays so


def test_the_tokenizer_of_another_folder(hf: pathlib.Path, tmp_path: pathlib.Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    tokenizers.train(["a text"], 257).backend.model.save(str(other))
    (other / "README.md").touch()
    summary = convert(hf, tmp_path / "ours", tokenizer=other)
    folder = tmp_path / "ours" / "iter_0000000"
    assert summary.tokenizer == ("--vocab-file", str(folder / "vocab.json"), "--merge-file", str(folder / "merges.txt"))
    assert not (folder / "README.md").exists()
    convert(tmp_path / "ours", tmp_path / "back")
    assert (tmp_path / "back" / "merges.txt").read_text() == (other / "merges.txt").read_text()
    (other / "vocab.json").write_text("{")
    with pytest.raises(CheckpointError, match=f"{other}: the tokenizer there cannot be read"):
        convert(hf, tmp_path / "third", tokenizer=other)


def test_damaged_checkpoints_are_reported(hf: pathlib.Path, tmp_path: pathlib.Path) -> None:
    convert(hf, tmp_path / "ours")
    data = tmp_path / "ours" / "iter_0000000" / "__0_0.distcp"
    content = data.read_bytes()
    data.write_bytes(content[:100])
    with pytest.raises(CheckpointError, match=r"no whole checkpoint.*__0_0\.distcp has 100 bytes instead of"):
        convert(tmp_path / "ours", tmp_path / "back")
    data.write_bytes(bytes(len(content)))
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp is damaged"):
        convert(tmp_path / "ours", tmp_path / "back")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["hf", "ours"]


@pytest.mark.parametrize("to", [None, "megatronapp"])
def test_a_damaged_newest_checkpoint_is_reported_as_skipped(
    hf: pathlib.Path, tmp_path: pathlib.Path, to: str | None
) -> None:
    convert(hf, tmp_path / "ours")
    shutil.copytree(tmp_path / "ours" / "iter_0000000", tmp_path / "ours" / "iter_0000001")
    data = tmp_path / "ours" / "iter_0000001" / "__0_0.distcp"
    data.write_bytes(bytes(data.stat().st_size))
    notices: list[str] = []
    convert(tmp_path / "ours", tmp_path / "back", report=notices.append, to=to)
    (skipped,) = (notice for notice in notices if "iter_0000001" in notice)
    assert re.search(r"iter_0000001: .*__0_0\.distcp is damaged.*; iter_0000000 is converted instead", skipped)


def test_only_a_conversion_is_overwritten_and_only_on_request(hf: pathlib.Path, tmp_path: pathlib.Path) -> None:
    ours = tmp_path / "ours"
    ours.mkdir()  # empty: may be taken
    convert(hf, ours)
    with pytest.raises(UsageError, match="give --overwrite"):
        convert(hf, ours)
    convert(hf, ours, overwrite=True, dtype="bf16")
    assert read_manifest(ours / "iter_0000000").arguments["--bf16"] is True
    CheckpointDirectory(ours).claim(OwnershipClaim(uid="job", attempt=1))
    with pytest.raises(UsageError, match="has files that no conversion has written"):
        convert(hf, ours, overwrite=True)
    with pytest.raises(UsageError, match="has files that no conversion"):
        convert(ours, ours / "iter_0000000", overwrite=True)
    convert(ours, tmp_path / "back")
    convert(ours / "iter_0000000", tmp_path / "back", overwrite=True)
    (tmp_path / "back" / "notes.txt").touch()
    with pytest.raises(UsageError, match="has files that no conversion"):
        convert(ours, tmp_path / "back", overwrite=True)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["back", "hf", "ours"]


def test_a_conversion_that_fails_leaves_the_target_as_it_was(
    hf: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatronapp_trainer.checkpoint.convert.huggingface.folder import TensorFolder

    convert(hf, tmp_path / "ours")
    before = {path: path.read_bytes() for path in (tmp_path / "ours").rglob("*") if path.is_file()}

    def fail(self: object, name: str) -> object:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(TensorFolder, "read", fail)
    with pytest.raises(StorageError, match="ours cannot be written: No space left"):
        convert(hf, tmp_path / "ours", overwrite=True)
    assert {path: path.read_bytes() for path in (tmp_path / "ours").rglob("*") if path.is_file()} == before
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["hf", "ours"]


def test_what_killed_conversions_left_is_cleared(hf: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Check a conversion killed while it wrote, and one killed between moving the old folder and renaming the new
    one."""
    (tmp_path / "ours.converting" / "half").mkdir(parents=True)
    (tmp_path / "ours.converting" / "file").write_text("half")
    (tmp_path / "ours.replaced").mkdir()
    (tmp_path / "ours.replaced" / "old").write_text("whole")
    with pytest.raises(UsageError, match="exists and is not empty"):
        convert(hf, tmp_path / "ours")
    assert (tmp_path / "ours" / "old").read_text() == "whole"
    convert(hf, tmp_path / "other")
    (tmp_path / "ours" / "old").unlink()
    convert(hf, tmp_path / "ours")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["hf", "other", "ours"]


def test_two_concurrent_conversions_to_a_folder_are_refused(hf: pathlib.Path, tmp_path: pathlib.Path) -> None:
    (tmp_path / "ours.converting").mkdir()
    descriptor = os.open(tmp_path / "ours.converting", os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    with pytest.raises(UsageError, match="another conversion writes"):
        convert(hf, tmp_path / "ours")
    assert (tmp_path / "ours.converting").exists()  # the other's, empty as it still is
    os.close(descriptor)
    convert(hf, tmp_path / "ours")
    assert (tmp_path / "ours" / "iter_0000000").is_dir()


def test_a_place_that_cannot_be_written(hf: pathlib.Path, tmp_path: pathlib.Path) -> None:
    with pytest.raises(UsageError, match="is a mount point"):
        convert(hf, pathlib.Path("/proc"))
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="cannot be written: "):
        convert(hf, tmp_path / "file" / "ours")


def command(*arguments: str) -> int:
    from megatronapp_trainer.checkpoint.convert.cli import register

    parser = argparse.ArgumentParser(prog="megatronapp")
    register(parser.add_subparsers())
    args = parser.parse_args(["checkpoint", "convert", *arguments])
    code: int = args.func(args)
    return code


def test_a_model_with_experts_is_not_offered_to_serve(tmp_path: pathlib.Path) -> None:
    from megatronapp_trainer.checkpoint.convert.cli import report
    from megatronapp_trainer.checkpoint.convert.options import OURS, ConversionOptions, ConversionSummary

    summary = ConversionSummary(
        family="mixtral",
        written=OURS,
        path=tmp_path,
        parameters=9,
        dtype="fp16",
        flags=("--num-experts", "4"),
        tokenizer=(),
    )
    options = ConversionOptions(load_dir=tmp_path, save_dir=tmp_path, tensor_size=2)
    assert report(summary, options).splitlines()[1:] == [
        f"train on with: --load {tmp_path} --finetune --tensor-model-parallel-size 2 --sequence-parallel",
        "and its model: --num-experts 4",
    ]


def test_the_command_prints_what_it_wrote_and_how_to_use_it(
    hf: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizers.train(["a text"], 257).backend.save(str(hf / "tokenizer.json"))
    ours, back = str(tmp_path / "ours"), str(tmp_path / "back")
    assert command("--load-dir", str(hf), "--save-dir", ours, "--target-tensor-parallel-size", "2") == 0
    made, serve, train, model = capsys.readouterr().out.splitlines()
    assert made.startswith(f"{ours} written: llama, ")
    assert made.endswith(" parameters in fp32")
    assert serve == f"serve with: megatronapp serve --load {ours} --tensor-model-parallel-size 2"
    assert train == f"train on with: --load {ours} --finetune --tensor-model-parallel-size 2"
    flags = model.removeprefix("and its model: ").split()
    training = ["--micro-batch-size", "1", "--train-iters", "1", "--lr", "1", "--mock-data"]
    assert parse([*flags, *training]).model.num_layers == LLAMA["num_hidden_layers"]
    assert flags[-2:] == ["--tokenizer-file", f"{ours}/iter_0000000/tokenizer.json"]
    assert command("--load-dir", ours, "--save-dir", back) == 0
    assert capsys.readouterr().out.startswith(f"{back} written: llama, ")


def test_the_command_ends_with_the_code_of_what_went_wrong(hf: pathlib.Path, tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").touch()
    assert command("--load-dir", str(hf), "--save-dir", str(tmp_path / "file")) == 2
    assert command("--load-dir", str(tmp_path / "absent"), "--save-dir", str(tmp_path / "out")) == ExitCode.DATA
    assert command("--load-dir", str(hf), "--save-dir", str(tmp_path / "file" / "out")) == ExitCode.STORAGE
