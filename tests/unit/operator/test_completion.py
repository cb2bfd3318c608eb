"""The bash completion gives names of jobs where a command takes one."""

import os
import pathlib
import subprocess
import sys

import pytest
import yaml

SCRIPT = 'source "$0"; COMP_WORDS=(megatronapp "$@"); COMP_CWORD=$#; _shtab_megatronapp; echo "${COMPREPLY[@]}"'


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A state folder with three finished jobs, the command, and its completion script."""
    made = tmp_path_factory.mktemp("completion")
    for name in ("demo", "demo-2", "other"):
        job = made / "state" / "megatronapp" / "jobs" / name
        job.mkdir(parents=True)
        (job / "job.yaml").write_text(yaml.safe_dump({"metadata": {"name": name}, "spec": {}}))
        (job / "status.json").write_text('{"phase": "Succeeded"}')
    (made / "bin").mkdir()
    command = made / "bin" / "megatronapp"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m megatronapp_common.cli "$@"\n')
    command.chmod(0o755)
    script = subprocess.run([str(command), "completion", "bash"], capture_output=True, text=True, check=True).stdout
    (made / "completion.bash").write_text(script)
    return made


def completed(folder: pathlib.Path, *arguments: str, state: str = "state") -> list[str]:
    environment = os.environ | {"XDG_STATE_HOME": str(folder / state), "PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}
    command = ["bash", "-c", SCRIPT, str(folder / "completion.bash"), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.split()


@pytest.mark.full("commands with a name of a job share the words", but=("logs", "delete"))
@pytest.mark.parametrize("command", ["get", "describe", "logs", "wait", "delete", "inject", "ui"])
def test_names_of_jobs_are_completed(folder: pathlib.Path, command: str) -> None:
    assert completed(folder, command, "de") == ["demo", "demo-2"]


def test_options_are_completed_after_names_and_files_by_the_shell(folder: pathlib.Path) -> None:
    assert completed(folder, "logs", "--fol") == ["--follow"]
    assert completed(folder, "get", "") == ["demo", "demo-2", "other"]
    assert "demo" not in completed(folder, "run", "de")


def test_no_jobs_complete_to_nothing(folder: pathlib.Path) -> None:
    assert completed(folder, "describe", "", state="empty") == []
