"""The demonstration as a person runs it, once for each kind of fault, at ranks and steps drawn from a seed.

With two thirds of the steps; `make test-full` also runs the other two kinds, and slow compute unchanged.
"""

import json
import os
import pathlib
import subprocess
import sys

import demo
import pytest
import yaml
from perfetto_rule import dropped, read_chrome

ROOT = pathlib.Path(__file__).parents[2]

pytestmark = [pytest.mark.process, pytest.mark.timeout(900)]
in_full = pytest.mark.full("a demonstration takes two minutes; one is enough for each commit")


@pytest.fixture
def shorter(tmp_path: pathlib.Path) -> pathlib.Path:
    """The demonstration's job with fewer steps before, under and after the fault."""
    document = yaml.safe_load((ROOT / "examples" / "demo.yaml").read_text(encoding="utf-8"))
    document["spec"]["training"]["trainIters"] = 80
    document["spec"]["faults"][0] |= {"fromStep": 35, "steps": 35}
    path = tmp_path / "shorter.yaml"
    path.write_text(yaml.safe_dump(document), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("kind", "seed", "unchanged"),
    [
        ("compute", 11, False),
        pytest.param("compute", 14, True, marks=in_full),
        pytest.param("host", 12, False, marks=in_full),
        pytest.param("link", 13, False, marks=in_full),
    ],
)
def test_only_the_slow_rank_is_named(
    kind: str, seed: int, unchanged: bool, tmp_path: pathlib.Path, shorter: pathlib.Path
) -> None:
    manifest = [] if unchanged else ["--manifest", str(shorter)]
    done = subprocess.run(
        [sys.executable, "scripts/demo.py", "--no-wait", "--kind", kind, "--seed", str(seed), *manifest],
        cwd=ROOT,
        env=os.environ | {"XDG_STATE_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=840,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "outcome   right: 1 verdicts name the fault, 0 do not" in done.stdout
    assert ": fell" in done.stdout
    spans = read_chrome(json.loads((ROOT / demo.TRACE).read_text(encoding="utf-8")))
    assert len(spans) > 1000
    assert dropped(spans) == [], "Perfetto must show the whole trace of a real run"
