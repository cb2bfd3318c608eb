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
from megatronapp_operator.cli.server_spellings import COMMANDS, SPELLINGS, LegacyCommand, LegacyOption, table
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
OWN = [one for one in SPELLINGS if one.answer is None]


def parse(*words: str) -> argparse.Namespace:
    parser = CommandParser(prog="megatronapp")
    commands.register(parser.add_subparsers(parser_class=CommandParser))
    return parser.parse_args(list(words))


def said(one: LegacyOption) -> list[str]:
    return [one.flag] if one.takes is None else [one.flag, VALUES.get(one.takes, "4")]


def arguments_of(*words: str) -> tuple[dict[str, Any], list[str]]:
    """The manifest of a command line, and what its ranks are started with."""
    document = manifest_of(parse("serve", "--load", "saved", *words))
    return document, megatron_arguments(load_job(document))


def test_no_option_stands_twice_or_hides_one_of_ours() -> None:
    flags = [one.flag for one in SPELLINGS]
    assert len(set(flags)) == len(flags)
    parse("serve", "--load", "saved")  # argparse refuses a flag that is added twice


@pytest.mark.parametrize("one", OWN, ids=lambda one: one.flag)
def test_an_option_runs_as_it_says(one: LegacyOption, capsys: pytest.CaptureFixture[str]) -> None:
    document, arguments = arguments_of(*said(one))
    read_command(arguments)  # the trainer knows all of them
    if one.passed:
        assert document["spec"]["args"] == said(one)
    elif one.means is not None:
        assert document == manifest_of(parse("serve", "--load", "saved", one.means, said(one)[1]))
    else:
        assert document == manifest_of(parse("serve", "--load", "saved"))
    told = capsys.readouterr().err
    assert told == ("" if one.belongs is None else f"note: {' '.join(said(one))}: {one.belongs}\n")


@pytest.mark.parametrize("one", [one for one in SPELLINGS if one.answer is not None], ids=lambda one: one.flag)
def test_an_option_is_answered(one: LegacyOption, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse("serve", "--load", "saved", *said(one))
    assert ended.value.code == 2
    assert f"error: {one.flag}: {one.answer}\n" in capsys.readouterr().err


def test_what_is_passed_on_is_known_to_the_trainer() -> None:
    from megatronapp_trainer.config import build_parser

    known = {flag for action in build_parser()._actions for flag in action.option_strings}
    assert {one.flag for one in SPELLINGS if one.passed} <= known


@pytest.mark.parametrize("one", [one for one in COMMANDS if one.ours], ids=lambda one: one.theirs)
def test_a_command_is_one_of_ours(one: LegacyCommand) -> None:
    assert callable(parse(*one.ours).func)


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


def test_a_slip_in_one_of_two_needed_options_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("serve", "--laod", "runs/a")
    assert "unknown option --laod; did you mean --load?" in capsys.readouterr().err
