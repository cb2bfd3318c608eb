"""The board and the alerts of the operator on the data of a real one: its process, a real API server and Prometheus."""

import asyncio
import json
import pathlib
import re
import time
from collections.abc import AsyncIterator
from typing import Any

import kube
import pytest
import pytest_asyncio
import yaml
from fake_launchers import Launcher, NodesWithLaunchers, launcher, nodes_with_launchers
from operator_process import OperatorProcess, started
from operator_simulation import manifest
from scraped_job import CHART, Prometheus, running_prometheus, scrape_operator

from megatronapp_operator.backends.kubernetes.client.resources import JOBS, Object

pytestmark = [
    pytest.mark.asyncio,
    pytest.mark.timeout(600),
    pytest.mark.full("a minute of a real operator and Prometheus"),
]
DASHBOARD = CHART / "dashboards" / "operator.json"
RULES = CHART / "rules" / "operator.yaml"
LIMIT_S = 240.0
POLL_S = 0.25
FLAGS = ("--resync-seconds", "5")
VARIABLES = {"$__rate_interval": "20s", "$__range": "10m"}
SELECTOR = re.compile(r"\b((?:megatron|process)_[a-z_]+)(\{[^}]*\})?")


class Life:
    """A job that begins, fails once, is restarted and ends well."""

    def __init__(self, nodes: NodesWithLaunchers, job_launcher: Launcher, prometheus: Prometheus) -> None:
        self.nodes, self._launcher, self.prometheus = nodes, job_launcher, prometheus
        self.began = time.time()

    async def until(self, condition: Any, what: str) -> None:
        """Let machines do their part until something is so."""
        end = time.monotonic() + LIMIT_S
        while not (await condition() if asyncio.iscoroutinefunction(condition) else condition()):
            assert time.monotonic() < end, f"not within {LIMIT_S:g} s: {what}"
            await self.nodes.settle()
            await asyncio.sleep(POLL_S)

    async def status(self) -> Object:
        found = await self.nodes.api.get(JOBS, self.nodes.namespace, "job")
        assert found is not None
        return dict(found.get("status") or {})

    async def runs(self, attempt: int) -> None:
        self._launcher.train(attempt)

        async def running() -> bool:
            status = await self.status()
            return (status.get("phase"), status.get("attempt")) == ("Running", attempt)

        await self.until(running, f"attempt {attempt} runs")

    async def fails(self) -> None:
        await self.nodes.end("job-worker-1", 42, message="boom")
        await self.runs(1)

    async def ends(self) -> None:
        for name in await self.nodes.pods():
            await self.nodes.end(name, 0)

        async def ended() -> bool:
            return bool((await self.status())["phase"] == "Succeeded")

        await self.until(ended, "the job has ended")


@pytest_asyncio.fixture
async def life(
    plane: kube.ControlPlane, namespace: str, tmp_path: pathlib.Path
) -> AsyncIterator[tuple[Life, OperatorProcess]]:
    spec: dict[str, Any] = {"runPolicy": {"backoff": {"initialSeconds": 1}}}
    with started(plane, tmp_path, namespace, flags=FLAGS) as operator:
        operator.wait(operator.leads)
        target = operator.url.removeprefix("http://")
        async with nodes_with_launchers(plane, namespace) as nodes:
            job = await nodes.api.create(JOBS, manifest(namespace, **spec))
            with (
                launcher(job["metadata"]["uid"]) as job_launcher,
                running_prometheus(tmp_path, scrape_operator(target)) as prometheus,
            ):
                nodes.launchers["job"] = job_launcher
                yield Life(nodes, job_launcher, prometheus), operator
                assert job_launcher.refused == 0


def targets() -> list[tuple[str, Object]]:
    dashboard = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    return [(panel["title"], target) for panel in dashboard["panels"] for target in panel.get("targets", ())]


def alerts() -> dict[str, str]:
    (group,) = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    return {rule["alert"]: rule["expr"] for rule in group["rules"]}


def filled(query: str, namespace: str) -> str:
    for name, value in {**VARIABLES, "$namespace": namespace}.items():
        query = query.replace(name, value)
    assert "$" not in query, query
    return query


async def test_every_query_of_the_dashboard_has_data_of_a_job_that_fails_and_ends(
    life: tuple[Life, OperatorProcess],
) -> None:
    """From its first gang to its end each panel has had data, by series that a real operator writes."""
    made, _ = life
    namespace, pending = made.nodes.namespace, targets()
    assert len(pending) > 20

    def answered() -> bool:
        pending[:] = [
            (title, target)
            for title, target in pending
            if not made.prometheus.values(
                filled(target["expr"], namespace), since=None if target.get("instant") else made.began
            )
        ]
        return not pending

    await made.runs(0)
    starts = "megatron_job_time_to_running_seconds_count"
    await made.until(lambda: made.prometheus.values(starts) == [1.0], "the first start is scraped, as rates need two")
    await made.fails()
    try:
        await made.until(answered, "data for every query")
    except AssertionError:
        pytest.fail("no data for " + "; ".join(f"{title}: {target['expr']}" for title, target in pending))
    await made.ends()
    restarts = f'megatron_job_restarts_total{{namespace="{namespace}", name="job", reason="RankFailed"}}'
    assert made.prometheus.values(restarts) == [1.0]
    ended = f'megatron_job_phase{{namespace="{namespace}", name="job", phase="Succeeded"}}'
    await made.until(lambda: made.prometheus.values(ended) == [1.0], "the end is scraped")
    offered = made.prometheus.get("label/namespace/values", **{"match[]": "megatron_job_phase"})
    assert offered == [namespace], "what the variable of the board offers"


async def test_alerts_read_series_that_are_there_and_notice_leaders(
    life: tuple[Life, OperatorProcess], plane: kube.ControlPlane, tmp_path: pathlib.Path
) -> None:
    made, operator = life
    await made.runs(0)

    def states() -> dict[str, tuple[str, str]]:
        groups = made.prometheus.get("rules")["groups"]
        return {
            rule["name"]: (rule["health"], rule["state"])
            for group in groups
            for rule in group["rules"]
            if rule["type"] == "alerting"
        }

    names = {found[1] for expression in alerts().values() for found in SELECTOR.finditer(expression)}
    assert len(names) > 5

    def missing() -> set[str]:
        return {name for name in names if not made.prometheus.values(name)}

    try:
        await made.until(lambda: not missing(), "all series are scraped")
    except AssertionError:
        pytest.fail(f"no operator writes {missing()}")
    await made.until(
        lambda: all(states()[name] == ("ok", "inactive") for name in alerts()), "no alert of an operator that is well"
    )
    operator.kill()
    await made.until(lambda: states()["MegatronOperatorNoLeader"][1] == "pending", "the missing leader is noticed")
    folder = tmp_path / "two"
    folder.mkdir()
    with started(plane, tmp_path, made.nodes.namespace, "two", "first") as first:
        first.wait(first.leads)
        with started(plane, tmp_path, made.nodes.namespace, "three", "second") as second:
            second.wait(second.leads)
            scrapes = [
                scrape_operator(scrape.url.removeprefix("http://"), f"operator-{number}")
                for number, scrape in enumerate((first, second))
            ]
            with running_prometheus(folder, *scrapes) as prometheus:
                made.prometheus = prometheus
                await made.until(
                    lambda: "pending" in states().get("MegatronOperatorTwoLeaders", ()), "two leaders are noticed"
                )
