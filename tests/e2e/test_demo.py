"""The demonstration as a person runs it, once for each kind of fault, at ranks and steps drawn from a seed."""

import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]

pytestmark = [pytest.mark.process, pytest.mark.timeout(900)]


@pytest.mark.parametrize(("kind", "seed"), [("compute", 11), ("host", 12), ("link", 13)])
def test_the_slow_one_is_named_and_nobody_else(kind: str, seed: int, tmp_path: pathlib.Path) -> None:
    done = subprocess.run(
        [sys.executable, "scripts/demo.py", "--no-wait", "--kind", kind, "--seed", str(seed)],
        cwd=ROOT,
        env=os.environ | {"XDG_STATE_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=840,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "outcome   right: 1 verdicts name the fault, 0 something else" in done.stdout
    assert ": fell" in done.stdout
