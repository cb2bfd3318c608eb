"""Alerts each have a runbook and a separate test, in which they fire and stay quiet; promtool runs them."""

import json
import pathlib
import re
import subprocess
from typing import Any

import pytest
import yaml

ROOT = pathlib.Path(__file__).parents[3]
RULES = ROOT / "charts" / "megatronapp" / "rules"
TESTS = pathlib.Path(__file__).parent / "rules"
RUNBOOKS = ROOT / "docs" / "runbooks"


def promtool(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(["promtool", *arguments], capture_output=True, text=True, check=False, timeout=120)


def alerts() -> dict[str, dict[str, Any]]:
    documents = [yaml.safe_load(path.read_text(encoding="utf-8")) for path in sorted(RULES.glob("*.yaml"))]
    rules = [
        rule for document in documents for group in document["groups"] for rule in group["rules"] if "alert" in rule
    ]
    assert len({rule["alert"] for rule in rules}) == len(rules), "an alert is there twice"
    return {rule["alert"]: rule for rule in rules}


ALERTS = alerts()


def test_the_rules_are_as_prometheus_wants_them() -> None:
    done = promtool("check", "rules", "--lint-fatal", *map(str, sorted(RULES.glob("*.yaml"))))
    assert done.returncode == 0, done.stdout + done.stderr


def test_each_alert_has_a_runbook_and_a_test_and_none_is_left_over() -> None:
    assert {path.stem for path in RUNBOOKS.glob("*.md")} == set(ALERTS)
    assert {path.stem for path in TESTS.glob("*.yaml")} == set(ALERTS)
    for name, rule in ALERTS.items():
        assert rule["annotations"]["runbook_url"] == f"docs/runbooks/{name}.md"
        assert rule["labels"]["severity"] in {"info", "warning", "critical"}
        text = (RUNBOOKS / f"{name}.md").read_text(encoding="utf-8")
        assert re.findall(r"^## (.*)$", text, re.MULTILINE) == ["Look", "Do"]
        links = re.findall(r"\]\((.*?)\)", text)
        assert all((RUNBOOKS / link.partition("#")[0]).exists() for link in links), links


def test_the_panels_that_runbooks_name_are_on_their_dashboards() -> None:
    panels = {}
    for path in (ROOT / "charts" / "megatronapp" / "dashboards").glob("*.json"):
        dashboard = json.loads(path.read_text(encoding="utf-8"))
        panels[dashboard["title"]] = {panel["title"] for panel in dashboard["panels"]}
    texts = [path.read_text(encoding="utf-8") for path in RUNBOOKS.glob("*.md")]
    lines = [line for text in texts for line in text.splitlines() if "board " in line]
    assert lines
    for line in lines:
        title, *titles = re.findall(r'"([^"]+)"', line)
        assert titles, line
        assert set(titles) <= panels[title], line


@pytest.mark.parametrize("name", sorted(ALERTS))
def test_each_test_sees_its_alert_fire_and_stay_quiet(name: str) -> None:
    cases = yaml.safe_load((TESTS / f"{name}.yaml").read_text(encoding="utf-8"))["tests"]
    checks = [check for case in cases for check in case["alert_rule_test"]]
    assert {check["alertname"] for check in checks} == {name}
    assert any(check["exp_alerts"] for check in checks)
    assert any(not any(check["exp_alerts"] for check in case["alert_rule_test"]) for case in cases)


def test_the_alerts_fire_when_they_should() -> None:
    done = promtool("test", "rules", *map(str, sorted(TESTS.glob("*.yaml"))))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.full("cases that differ in the expression", but=("always",))
@pytest.mark.parametrize("expression", ["vector(1)", "vector(1) > 1"], ids=["always", "never"])
def test_an_alert_that_always_or_never_fires_fails_its_test(tmp_path: pathlib.Path, expression: str) -> None:
    wrong = []
    for name, rule in sorted(ALERTS.items()):
        rules, test = tmp_path / f"{name}-rules.yaml", tmp_path / f"{name}.yaml"
        rules.write_text(yaml.safe_dump({"groups": [{"name": "g", "rules": [rule | {"expr": expression}]}]}))
        document = yaml.safe_load((TESTS / f"{name}.yaml").read_text(encoding="utf-8"))
        test.write_text(yaml.safe_dump(document | {"rule_files": [rules.name]}, width=1000))
        wrong.append(name if promtool("test", "rules", str(test)).returncode == 0 else "")
    assert set(wrong) == {""}
