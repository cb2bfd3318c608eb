"""Every command and option of the old text-generation server runs, or is answered with what to use."""

import argparse
import pathlib
import shlex
from typing import Any

import pytest

from megatronapp_common.command_parser import CommandParser
from megatronapp_common.job import load_job, megatron_arguments
from megatronapp_operator.cli import commands
from megatronapp_operator.cli.serve import manifest_of
from megatronapp_operator.cli.text.server_spellings import COMMANDS, SPELLINGS, LegacyCommand, LegacyOption, table
from megatronapp_trainer.serve.settings import read_command

DOCUMENT = pathlib.Path(__file__).parents[3] / "docs" / "serving.md"
VALUES = {
    "KIND": "rope",
    "NORM": "RMSNorm",
    "LAYERS": "local",
    "SHARE": "0.5",
    "VALUE": "1e-5",
    "FILE": "tokenizer.json",
    "T": "0.7",
    "P": "0.9",
}
OWN = [spelling for spelling in SPELLINGS if spelling.answer is None]


def parse(*arguments: str) -> argparse.Namespace:
    parser = CommandParser(prog="megatronapp")
    commands.register(parser.add_subparsers(parser_class=CommandParser))
    return parser.parse_args(list(arguments))


def arguments_for(option: LegacyOption) -> list[str]:
    return [option.flag] if option.takes is None else [option.flag, VALUES.get(option.takes, "4")]


def arguments_of(*arguments: str) -> tuple[dict[str, Any], list[str]]:
    """The manifest of a command line, and what its ranks are started with."""
    document = manifest_of(parse("serve", "--load", "saved", *arguments))
    return document, megatron_arguments(load_job(document))


def test_no_option_is_listed_twice_or_hides_another_option() -> None:
    flags = [spelling.flag for spelling in SPELLINGS]
    assert len(set(flags)) == len(flags)
    parse("serve", "--load", "saved")  # argparse refuses a flag that is added twice


@pytest.mark.parametrize("spelling", OWN, ids=lambda spelling: spelling.flag)
def test_an_option_runs_as_described(spelling: LegacyOption, capsys: pytest.CaptureFixture[str]) -> None:
    document, arguments = arguments_of(*arguments_for(spelling))
    read_command(arguments)  # the trainer knows all of them
    if spelling.passed:
        assert document["spec"]["args"] == arguments_for(spelling)
    elif spelling.means is not None:
        assert document == manifest_of(parse("serve", "--load", "saved", spelling.means, arguments_for(spelling)[1]))
    else:
        assert document == manifest_of(parse("serve", "--load", "saved"))
    errors = capsys.readouterr().err
    assert errors == (
        "" if spelling.belongs is None else f"note: {' '.join(arguments_for(spelling))}: {spelling.belongs}\n"
    )


@pytest.mark.parametrize(
    "spelling", [spelling for spelling in SPELLINGS if spelling.answer is not None], ids=lambda spelling: spelling.flag
)
def test_an_option_is_answered(spelling: LegacyOption, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse("serve", "--load", "saved", *arguments_for(spelling))
    assert ended.value.code == 2
    assert f"error: {spelling.flag}: {spelling.answer}\n" in capsys.readouterr().err


def test_what_is_passed_on_is_known_to_the_trainer() -> None:
    from megatronapp_trainer.config import build_parser

    known = {flag for action in build_parser()._actions for flag in action.option_strings}
    assert {option.flag for option in SPELLINGS if option.passed} <= known


@pytest.mark.parametrize(
    "command", [command for command in COMMANDS if command.ours], ids=lambda command: command.theirs
)
def test_a_command_is_a_known_command(command: LegacyCommand) -> None:
    assert callable(parse(*command.ours).func)


def test_a_whole_script_runs() -> None:
    line = """--tensor-model-parallel-size 2 --pipeline-model-parallel-size 1 --num-layers 24 --hidden-size 1024
        --num-attention-heads 16 --seq-length 1024 --max-position-embeddings 1024 --tokenizer-type GPT2BPETokenizer
        --vocab-file vocab.json --merge-file merges.txt --bf16 --micro-batch-size 1 --seed 42 --temperature 1.0
        --top_k 1 --enable-ws-server --port 5000 --max-batch-size 8"""
    document, arguments = arguments_of(*shlex.split(line))
    assert document["spec"]["serve"] == {"port": 5000, "maxBatch": 8}
    assert document["spec"]["procPerNode"] == 2
    read_command(arguments)


def test_the_documentation_shows_the_table() -> None:
    assert table() in DOCUMENT.read_text(encoding="utf-8")


def test_a_typing_error_in_a_required_option_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("serve", "--laod", "runs/a")
    assert "unknown option --laod; did you mean --load?" in capsys.readouterr().err
