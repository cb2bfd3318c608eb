import json
from pathlib import Path
from typing import Any

from megatronapp_analyzer.hub.http import views
from megatronapp_analyzer.hub.neighbours import UserJobs


def write_job(folder: Path, status: dict[str, Any]) -> None:
    folder.mkdir()
    (folder / "job.yaml").write_text(f"metadata: {{name: {folder.name}, uid: uid-{folder.name}}}\n")
    (folder / "status.json").write_text(json.dumps(status))


def test_jobs_with_values_of_other_types_are_omitted_from_the_list(tmp_path: Path) -> None:
    write_job(tmp_path / "good", {"phase": "Succeeded", "progress": {"iteration": 3}})
    write_job(tmp_path / "wrong", {"phase": "Failed", "progress": {"iteration": "three"}})
    write_job(tmp_path / "own", {})
    (entry,) = views.neighbour_entries(UserJobs(tmp_path).entries("uid-own"))
    assert (entry.name, entry.phase, entry.here, entry.iteration) == ("good", "Succeeded", False, 3)
