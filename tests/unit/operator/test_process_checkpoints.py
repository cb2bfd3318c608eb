"""A running job of this machine keeps the folder of its checkpoints for itself."""

import json
import os
import pathlib
import re
from collections.abc import Iterator
from typing import Any

import pytest
import rendered

from megatronapp_common.job import MegatronJob, load_job
from megatronapp_common.job.profiles.effective import LayeredJob
from megatronapp_operator.backends.process.state import lock, registry
from megatronapp_operator.backends.process.state.paths import JobPaths
from megatronapp_operator.errors import JobConflictError

FIELD: dict[str, Any] = {"checkpoint": {"save": "kept"}}
FLAG: dict[str, Any] = {"args": ["--save", "kept"]}
JOINED: dict[str, Any] = {"args": ["--save=first", "--save=kept"]}
BOTH: dict[str, Any] = {"checkpoint": {"save": "elsewhere"}, "args": ["--save", "kept"]}


def job(name: str, spec: dict[str, Any]) -> MegatronJob:
    document = rendered.make_job().to_dict()
    document["metadata"]["name"] = name
    return load_job(document | {"spec": document["spec"] | spec})


@pytest.fixture
def running(
    request: pytest.FixtureRequest, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[JobPaths]:
    """A job of the given spec whose backend is this process."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    paths = JobPaths.of("older")
    paths.root.mkdir(parents=True)
    with lock.hold(paths.lock):
        registry.accept(paths, LayeredJob(job("older", request.param), {}), uid=registry.new_uid())
        paths.backend.write_text(json.dumps({"pid": os.getpid()}), encoding="utf-8")
        yield paths


@pytest.mark.parametrize("running", [FIELD, FLAG, JOINED, BOTH], indirect=True)
@pytest.mark.parametrize(
    ("spec", "place"),
    [(FIELD, "spec.checkpoint.save"), (FLAG, "spec.args[0]"), (JOINED, "spec.args[1]"), (BOTH, "spec.args[0]")],
)
def test_a_folder_of_a_running_job_is_refused(running: JobPaths, spec: dict[str, Any], place: str) -> None:
    with pytest.raises(JobConflictError, match=re.escape(f'{place}: kept belongs to the running job "older"')):
        registry.require_own_checkpoints(job("newer", spec))
    registry.require_own_checkpoints(job("older", spec))


@pytest.mark.parametrize("running", [BOTH, {}], indirect=True)
def test_a_folder_that_no_job_saves_to_is_free(running: JobPaths) -> None:
    for spec in ({"checkpoint": {"save": "elsewhere"}}, {"args": ["--save", "other"]}, {}):
        registry.require_own_checkpoints(job("newer", spec))
