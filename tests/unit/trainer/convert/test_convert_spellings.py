"""Every option of Megatron's converters is either understood or answered with the command to use."""

import argparse
import pathlib
import shlex

import pytest

from megatronapp_trainer.checkpoint.convert.cli import _add_options, _bytes, options_from, register, run_convert
from megatronapp_trainer.checkpoint.convert.families import FAMILIES
from megatronapp_trainer.checkpoint.convert.options import DTYPES, HF, MEGATRON, OURS, ConversionOptions
from megatronapp_trainer.checkpoint.convert.spellings import ANY, COMMAND, SPELLINGS, LegacyOption, translate_option
from megatronapp_trainer.errors import UsageError

FOLDERS = ("--load-dir", "in", "--save-dir", "out")


def parsed(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="megatronapp")
    register(parser.add_subparsers())
    return parser.parse_args(["checkpoint", "convert", *arguments])


def options(*arguments: str) -> ConversionOptions:
    return options_from(parsed(*arguments))


def cases() -> list[tuple[LegacyOption, str | None]]:
    found: list[tuple[LegacyOption, str | None]] = []
    for spelling in SPELLINGS:
        example = {"--target_params_dtype": "bf16", "--max_shard_size": "1GB"}.get(spelling.flag, "2")
        values: list[str | None] = [*(spelling.values or ())]
        values = values or [example if spelling.takes is not None else None]
        found += [(spelling, "other" if value == ANY else value) for value in values]
    return found


@pytest.mark.parametrize(
    ("spelling", "value"), cases(), ids=lambda part: part.flag if isinstance(part, LegacyOption) else part
)
def test_every_spelling_is_understood_or_answered(spelling: LegacyOption, value: str | None) -> None:
    arguments = [spelling.flag] if value is None else [spelling.flag, value]
    given = [*arguments, *(FOLDERS if "_path" not in spelling.flag else ("--load-dir", "a", "--save-dir", "b"))]
    try:
        meant = translate_option(spelling, value)
    except UsageError as reason:
        with pytest.raises(UsageError) as caught:
            options(*given)
        first, *_, last = str(caught.value).splitlines()
        assert first == str(reason)
        assert spelling.flag in first
        assert last == f"write: {COMMAND} {shlex.join(FOLDERS)}"
        assert options(*shlex.split(last)[4:]) == options(*FOLDERS)  # the command that is named works
    else:
        assert options(*given) == options(*given[len(arguments) :], *meant)


def test_no_foreign_spelling_is_ours_and_each_is_listed_once() -> None:
    flags = [spelling.flag for spelling in SPELLINGS]
    assert len(flags) == len(set(flags))
    for spelling in SPELLINGS:
        given = [
            part for part in (spelling.means, spelling.values, spelling.answer, spelling.notice) if part is not None
        ]
        assert len(given) == 1, spelling.flag


def test_every_spelling_is_listed_in_the_documentation() -> None:
    text = (pathlib.Path(__file__).parents[4] / "docs" / "checkpoints.md").read_text(encoding="utf-8")
    assert [spelling.flag for spelling in SPELLINGS if f"{spelling.flag}" not in text] == []
    assert [flag for action in build_convert()._actions for flag in action.option_strings if flag not in text] == [
        "-h",
        "--help",
    ]


def test_the_command_of_the_pages_for_llama_runs() -> None:
    found = options(
        *shlex.split(
            "--bf16 --model-type GPT --loader llama_mistral --saver core --target-tensor-parallel-size 2 "
            "--target-pipeline-parallel-size 4 --checkpoint-type hf --load-dir in --save-dir out "
            "--tokenizer-model in/tokenizer.json --model-size llama3 --position-embedding-type rope"
        )
    )
    assert found == ConversionOptions(
        load_dir=pathlib.Path("in"),
        save_dir=pathlib.Path("out"),
        source=HF,
        to=OURS,
        family="llama",
        dtype="bf16",
        tokenizer=pathlib.Path("in/tokenizer.json"),
        tensor_size=2,
        pipeline_size=4,
        positions="rope",
    )


def test_the_two_steps_for_gpt2_become_a_single_command() -> None:
    first = options("--load_path", "gpt2", "--save_path", "out", "--target_tensor_model_parallel_size", "2")
    assert first == ConversionOptions(load_dir=pathlib.Path("gpt2"), save_dir=pathlib.Path("out"), tensor_size=2)
    second = "--model-type GPT --loader legacy --saver core --load-dir a --save-dir b --megatron-path /x"
    assert options(*second.split()) == ConversionOptions(
        load_dir=pathlib.Path("a"), save_dir=pathlib.Path("b"), source=MEGATRON, to=OURS
    )


def test_reasons_include_a_command_that_works() -> None:
    arguments = (
        "--model-type GPT --loader core --saver legacy --load-dir a --save-dir b --tokenizer_name gpt2 --dtype bf16"
    )
    with pytest.raises(UsageError) as caught:
        options(*arguments.split())
    lines = str(caught.value).splitlines()
    assert lines[0].startswith("--saver legacy: Megatron's legacy layout")
    assert lines[1].startswith("--tokenizer_name: nothing is downloaded")
    assert lines[2] == f"write: {COMMAND} --load-dir a --save-dir b --dtype bf16 --from megatron"


def test_the_way_back_of_the_old_script() -> None:
    assert options("--convert_checkpoint_from_megatron_to_transformers", *FOLDERS).to == HF


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "both folders are needed"),
        (("--load-dir", "a"), "both folders are needed"),
        (("--load-dir", "a", "--save-dir", "./a"), "must be another folder"),
        (("--loader", "unheard", *FOLDERS), "known are llama_mistral"),
        (("--target_params_dtype", "int8", *FOLDERS), "--dtype"),
    ],
)
def test_what_cannot_be_is_refused(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_convert(parsed(*arguments)) == 2
    error = capsys.readouterr().err
    assert message in error
    assert all(line.startswith("error: ") for line in error.splitlines())


@pytest.mark.parametrize(("text", "size"), [("5GB", 5 * 10**9), ("20 MB", 20 * 10**6), ("700", 700)])
def test_sizes(text: str, size: int) -> None:
    assert _bytes(text) == size


@pytest.mark.parametrize("text", ["0GB", "five", "5TB", "-5GB"])
def test_no_sizes(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="write 5GB"):
        _bytes(text)


def test_choices_are_those_of_the_package() -> None:
    choices = {action.option_strings[0]: action.choices for action in build_convert()._actions}
    assert tuple(choices["--family"] or ()) == tuple(FAMILIES)
    assert tuple(choices["--dtype"] or ()) == DTYPES
    assert tuple(choices["--to"] or ()) == (HF, OURS)
    assert tuple(choices["--from"] or ()) == (HF, OURS, MEGATRON)


def build_convert() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    _add_options(parser)
    return parser
