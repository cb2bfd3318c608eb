"""Tests that run in lanes clean up when they are interrupted."""

import os
import pathlib
import signal
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
PATIENCE_S = 60.0
TEST = """
import pathlib, signal, pytest

HERE = pathlib.Path(__file__).parent

@pytest.fixture(scope="session")
def job():
    yield
    (HERE / "cleaned").touch()

def test_that_goes_on(job):
    (HERE / "begun").write_text("begun")
    signal.pause()
"""


@pytest.mark.parametrize(("number", "to_all"), [(signal.SIGINT, True), (signal.SIGTERM, False)], ids=["Ctrl-C", "TERM"])
def test_fixtures_of_a_lane_end_before_it_does(tmp_path: pathlib.Path, number: signal.Signals, to_all: bool) -> None:
    (tmp_path / "test_long.py").write_text(TEST, encoding="utf-8")
    os.mkfifo(tmp_path / "begun")
    command = [sys.executable, "scripts/test_lanes.py", "--lanes", "1", str(tmp_path / "test_long.py")]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, start_new_session=True) as lanes:
        assert (tmp_path / "begun").read_text(encoding="utf-8") == "begun"
        (os.killpg if to_all else os.kill)(lanes.pid, number)
        said = lanes.communicate(timeout=PATIENCE_S)[0].decode()
    assert (tmp_path / "cleaned").exists(), said
    assert lanes.returncode == 1
    assert f"error: ended by {number.name}" in said
    assert "!! KeyboardInterrupt !!" in said


def test_names_of_failed_tests_come_last(tmp_path: pathlib.Path) -> None:
    (tmp_path / "test_wrong.py").write_text("def test_sum():\n    assert 1 + 1 == 3\n", encoding="utf-8")
    command = [sys.executable, "scripts/test_lanes.py", "--lanes", "1", str(tmp_path / "test_wrong.py")]
    lanes = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False, timeout=PATIENCE_S)
    assert lanes.returncode == 1
    assert lanes.stdout.splitlines()[-1].endswith("::test_sum failed (call)")
