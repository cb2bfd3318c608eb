"""docs/python-client.ipynb on this machine: a real job with real ranks, agents and hub."""

import json
import pathlib
from typing import Any

import megatronapp_forking
import pytest
import yaml

from megatronapp.client import Client, JobNotFoundError, ManifestError, OperatorError, local
from megatronapp_common.job import Phase

ROOT = pathlib.Path(__file__).parents[3]
NOTEBOOK = ROOT / "docs" / "python-client.ipynb"
EXAMPLE = ROOT / "examples" / "gpt-tiny-cpu.yaml"
pytestmark = [pytest.mark.torch, pytest.mark.process]


def cells() -> list[str]:
    document = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    return ["".join(cell["source"]) for cell in document["cells"] if cell["cell_type"] == "code"]


def test_the_notebook_runs(
    forkserver: Any, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(local, "COMMAND", megatronapp_forking.command(forkserver.python()))
    names: dict[str, Any] = {}
    *before, submit, wait, read, delete = cells()
    for cell in before:
        exec(cell, names)
    with pytest.raises(JobNotFoundError):
        names["client"].job("notebook")
    try:
        exec(submit, names)
        exec(wait, names)
        assert names["status"].phase is Phase.SUCCEEDED
        assert "30 of 30" in capsys.readouterr().out
        exec(read, names)
        assert names["losses"].step.tolist() == list(range(30))
        assert names["steps"].complete.all()
        assert set(names["spans"]["rank"]) == {0, 1}
        assert {"forward", "backward"} <= set(names["spans"].kind)
        assert [job.name for job in names["client"].jobs()] == ["notebook"]
        with pytest.raises(OperatorError, match="attempt 7 does not exist"):
            list(names["job"].logs(attempt=7))
        with names["job"].page() as page:
            assert "#code=" in page.address
    finally:
        exec(delete, names)
    assert names["client"].jobs() == []


def test_a_suspended_manifest_is_refused(tmp_path: pathlib.Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    path = tmp_path / "job.yaml"
    with Client.local() as client:
        with pytest.raises(ManifestError, match="cannot read the manifest"):
            client.submit(path)
        document = yaml.safe_load(EXAMPLE.read_text(encoding="utf-8"))
        document["spec"]["suspend"] = True
        path.write_text(yaml.safe_dump(document), encoding="utf-8")
        with pytest.raises(ManifestError, match=r"spec\.suspend: true would start nothing"):
            client.submit(path)
        assert client.jobs() == []
