"""Names of jobs on a laptop."""

import pathlib

import pytest

from megatronapp_common.state import jobs_dir
from megatronapp_operator.backends.process.state import registry
from megatronapp_operator.errors import JobNotFoundError


@pytest.fixture(autouse=True)
def state(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.mark.parametrize("relative", [False, True])
def test_a_path_is_no_name_of_a_job(tmp_path: pathlib.Path, relative: bool) -> None:
    """Or `megatronapp delete` would remove a folder of the user that has a job.yaml."""
    folder = tmp_path / "project"
    folder.mkdir()
    jobs_dir().mkdir(parents=True)
    (folder / "job.yaml").write_text("kind: MegatronJob\n")
    name = f"../../../{folder.name}" if relative else str(folder)
    assert (jobs_dir() / name / "job.yaml").exists()
    with pytest.raises(JobNotFoundError, match="not found"):
        registry.view(name)
    assert [path.name for path in folder.iterdir()] == ["job.yaml"]
