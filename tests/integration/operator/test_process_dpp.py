"""MegaDPP from manifest to weights: the job of examples/dpp.yaml, run by `megatronapp run` with real ranks."""

import os
import pathlib
import re
import subprocess
from typing import Any

import megatronapp_forking
import pytest
import yaml

pytestmark = [pytest.mark.process, pytest.mark.torch]
EXAMPLE = pathlib.Path(__file__).parents[3] / "examples" / "dpp.yaml"
STEPS = 3


def losses(forkserver: Any, folder: pathlib.Path, name: str, *flags: str, **spec: Any) -> list[tuple[str, str]]:
    """Run a short job of the example, with other blocks and flags, and return loss and gradient norm of each step."""
    document = yaml.safe_load(EXAMPLE.read_text(encoding="utf-8"))
    document["metadata"]["name"] = name
    for block, fields in {"training": {"trainIters": STEPS, "logInterval": 1, "lrWarmupIters": 1}, **spec}.items():
        changed = {**document["spec"].get(block, {}), **fields}
        document["spec"][block] = {name: value for name, value in changed.items() if value is not None}
    document["spec"]["args"] = list(flags)
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(document), encoding="utf-8")
    done = subprocess.run(
        [*megatronapp_forking.command(forkserver.python()), "run", str(path), "--follow"],
        check=False,
        env=os.environ | {"XDG_STATE_HOME": str(folder / "state")},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{name}: Succeeded" in done.stdout
    return re.findall(r"lm loss: (\S+) \| grad norm: (\S+)", done.stdout)


@pytest.mark.full("schedules of ranks are compared in test_dynamic_schedules")
def test_the_example_has_the_losses_of_the_same_job_without_it(forkserver: Any, tmp_path: pathlib.Path) -> None:
    quiet = {"trace": {"enabled": False}, "analyzer": {"enabled": False}}
    # MegatronApp's flags about nodes, as the launcher of a laptop has them
    nodes = ("--num-gpus", "4", "--node-ips", ",".join(["127.0.0.2"] * 4))
    dynamic = losses(forkserver, tmp_path, "dynamic", *nodes)
    static = losses(
        forkserver,
        tmp_path,
        "static",
        dpp={"enabled": False, "schedule": None, "chunks": None, "workload": None},
        parallelism={"virtualPipeline": 2},
        **quiet,
    )
    assert len(dynamic) == STEPS
    assert dynamic == static
