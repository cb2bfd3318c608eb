"""Targets that Prometheus keeps of all that call themselves hubs, as promtool applies the monitor's rules."""

import json
import pathlib
import subprocess
from typing import Any

import pytest
import scraped_job
import yaml

GOOD = "10.1.2.3:8080"
POD = "__meta_kubernetes_pod"


def relabeled(target: str, found: dict[str, str], folder: pathlib.Path) -> dict[str, str]:
    """Labels of the target after the rules; none if it is dropped."""
    config = scraped_job.scrape_config("hubs", scraped_job.monitors()["megatronapp-hubs"], target, found)
    path = folder / "prometheus.yaml"
    path.write_text(yaml.safe_dump({"scrape_configs": [config]}), encoding="utf-8")
    command = ["promtool", "check", "service-discovery", "--timeout=1s", str(path), "hubs"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    (result,) = json.loads(done.stdout)
    labels: Any = result["labels"] or {}
    return dict(labels)


@pytest.mark.parametrize("target", [GOOD, "[fd00::1]:8080"])
def test_a_hub_is_scraped_as_that_of_its_job(target: str, tmp_path: pathlib.Path) -> None:
    labels = relabeled(target, scraped_job.discovered_hub("gpt", target), tmp_path)
    assert labels["__address__"] == target
    assert labels["job_id"] == "gpt"


@pytest.mark.parametrize(
    "lie",
    [
        pytest.param({f"{POD}_name": "other"}, id="another pod"),
        pytest.param({f"{POD}_label_megatronapp_io_job_name": "bert"}, id="the hub of another job"),
        pytest.param({f"{POD}_label_megatronapp_io_job_name": "", f"{POD}_name": "", f"{POD}_ip": ""}, id="no pod"),
        pytest.param({f"{POD}_ip": "10.9.9.9"}, id="an address that is not the pod's"),
        pytest.param({f"{POD}_ip": "10.1.2.30"}, id="an address that begins as the pod's"),
    ],
)
def test_what_only_calls_itself_a_hub_is_not_scraped(lie: dict[str, str], tmp_path: pathlib.Path) -> None:
    assert relabeled(GOOD, scraped_job.discovered_hub("gpt", GOOD) | lie, tmp_path) == {}
