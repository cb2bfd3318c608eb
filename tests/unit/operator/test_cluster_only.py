"""Messages of a laptop about fields that only a cluster knows, and about flags that the trainer refuses."""

import pathlib
from typing import Any

import pytest
import yaml

from megatronapp_common import cli
from megatronapp_common.job import Spec, load_job
from megatronapp_common.job.fields import walk
from megatronapp_operator.backends.process.cluster_only import CLUSTER_ONLY, without_effect

EXAMPLE = pathlib.Path(__file__).parents[3] / "examples" / "demo.yaml"


def document(**spec: Any) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(EXAMPLE.read_text(encoding="utf-8"))
    for name, value in spec.items():
        found["spec"][name] = found["spec"].get(name, {}) | value if isinstance(value, dict) else value
    return found


def test_nothing_is_warned_of_without_cluster_only_fields() -> None:
    assert without_effect(load_job(document())) is None
    assert without_effect(load_job(document(network={}, imagePullPolicy="IfNotPresent"))) is None


def test_a_single_line_names_all_fields_without_effect() -> None:
    volume = {"claim": "corpus", "mountPath": "/data"}
    given = document(image="a:1", data={"volume": volume}, runPolicy={"maxRestarts": 1, "ttlSecondsAfterFinished": 9})
    assert without_effect(load_job(given)) == (
        "without a cluster these have no effect: spec.data.volume, spec.runPolicy.ttlSecondsAfterFinished, spec.image"
    )


def test_every_name_is_a_field() -> None:
    assert set(CLUSTER_ONLY) <= {path for path, _ in walk(Spec)}


@pytest.mark.parametrize(
    ("spec", "line"),
    [
        (
            {"dpp": {"enabled": True}, "args": ["--workload", "1048576"]},
            "error: spec.args[0]: --workload 1048576: give the number of threads that copy messages of a rank, 1 to "
            "64, or leave it out for 1; in MegatronApp it was the number of elements for each thread",
        ),
    ],
)
def test_a_laptop_refuses_what_it_cannot_do(
    spec: dict[str, Any],
    line: str,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(document(**spec)), encoding="utf-8")
    assert cli.main(["run", str(path)]) == 2
    assert capsys.readouterr().err.splitlines() == [line]
