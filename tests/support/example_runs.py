"""Short runs of an example with `megatronapp run` and real ranks."""

import os
import pathlib
import re
import subprocess
from typing import Any

import megatronapp_forking
import yaml

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"
STEPS = 3
QUIET = {"trace": {"enabled": False}, "analyzer": {"enabled": False}}
"""Blocks of a job whose ranks record nothing."""


class ExampleRuns:
    """Runs of jobs in a folder; their ranks are forked from a server."""

    def __init__(self, forkserver: Any, folder: pathlib.Path) -> None:
        self._program = megatronapp_forking.command(forkserver.python())
        self._folder = folder

    def losses(self, example: str, name: str, *flags: str, **spec: Any) -> list[tuple[str, str]]:
        """Run STEPS steps of an example, with other fields and flags; return loss and gradient norm of each step.

        Fields of the spec and of its blocks that are None are not written.
        """
        document = yaml.safe_load((EXAMPLES / f"{example}.yaml").read_text(encoding="utf-8"))
        document["metadata"]["name"] = name
        for block, fields in {"training": {"trainIters": STEPS, "logInterval": 1, "lrWarmupIters": 1}, **spec}.items():
            changed = {**document["spec"].get(block, {}), **fields} if isinstance(fields, dict) else fields
            document["spec"][block] = without_none(changed) if isinstance(changed, dict) else changed
        document["spec"] = without_none(document["spec"]) | {"args": list(flags)}
        path = self._folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(document), encoding="utf-8")
        done = subprocess.run(
            [*self._program, "run", str(path), "--follow"],
            check=False,
            env=os.environ | {"XDG_STATE_HOME": str(self._folder / "state")},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, f"{done.returncode}\n{done.stdout}{done.stderr}"
        assert f"{name}: Succeeded" in done.stdout
        return re.findall(r"lm loss: (\S+) \| grad norm: (\S+)", done.stdout)


def without_none(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}
