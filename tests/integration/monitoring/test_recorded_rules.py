"""Recorded series, which promtool evaluates from written ones."""

import pathlib
import subprocess
from typing import Any

import yaml

RULES = sorted((pathlib.Path(__file__).parents[3] / "charts" / "megatronapp" / "rules").glob("*.yaml"))
JOB = 'namespace="team",job_id="gpt"'
WASTED = "megascan_wasted_gpu_seconds_total"
COMPUTE, LINK = f'{JOB},cause="compute"', f'{JOB},cause="link"'
OTHER = 'namespace="team",job_id="bert",cause="compute"'
MEAN, LOST = "megascan_job:step_seconds_mean5m", "megascan_job:lost_gpu_hours"
PAUSED, IDLE = 'namespace="team",name="gpt"', "megatron_job:paused_gpu_hours"
SERIES = {
    MEAN: [
        # Ten steps a minute: of 2 s, from the sixth minute on of 4 s, and none after the sixteenth.
        {"series": f"megascan_step_duration_seconds_sum{{{JOB}}}", "values": "0+20x5 140+40x10 540x20"},
        {"series": f"megascan_step_duration_seconds_count{{{JOB}}}", "values": "0+10x16 160x20"},
    ],
    LOST: [
        {"series": f"{WASTED}{{{COMPUTE},pod='gpt-hub'}}", "values": "0+720x10"},
        {"series": f"{WASTED}{{{LINK},pod='gpt-hub'}}", "values": "1800x10"},
        {"series": f"{WASTED}{{{OTHER},pod='bert-hub'}}", "values": "9000x10"},
        # The pod of the hub is replaced after ten minutes, and the next one counts on from what is on its volume.
        {"series": f"{WASTED}{{{COMPUTE},pod='next'}}", "values": "_x11 7200x9"},
    ],
    IDLE: [
        # Paused half an hour after the beginning, with eight GPUs, until the seventieth minute.
        {"series": f"megatron_job_paused_since_timestamp_seconds{{{PAUSED}}}", "values": "_x30 1800x40 stale"},
        {"series": f"megatron_job_paused_gpus{{{PAUSED}}}", "values": "_x30 8x40 stale"},
    ],
}
EXPECTED: dict[str, list[tuple[int, dict[str, float]]]] = {
    MEAN: [(0, {}), (5, {JOB: 2.0}), (16, {JOB: 4.0}), (25, {})],
    LOST: [
        (0, {COMPUTE: 0.0, LINK: 0.5, OTHER: 2.5}),
        (5, {COMPUTE: 1.0, LINK: 0.5, OTHER: 2.5}),
        (18, {COMPUTE: 2.0}),
    ],
    IDLE: [(20, {}), (60, {PAUSED: 4.0}), (75, {})],
}


def recorded() -> set[str]:
    documents = [yaml.safe_load(path.read_text(encoding="utf-8")) for path in RULES]
    rules = [rule for document in documents for group in document["groups"] for rule in group["rules"]]
    return {rule["record"] for rule in rules if "record" in rule}


def cases() -> list[dict[str, Any]]:
    """Each series with what is expected of it by minute, in the form of promtool."""
    return [
        {
            "interval": "1m",
            "input_series": SERIES[name],
            "promql_expr_test": [
                {
                    "expr": name,
                    "eval_time": f"{minute}m",
                    "exp_samples": [
                        {"labels": f"{name}{{{labels}}}", "value": value} for labels, value in samples.items()
                    ],
                }
                for minute, samples in EXPECTED[name]
            ],
        }
        for name in SERIES
    ]


def test_every_recorded_series_has_a_case() -> None:
    assert recorded() == set(SERIES) == set(EXPECTED)


def test_the_recorded_series_have_the_values_of_their_names(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "recorded.yaml"
    document = {"rule_files": [*map(str, RULES)], "evaluation_interval": "1m", "tests": cases()}
    path.write_text(yaml.safe_dump(document, width=1000), encoding="utf-8")
    done = subprocess.run(["promtool", "test", "rules", str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
