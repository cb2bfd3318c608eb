"""Panels whose queries promtool evaluates on written series."""

import json
import pathlib
import re
import subprocess
from typing import Any

import pytest
import yaml

BOARDS = pathlib.Path(__file__).parents[3] / "charts" / "megatronapp" / "dashboards"
RESTARTS = 'megatron_job_restarts_total{{namespace="team",name="{name}",reason="{reason}"}}'


def queries(dashboard: str, title: str) -> list[str]:
    document = json.loads((BOARDS / f"{dashboard}.json").read_text(encoding="utf-8"))
    (panel,) = [panel for panel in document["panels"] if panel["title"] == title]
    return [filled(target["expr"]) for target in panel["targets"]]


def query(dashboard: str, title: str) -> str:
    (text,) = queries(dashboard, title)
    return text


def filled(text: str) -> str:
    """Return a query with the choices that a user makes on the board."""
    for name in ("namespace", "name"):
        text = text.replace(f'=~"${name}"', '=~".*"')
    assert not re.search(r"\$[a-z_]", text)
    return text


def evaluate(folder: pathlib.Path, test: dict[str, Any]) -> None:
    path = folder / "test.yaml"
    path.write_text(yaml.safe_dump({"evaluation_interval": "1m", "tests": [{"interval": "1m", **test}]}))
    done = subprocess.run(["promtool", "test", "rules", str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_restarts_of_the_last_hour_are_shown_from_the_first_of_each_reason(tmp_path: pathlib.Path) -> None:
    """The series of a reason begins with its first restart, which is no increase of the series."""
    series = [
        {"series": RESTARTS.format(name="gpt", reason="Earlier"), "values": "4x200"},
        {"series": RESTARTS.format(name="gpt", reason="RankFailed"), "values": "_x10 1x29 3x160"},
        {"series": RESTARTS.format(name="bert", reason="RankFailed"), "values": "_x20 1x180"},
    ]
    expected = [(9, None), (15, 1), (25, 2), (45, 4), (75, 3), (85, 2), (150, 0)]
    checks = [
        {
            "expr": query("operator", "Restarts by reason"),
            "eval_time": f"{minute}m",
            "exp_samples": [
                {"labels": f'{{reason="{reason}"}}', "value": value}
                for reason, value in (("Earlier", 0), ("RankFailed", count))
                if value is not None
            ],
        }
        for minute, count in expected
    ]
    evaluate(tmp_path, {"input_series": series, "promql_expr_test": checks})


@pytest.mark.parametrize("phase", ["Pending", "Queued", "Starting", "Restarting"])
def test_jobs_of_a_queue_are_among_those_that_wait(tmp_path: pathlib.Path, phase: str) -> None:
    series = [
        {"series": f'megatron_job_phase{{namespace="team",name="a",phase="{phase}"}}', "values": "1x5"},
        {"series": 'megatron_job_phase{namespace="team",name="b",phase="Running"}', "values": "1x5"},
    ]
    check = {"expr": query("operator", "Wait"), "eval_time": "3m", "exp_samples": [{"labels": "{}", "value": 1}]}
    evaluate(tmp_path, {"input_series": series, "promql_expr_test": [check]})


@pytest.mark.parametrize(
    ("title", "metric"),
    [
        ("SM clock of suspects' devices", "DCGM_FI_DEV_SM_CLOCK"),
        ("Temperature of suspects' devices", "DCGM_FI_DEV_GPU_TEMP"),
        ("Power of suspects' devices", "DCGM_FI_DEV_POWER_USAGE"),
    ],
)
def test_devices_of_suspects_are_shown_next_to_the_others_of_their_node(
    tmp_path: pathlib.Path, title: str, metric: str
) -> None:
    """A node without suspects and a rank on the CPU are not shown."""
    values = {("n1", "0"): 1980, ("n1", "1"): 1200, ("n1", "2"): 1970, ("n1", "3"): 1990, ("n2", "0"): 1980}
    labels = 'namespace="team",job_id="gpt",cause="compute",state="confirmed"'
    series = [
        {"series": f'{metric}{{Hostname="{node}",gpu="{gpu}"}}', "values": f"{value}x5"}
        for (node, gpu), value in values.items()
    ]
    series += [
        {"series": f'megascan_suspect_info{{{labels},rank="3",node="n1",gpu="1"}}', "values": "1x5"},
        {"series": f'megascan_suspect_info{{{labels},rank="9",node="n2",gpu=""}}', "values": "1x5"},
    ]
    suspect, others = queries("slow-nodes", title)
    checks = [
        {"expr": text, "eval_time": "3m", "exp_samples": [{"labels": expected, "value": value}]}
        for text, expected, value in ((suspect, '{node="n1", gpu="1"}', 1200), (others, '{node="n1"}', 1980))
    ]
    evaluate(tmp_path, {"input_series": series, "promql_expr_test": checks})
