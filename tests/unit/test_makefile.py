"""`make test` and `make test-py` run all tests also after failures, and none after an interruption."""

import os
import pathlib
import shutil
import signal
import subprocess

import pytest

MAKEFILE = pathlib.Path(__file__).parents[2] / "Makefile"
PYTHON = """#!/usr/bin/env bash
echo "$*" >> ran
case "$*" in
  *" -n "*) [ -z "$WAITS" ] || { echo begun > begun; exec sleep 300; }; exit "$CODE" ;;
  *) exit "$CODE_E2E" ;;
esac
"""
OTHERS = """#!/bin/sh
echo "$(basename "$0") $*" >> "$RAN"
exit $CODE_OTHERS
"""
SETUP = (
    "constraints.txt",
    "pyproject.toml",
    "csrc/CMakeLists.txt",
    ".venv/bin/.ready",
    "frontend/package-lock.json",
    "frontend/node_modules/.ready",
    "frontend/dist/index.html",
)
"""Files that `make setup` reads and writes, oldest first; with them nothing is left to do."""


def begin(folder: pathlib.Path, target: str = "test-py", **environment: str) -> subprocess.Popen[str]:
    """Run a target of make in a folder with a fake Python, which notes its arguments in `ran`, and fake tools."""
    shutil.copy(MAKEFILE, folder)
    for name in SETUP:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    python = folder / ".venv" / "bin" / "python"
    for path, content in (
        (python, PYTHON),
        (folder / "scripts" / "system_packages.sh", "#!/bin/sh\n"),
        (folder / "scripts" / "kube_tools.sh", "#!/bin/sh\nexit $CODE_TOOLS\n"),
        (folder / "scripts" / "native_checks.sh", OTHERS),
        (folder / "bin" / "npm", OTHERS),
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")
        path.chmod(0o755)
    search = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
    environment = {"PATH": search, "RAN": str(folder / "ran"), "CODE_OTHERS": "0"} | environment
    of_make = {
        name: "" for name in ("GNUMAKEFLAGS", "MAKEFILES", "MAKEFLAGS", "MAKELEVEL", "MFLAGS", "MEGATRONAPP_FULL")
    }
    return subprocess.Popen(
        ["make", "VENV=.venv", "WORKERS=2", "PYTEST_FLAGS=", target],
        cwd=folder,
        env=os.environ | of_make | {"WAITS": "", "CODE": "0", "CODE_E2E": "0", "CODE_TOOLS": "0"} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


@pytest.mark.parametrize(("code", "code_e2e"), [("0", "0"), ("1", "0"), ("0", "1"), ("1", "1")])
def test_the_demonstrations_run_also_after_a_failure(tmp_path: pathlib.Path, code: str, code_e2e: str) -> None:
    with begin(tmp_path, CODE=code, CODE_E2E=code_e2e) as process:
        output = process.communicate()[0]
    ran = (tmp_path / "ran").read_text(encoding="utf-8").splitlines()
    assert [line.split()[2] for line in ran] == ["-n", "tests/e2e"]
    assert (process.returncode == 0) == (code == code_e2e == "0"), output


@pytest.mark.parametrize(("code", "code_others"), [("0", "0"), ("1", "0"), ("0", "1")])
def test_the_demonstrations_run_last_and_alone(tmp_path: pathlib.Path, code: str, code_others: str) -> None:
    with begin(tmp_path, "test", CODE=code, CODE_OTHERS=code_others) as process:
        output = process.communicate()[0]
    *together, last = (tmp_path / "ran").read_text(encoding="utf-8").splitlines()
    assert sorted(line.split()[-1] for line in together) == ["asan", "test", "tests/gpu"], output
    assert last.startswith("-m pytest tests/e2e"), output
    assert (process.returncode == 0) == (code == code_others == "0"), output
    assert "jobserver" not in output, "tests that run make do not find the one that runs them"


def test_a_tool_that_cannot_be_built_ends_all_before_the_tests(tmp_path: pathlib.Path) -> None:
    with begin(tmp_path, CODE_TOOLS="1") as process:
        output = process.communicate()[0]
    assert process.returncode != 0
    assert "test-tools] Error 1" in output
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("target", ["test", "test-py"])
@pytest.mark.parametrize(("number", "to_all"), [(signal.SIGINT, True), (signal.SIGTERM, False)], ids=["Ctrl-C", "TERM"])
def test_an_interruption_ends_the_tests_and_begins_no_others(
    tmp_path: pathlib.Path, number: signal.Signals, to_all: bool, target: str
) -> None:
    os.mkfifo(tmp_path / "begun")
    with begin(tmp_path, target, WAITS="1") as process:
        (tmp_path / "begun").read_text(encoding="utf-8")
        (os.killpg if to_all else os.kill)(process.pid, number)
        output = process.communicate()[0]  # ends with the last process that has the pipe
    assert process.returncode != 0, output
    assert "tests/e2e --timeout" not in (tmp_path / "ran").read_text(encoding="utf-8")
