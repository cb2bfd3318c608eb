"""Each `megatronapp` command of README and docs is one that its parser takes."""

import importlib.metadata
import pathlib
import re
import shlex
from collections.abc import Iterator

import pytest

from megatronapp_common import cli

ROOT = pathlib.Path(__file__).parents[2]
PAGES = sorted(
    str(path.relative_to(ROOT))
    for path in (ROOT / "README.md", *ROOT.glob("charts/*/README.md"), *ROOT.glob("docs/**/*.md"))
    if path.name != "from-megatronapp.md"  # old commands; tests/unit/test_from_megatronapp.py types them
)
INLINE = re.compile(r"`(megatronapp [^`]+)`")
TYPED = re.compile(r"^ *(?:[a-z]+=\"?\$\(|eval \"\$\()?(megatronapp .*)$", re.MULTILINE)
NUMBERS = {"N", "R"}
PARTS = 3
"""Largest number of words in a command that is only named, such as `megatronapp data prepare`."""


def commands(page: str) -> Iterator[list[str]]:
    """Yield the arguments of all commands that are written out whole."""
    text = (ROOT / page).read_text(encoding="utf-8").replace("\\\n", " ")
    blocks = "\n".join(re.findall(r"^(?: {4}.*|```[a-z]*\n.*?```)$", text, re.MULTILINE | re.DOTALL))
    for found in (*INLINE.findall(text), *TYPED.findall(blocks)):
        command = re.split(r" +#| \| |\)(?=\"|$)", found.replace("\n", " "))[0]
        if "..." in command or "[" in command:
            continue
        arguments = shlex.split(command, comments=True)
        if len(arguments) > PARTS or any(argument.startswith("-") for argument in arguments):
            yield ["0" if argument in NUMBERS else argument for argument in arguments[1:]]


def test_documented_commands_are_understood(capsys: pytest.CaptureFixture[str]) -> None:
    parser = cli.build_parser(importlib.metadata.entry_points(group="megatronapp.commands"))
    wrong = []
    for page in PAGES:
        for arguments in commands(page):
            try:
                parser.parse_args(arguments)
            except SystemExit as end:
                errors = capsys.readouterr().err
                wrong += [f"{page}: megatronapp {shlex.join(arguments)}: {errors}"] if end.code else []
    assert wrong == []


def test_commands_are_found() -> None:
    found = {tuple(arguments) for page in PAGES for arguments in commands(page)}
    assert ("ui", "gpt-tiny-cpu", "-n", "default") in found
    assert ("serve", "--print", "serve") in found
    assert len(found) > 35
