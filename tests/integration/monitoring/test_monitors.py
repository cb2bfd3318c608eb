"""Targets that Prometheus keeps of all that call themselves hubs, as promtool applies the monitor's rules."""

import json
import subprocess

import pytest
import scraped_job
import yaml

GOOD = "10.1.2.3:8080"
POD = "__meta_kubernetes_pod"


CASES = {
    "our hub": (GOOD, {}),
    "our hub, IPv6": ("[fd00::1]:8080", {}),
    "another pod": (GOOD, {f"{POD}_name": "other"}),
    "the hub of another job": (GOOD, {f"{POD}_label_megatronapp_io_job_name": "bert"}),
    "no pod": (GOOD, {f"{POD}_label_megatronapp_io_job_name": "", f"{POD}_name": "", f"{POD}_ip": ""}),
    "an address that is not the pod's": (GOOD, {f"{POD}_ip": "10.9.9.9"}),
    "an address that begins as the pod's": (GOOD, {f"{POD}_ip": "10.1.2.30"}),
}
"""Target, and its labels that differ from those of our hub."""
HUBS = [name for name in CASES if name.startswith("our hub")]


@pytest.fixture(scope="module")
def relabeled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    """Labels of each target after the rules; none if it is dropped. promtool waits for its whole time-out, and may have
    found nothing by then."""
    config = scraped_job.scrape_config("hubs", scraped_job.monitors()["megatronapp-hubs"], GOOD, {})
    config["static_configs"] = [
        {"targets": [target], "labels": scraped_job.discovered_hub("gpt", target) | lie | {"__case": name}}
        for name, (target, lie) in CASES.items()
    ]
    path = tmp_path_factory.mktemp("targets") / "prometheus.yaml"
    path.write_text(yaml.safe_dump({"scrape_configs": [config]}), encoding="utf-8")
    for seconds in (1, 10, 60):
        command = ["promtool", "check", "service-discovery", f"--timeout={seconds}s", str(path), "hubs"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=180)
        assert done.returncode == 0, done.stderr
        if targets := json.loads(done.stdout):
            break
    return {found["discoveredLabels"]["__case"]: found["labels"] or {} for found in targets}


def test_every_target_is_judged(relabeled: dict[str, dict[str, str]]) -> None:
    assert set(relabeled) == set(CASES)


@pytest.mark.parametrize("name", HUBS)
def test_a_hub_is_scraped_as_that_of_its_job(name: str, relabeled: dict[str, dict[str, str]]) -> None:
    assert relabeled[name]["__address__"] == CASES[name][0]
    assert relabeled[name]["job_id"] == "gpt"


@pytest.mark.parametrize("name", [name for name in CASES if name not in HUBS])
def test_what_only_calls_itself_a_hub_is_not_scraped(name: str, relabeled: dict[str, dict[str, str]]) -> None:
    assert relabeled[name] == {}
