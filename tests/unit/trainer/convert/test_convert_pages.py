"""Conversions that the pages of MegatronApp print, typed exactly as printed: the tokenizer is converted, too."""

import argparse
import pathlib
import shlex

import convert_folder as tiny_folder
import pytest

from megatronapp_trainer.checkpoint.convert.cli import register
from megatronapp_trainer.checkpoint.directory import read_manifest
from megatronapp_trainer.data import tokenizer as tokenizers
from megatronapp_trainer.serve.settings import configure, read_command

LLAMA = """
python tools/checkpoint/convert.py \\
  --model-type GPT \\
  --loader llama_mistral \\
  --saver core \\
  --checkpoint-type hf \\
  --model-size llama3 \\
  --load-dir {there}/Meta-Llama-3-8B-Instruct \\
  --save-dir {there}/Meta-Llama-3-8B-Instruct-megatron \\
  --tokenizer-model {there}/Meta-Llama-3-8B-Instruct/tokenizer.model \\
  --bf16
"""
GPT2 = """
python test_scripts/gpt2_convert.py \\
  --load_path {there}/hf_ckpt/gpt2 \\
  --save_path {there}/megatron_ckpt/gpt2 \\
  --megatron-path . \\
  --print-checkpoint-structure \\
  --target_tensor_model_parallel_size 1 \\
  --target_pipeline_model_parallel_size 1 \\
  --target_data_parallel_size 1 \\
  --target_params_dtype fp32 \\
  --make_vocab_size_divisible_by 1
"""
LEGACY_TO_CORE = """
python tools/checkpoint/convert.py \\
  --model-type GPT \\
  --loader legacy \\
  --saver core \\
  --load-dir {there}/megatron_ckpt/gpt2 \\
  --save-dir {there}/mcore_ckpt/gpt2 \\
  --vocab-file {there}/hf_ckpt/gpt2/vocab.json \\
  --megatron-path . \\
  --target-tensor-parallel-size 1 \\
  --target-pipeline-parallel-size 1
"""


def typed(printed: str, there: pathlib.Path) -> int:
    """Return the exit code of our command with the arguments after the script's name."""
    _python, _script, *arguments = shlex.split(printed.format(there=there).replace("\\\n", " "))
    return run(arguments)


def run(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="megatronapp")
    register(parser.add_subparsers())
    args = parser.parse_args(["checkpoint", "convert", *arguments])
    code: int = args.func(args)
    return code


def served_tokenizer(load: pathlib.Path) -> str | None:
    """The text "a text", taken apart and put together by the tokenizer that a server would use."""
    data = configure(read_command(["--load", str(load)])).data
    loaded = tokenizers.load(vocab_file=data.vocab_file, merge_file=data.merge_file, tokenizer_file=data.tokenizer_file)
    return loaded.detokenize(loaded.tokenize("a text"))


def test_the_llama_of_the_docker_page_keeps_its_tokenizer(tmp_path: pathlib.Path) -> None:
    source = tmp_path / "Meta-Llama-3-8B-Instruct"
    tiny_folder.write(source, tiny_folder.LLAMA)
    tokenizers.train(["a text"], 257).backend.save(str(source / "tokenizer.json"))
    (source / "tokenizer.model").write_bytes(b"of sentencepiece")
    assert typed(LLAMA, tmp_path) == 0
    made = tmp_path / "Meta-Llama-3-8B-Instruct-megatron"
    assert read_manifest(made / "iter_0000000").arguments["--tokenizer-file"] == "tokenizer.json"
    assert served_tokenizer(made) == "a text"


def test_an_unusable_tokenizer_is_reported_before_anything_is_written(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "Meta-Llama-3-8B-Instruct"
    tiny_folder.write(source, tiny_folder.LLAMA)
    (source / "tokenizer.model").write_bytes(b"of sentencepiece")
    assert typed(LLAMA, tmp_path) == 2
    message = capsys.readouterr().err
    assert f"{source} holds tokenizer.model but neither tokenizer.json nor vocab.json with merges.txt" in message
    assert "save_pretrained" in message
    assert [entry.name for entry in tmp_path.iterdir()] == [source.name]
    assert run(["--load-dir", str(source), "--save-dir", str(tmp_path / "ids")]) == 0
    assert capsys.readouterr().err.startswith(f"note: {source} holds tokenizer.model but neither")


def test_the_two_steps_of_gpt2_keep_its_tokenizer(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The second of the test scripts takes the weights that the first has written already in the new format."""
    source = tmp_path / "hf_ckpt" / "gpt2"
    tiny_folder.write(source, tiny_folder.GPT2)
    tokenizers.train(["a text"], 257).backend.model.save(str(source))
    assert typed(GPT2, tmp_path) == 0
    assert "note: --megatron-path: megatron-core is installed with the trainer" in capsys.readouterr().err
    assert typed(LEGACY_TO_CORE, tmp_path) == 0
    for folder in ("megatron_ckpt", "mcore_ckpt"):
        assert served_tokenizer(tmp_path / folder / "gpt2") == "a text"


@pytest.mark.parametrize("name", ["vocab.json", "merges.txt"])
def test_either_file_of_gpt2_names_the_other(tmp_path: pathlib.Path, name: str) -> None:
    source, other = tmp_path / "gpt2", tmp_path / "other"
    tiny_folder.write(source, tiny_folder.GPT2)
    other.mkdir()
    tokenizers.train(["a text"], 257).backend.model.save(str(other))
    flag = "--vocab-file" if name == "vocab.json" else "--merge-file"
    arguments = ["--load-dir", str(source), "--save-dir", str(tmp_path / "ours"), flag, str(other / name)]
    assert run(arguments) == 0
    assert served_tokenizer(tmp_path / "ours") == "a text"
    (other / "merges.txt").unlink()
    (other / "vocab.json").touch()
    assert run([*arguments[:3], str(tmp_path / "again"), *arguments[4:]]) == 2
