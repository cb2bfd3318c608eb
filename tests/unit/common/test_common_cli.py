"""The one command: its help, its parts, its errors and exit codes."""

import argparse
import importlib.metadata
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint
from typing import Any

import pytest

from megatronapp_common import cli
from megatronapp_common.errors import JobError, OutputError

GROUP = "megatronapp.commands"
MODULE = """
from megatronapp_common.errors import JobError

def register(subparsers):
    greet = subparsers.add_parser("greet", help="say a word", description="Say a word.")
    greet.add_argument("--word", required=True, help="what to say")
    greet.add_argument("--loud", action="store_true", help="with an exclamation mark")
    greet.set_defaults(func=run)
    box = subparsers.add_parser("box", help="a group")
    inner = box.add_subparsers(metavar="COMMAND", required=True)
    inner.add_parser("open", help="open it").set_defaults(func=run)

def run(values):
    if values.word == "refuse":
        raise JobError("first: is wrong; write more", "second: is wrong; write less")
    if values.word == "interrupt":
        raise KeyboardInterrupt
    if values.word == "bug":
        raise ValueError("a bug")
    print(values.word + "!" * values.loud)
    return 7 if values.word == "seven" else 0
"""
Run = Callable[..., int]


@pytest.fixture
def run(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run the command line with one extra part, and without the trainer."""
    (tmp_path / "a_part_for_this_test.py").write_text(MODULE, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    points = [
        EntryPoint("greet", "a_part_for_this_test:register", GROUP),
        EntryPoint("trace", "a_part_that_does_not_exist:register", GROUP),
    ]
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: points)
    return lambda *arguments: cli.main(arguments)


def test_a_command_gives_its_exit_code(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("greet", "--word", "hello", "--loud") == 0
    assert capsys.readouterr().out == "hello!\n"
    assert run("greet", "--word", "seven") == 7


def test_no_command_shows_the_help(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert run() == 0
    text = capsys.readouterr().out
    assert text.startswith("usage: megatronapp COMMAND ...\n")
    assert run("--help") == 0
    assert capsys.readouterr().out == text


def test_help_lists_commands_by_part_with_examples(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    run("--help")
    text = capsys.readouterr().out
    assert "greet:\n  greet       say a word\n  box         a group\n" in text
    assert "shell:\n  completion  print a completion script\n" in text
    assert "examples:\n  megatronapp data prepare" in text
    assert "note: megatronapp-trainer is not installed; pip install megatronapp-trainer" in text


def test_version(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--version") == 0
    assert capsys.readouterr().out == f"megatronapp {importlib.metadata.version('megatronapp-common')}\n"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("gret", "error: unknown command 'gret'; did you mean greet?"),
        ("zzz", "error: unknown command 'zzz'; it is not near any known one"),
        ("box opne", "error: unknown command 'opne'; did you mean open?"),
        ("box", "error: the following arguments are required: COMMAND"),
        ("greet --wrod x", "error: unknown option --wrod; did you mean --word?"),
        ("greet", "error: the following arguments are required: --word"),
        ("greet --word x --luod", "error: unknown option --luod; did you mean --loud?"),
        ("greet --word x --lo", "error: unknown option --lo; did you mean --loud?"),
        ("greet --word x --luod=1", "error: unknown option --luod; did you mean --loud?"),
        ("greet --word x more", "error: unexpected argument 'more'"),
        ("--verzion", "error: unknown option --verzion; did you mean --version?"),
        ("completion bsh", "error: argument shell: 'bsh' is not possible; did you mean bash?"),
        ("data prepare", "error: 'data' is not available: megatronapp-trainer is not installed; "),
        ("trace export", "error: 'trace' is not available: megatronapp-analyzer is installed but cannot be loaded: "),
        ("dta", "error: unknown command 'dta'; did you mean data?"),
    ],
)
def test_a_typing_error_gets_a_single_line_and_code_2(
    run: Run, capsys: pytest.CaptureFixture[str], arguments: str, line: str
) -> None:
    assert run(*arguments.split()) == 2
    captured = capsys.readouterr()
    first, hint = captured.err.splitlines()
    assert first.startswith(line)
    assert hint.startswith("See 'megatronapp")
    assert captured.out == ""


def test_our_errors_are_lines_without_a_traceback(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("greet", "--word", "refuse") == 1
    assert capsys.readouterr().err == "error: first: is wrong; write more\nerror: second: is wrong; write less\n"


def test_a_bug_is_not_hidden(run: Run) -> None:
    with pytest.raises(ValueError, match="a bug"):
        run("greet", "--word", "bug")


def test_interrupt(run: Run) -> None:
    assert run("greet", "--word", "interrupt") == 130


@pytest.mark.parametrize("shell", cli.SHELLS)
def test_completion_scripts(run: Run, capsys: pytest.CaptureFixture[str], shell: str) -> None:
    assert run("completion", shell) == 0
    script = capsys.readouterr().out
    assert "megatronapp" in script
    assert ("greet" if shell == "tcsh" else "--loud") in script  # tcsh completes the commands only


def test_bash_completes(run: Run, capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path) -> None:
    run("completion", "bash")
    script = tmp_path / "completion.bash"
    script.write_text(capsys.readouterr().out, encoding="utf-8")
    command = "source $0; COMP_WORDS=(megatronapp greet --l); COMP_CWORD=2; _shtab_megatronapp; echo ${COMPREPLY[@]}"
    done = subprocess.run(["bash", "-c", command, str(script)], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["--loud"]


def test_a_reader_that_left_is_no_error(tmp_path: pathlib.Path) -> None:
    """Write the output of help into a pipe without a reader."""
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "megatronapp_common.cli", "completion", "bash"]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write)
    assert done.stderr == ""
    assert done.returncode == 141


def test_installed_parts_register_the_commands_of_the_table() -> None:
    for point in importlib.metadata.entry_points(group=GROUP):
        register: Any = point.load()
        subparsers = argparse.ArgumentParser().add_subparsers()
        register(subparsers)
        assert tuple(subparsers.choices) == cli.PARTS[point.name].commands


def test_registering_imports_nothing_heavy() -> None:
    code = "import sys; from megatronapp_common import cli; cli.main(['--version']); print(*sys.modules, sep='\\n')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = {name.partition(".")[0] for name in done.stdout.splitlines()}
    assert not loaded & {"torch", "megatron", "fastapi", "uvicorn", "kopf", "tokenizers", "numpy", "shtab"}


def test_job_errors_are_ours_and_others_are_not() -> None:
    assert cli.is_ours(JobError("a"))
    assert not cli.is_ours(ValueError("a"))


@pytest.mark.parametrize("output", ["file/trace.json", "none/trace.json", f"{'x' * 252}.json", "."])
def test_a_trace_that_cannot_be_written_is_an_error_for_users(
    output: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match=r"cannot write the trace: .+; choose another -o FILE"):
        cli.write_trace_file(pathlib.Path(output), b"{}")
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]
