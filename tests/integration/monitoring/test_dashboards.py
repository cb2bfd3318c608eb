"""Every query of every board against a real Prometheus that has scraped a real job returns data."""

import functools
import json
import pathlib
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest
from scraped_job import (
    CHART,
    JOB,
    RESTARTED,
    TEAM,
    Jobs,
    Prometheus,
    operator_endpoint,
    running_prometheus,
    scrape_operator,
    scraped_job,
    until,
)

pytestmark = [
    pytest.mark.process,
    pytest.mark.torch,
    pytest.mark.timeout(1200),
    pytest.mark.full(
        "scrapes a real job", but=("test_a_dashboard_fits_any_grafana", "test_the_alert_of_no_leader_is_pending")
    ),
]
BOARDS = sorted((CHART / "dashboards").glob("*.json"))
INTERVALS = {"$__rate_interval": "15s", "$__range": "10m", "$__interval": "1s"}
Object = dict[str, Any]


@pytest.fixture(scope="module")
def scraped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Prometheus, Jobs, float]]:
    began = time.time()
    with scraped_job(tmp_path_factory.mktemp("boards")) as (prometheus, jobs):
        yield prometheus, jobs, began


def read(path: pathlib.Path) -> Object:
    document: Object = json.loads(path.read_text(encoding="utf-8"))
    return document


def panels(dashboard: Object) -> list[Object]:
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def filled(query: str, job: str) -> str:
    for name, value in {**INTERVALS, "$namespace": TEAM, "$name": job}.items():
        query = query.replace(name, value)
    assert "$" not in query, query
    return query


def answers(prometheus: Prometheus, target: Object, began: float) -> bool:
    """Return whether the query has data for one of the two jobs that a user can choose."""
    since = None if target.get("instant") else began
    return any(prometheus.values(filled(target["expr"], job), since=since) for job in (JOB, RESTARTED))


@pytest.mark.parametrize("path", BOARDS, ids=lambda path: path.stem)
def test_every_query_returns_data(scraped: tuple[Prometheus, Jobs, float], path: pathlib.Path) -> None:
    prometheus, jobs, began = scraped
    pending = [
        (panel["title"], target)
        for panel in panels(read(path))
        for target in panel["targets"]
        if "megafbd_" not in target["expr"]  # the job runs MegaDPP, and cannot run both
        and "DCGM_" not in target["expr"]  # its ranks have no devices; test_panels.py evaluates these
    ]
    assert len(pending) > 10

    def none_is_left() -> bool:
        jobs.read_verdicts()
        pending[:] = [(title, target) for title, target in pending if not answers(prometheus, target, began)]
        return not pending

    try:
        until(none_is_left, "data for every query")
    except AssertionError:
        pytest.fail("no data for " + "; ".join(f"{title}: {target['expr']}" for title, target in pending))


@pytest.mark.parametrize("path", BOARDS, ids=lambda path: path.stem)
def test_every_variable_offers_the_job(scraped: tuple[Prometheus, Jobs, float], path: pathlib.Path) -> None:
    for variable in read(path)["templating"]["list"]:
        if variable["type"] != "query":
            continue
        found = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["query"]["query"])
        assert found is not None, variable["query"]
        match = {"match[]": filled(found[1], ".*")}
        assert {TEAM, JOB} & set(scraped[0].get(f"label/{found[2]}/values", **match)), variable["name"]


def test_the_slow_node_is_named_with_its_cost(scraped: tuple[Prometheus, Jobs, float]) -> None:
    prometheus, jobs, _ = scraped
    slow = 'megatron_job_slow_node_seconds_per_step{node="node-1", cause="compute"}'

    def are_named() -> bool:  # not right after a scrape that took too long
        jobs.read_verdicts()
        named = {(row["node"], row["cause"]) for row in prometheus.labels("megatron_job_slow_node")}
        return named == {("node-1", "compute"), ("node-0", "link"), ("node-1", "link")}

    until(are_named, "the slow nodes are named")
    until(lambda: [cost > 0 for cost in prometheus.values(slow)] == [True], "the cost of a slow node")


def test_series_of_hubs_are_of_the_job_that_is_scraped(scraped: tuple[Prometheus, Jobs, float]) -> None:
    rows: list[dict[str, str]] = []

    def both_are_there() -> bool:  # not right after a scrape that took too long
        rows[:] = scraped[0].labels('{__name__=~"megascan_.+"}')
        workers = {row["pod"] for row in rows if row["__name__"] == "megascan_phase_duration_seconds_sum"}
        return workers == {f"{JOB}-worker-0", f"{JOB}-worker-1"}

    until(both_are_there, "series of both workers")
    assert {(row["namespace"], row["job_id"]) for row in rows} == {(TEAM, JOB)}
    assert not {label for row in rows for label in row if label.startswith("exported_")}


def evaluated(prometheus: Prometheus) -> dict[str, Object]:
    """Rules of the chart by name, with their health and state."""
    return {rule["name"]: rule for group in prometheus.get("rules")["groups"] for rule in group["rules"]}


def test_the_alerts_are_evaluated_and_the_slow_node_is_pending(scraped: tuple[Prometheus, Jobs, float]) -> None:
    prometheus = scraped[0]
    rules = functools.partial(evaluated, prometheus)
    until(lambda: {rule["health"] for rule in rules().values()} == {"ok"}, "all rules are evaluated")
    until(lambda: rules()["MegatronJobSlowNode"]["state"] == "pending", "the alert of the slow node is pending")
    for name in ("MegatronOperatorNoLeader", "MegatronOperatorWatchStale", "MegascanHubDown", "MegatronJobStalled"):
        until(lambda name=name: rules()[name]["state"] == "inactive", f"{name} is inactive")  # type: ignore[misc]


def test_the_alert_of_no_leader_is_pending(tmp_path: pathlib.Path) -> None:
    with operator_endpoint() as (metrics, operator), running_prometheus(tmp_path, scrape_operator(operator)) as server:
        rules = functools.partial(evaluated, server)
        until(lambda: {rule["health"] for rule in rules().values()} == {"ok"}, "all rules are evaluated")
        until(lambda: rules()["MegatronOperatorNoLeader"]["state"] == "inactive", "the operator leads")
        metrics.leader(False)
        until(lambda: rules()["MegatronOperatorNoLeader"]["state"] == "pending", "no operator leads")
        assert rules()["MegatronOperatorTwoLeaders"]["state"] == "inactive"


@pytest.mark.parametrize("path", BOARDS, ids=lambda path: path.stem)
def test_a_dashboard_fits_any_grafana(path: pathlib.Path) -> None:
    dashboard = read(path)
    assert not {"id", "uid"} & set(dashboard)
    assert [variable["name"] for variable in dashboard["templating"]["list"]][:2] == ["datasource", "namespace"]
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    for panel in panels(dashboard):
        assert panel["title"]
        assert {json.dumps(queried["datasource"]) for queried in [panel, *panel["targets"]]} == {
            json.dumps({"type": "prometheus", "uid": "${datasource}"})
        }
    places = [panel["gridPos"] for panel in dashboard["panels"]]
    cells = [
        (x, y) for at in places for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])
    ]
    assert len(set(cells)) == len(cells), "panels overlap"
    assert all(x < 24 for x, _ in cells)
