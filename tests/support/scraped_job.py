"""A real Prometheus that scrapes the hub of a real job, and an operator's metrics of its statuses.

What is scraped, and how series are renamed, is taken from the ServiceMonitors that the chart renders.
"""

import contextlib
import dataclasses
import json
import math
import pathlib
import re
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import httpx
import kube
import yaml
from chaos_job import Cli
from ports import reserved_ports
from prometheus_client import CollectorRegistry, start_http_server
from shared_tls import SHARED_TLS
from worker_groups import worker_groups

from megatronapp_common.job import read_status
from megatronapp_operator.metrics import JobFacts, OperatorMetrics
from megatronapp_operator.plan import (
    Backoff,
    JobSpec,
    JobState,
    Observed,
    RunPolicy,
    Status,
    Worker,
    WorkerOutcome,
    WorkerPhase,
    plan,
)

CHART = kube.ROOT / "charts" / "megatronapp"
HOME, TEAM, JOB, RESTARTED = "megatronapp", "team", "boards", "restarted"
SCRAPE = "1s"
PATIENCE_S = 240.0
POLL_S = 0.25
FAULTS = [
    {"rank": 1, "kind": "compute", "factor": 4, "fromStep": 20, "steps": 1_000_000},
    {"rank": 0, "kind": "link", "factor": 6, "peer": 1, "fromStep": 20, "steps": 1_000_000},
]
Object = dict[str, Any]


def manifest() -> Object:
    """Two ranks, a pipeline of two stages; one computes slowly, and so does the way back between them."""
    model = {"type": "gpt", "numLayers": 2, "hiddenSize": 32, "numAttentionHeads": 2, "seqLength": 16, "vocabSize": 64}
    training = {"microBatchSize": 1, "globalBatchSize": 4, "trainIters": 1_000_000, "lr": 1e-3, "evalIters": 0}
    return {
        "apiVersion": "megatronapp.io/v1alpha1",
        "kind": "MegatronJob",
        "metadata": {"name": JOB},
        "spec": {
            "nodes": 2,
            "procPerNode": 1,
            "gpusPerNode": 0,
            "parallelism": {"pipeline": 2},
            "model": model,
            "training": training,
            "data": {"mock": True},
            "dpp": {"enabled": True},
            "scope": {"training": {"enabled": True, "captureEvery": 50}},
            "trace": {"enabled": True},
            "analyzer": {"enabled": True, "retainSeconds": 0},
            "runPolicy": {"terminationGracePeriodSeconds": 1},
            "faults": FAULTS,
        },
    }


class Prometheus:
    """Queries of a running server."""

    def __init__(self, url: str) -> None:
        self._client = httpx.Client(base_url=f"{url}/api/v1", timeout=120, trust_env=False, verify=SHARED_TLS)

    def close(self) -> None:
        """End the open connections."""
        self._client.close()

    def get(self, path: str, **parameters: str | float) -> Any:
        """The data of an answer. Fails with Prometheus's words where it refuses."""
        answer = self._client.get(path, params=parameters).json()
        assert answer["status"] == "success", f"{parameters}: {answer.get('error')}"
        return answer["data"]

    def values(self, query: str, *, since: float | None = None) -> list[float]:
        """All values that are numbers: of now, or of every second since then."""
        if since is None:
            rows = [[row["value"]] for row in self._vector(self.get("query", query=query))]
        else:
            found = self.get("query_range", query=query, start=since, end=time.time(), step=1)
            rows = [row["values"] for row in found["result"]]
        numbers = [float(value) for row in rows for _, value in row]
        return [number for number in numbers if not math.isnan(number)]

    def labels(self, query: str) -> list[dict[str, str]]:
        """Labels of the series that answer now."""
        return [row["metric"] for row in self._vector(self.get("query", query=query))]

    @staticmethod
    def _vector(data: Any) -> list[Any]:
        return [{"metric": {}, "value": data["result"]}] if data["resultType"] == "scalar" else list(data["result"])


def until(condition: Callable[[], object], what: str, limit_s: float = PATIENCE_S) -> None:
    """Wait until the condition holds."""
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, f"not within {limit_s:g} s: {what}"
        time.sleep(POLL_S)


def monitors() -> dict[str, Object]:
    """Endpoints of the rendered ServiceMonitors by name."""
    arguments = (
        "megatronapp",
        str(CHART),
        "-n",
        HOME,
        "--kube-version",
        "1.35.4",
        "--set",
        "serviceMonitor.enabled=true",
    )
    shown = ("--show-only", "templates/monitoring/servicemonitors.yaml")
    done = subprocess.run(
        [kube.programs("helm") / "helm", "template", *arguments, *shown], capture_output=True, text=True, check=True
    )
    return {
        document["metadata"]["name"]: document["spec"]["endpoints"][0]
        for document in yaml.safe_load_all(done.stdout)
        if document
    }


def discovered_hub(job: str, target: str) -> dict[str, str]:
    """Return the labels that Prometheus discovers of a hub by its Service, as far as our rules read them."""
    meta = "__meta_kubernetes"
    names = {f"{meta}_{kind}_label_megatronapp_io_job_name": job for kind in ("service", "pod")}
    address = target.rpartition(":")[0].strip("[]")
    return names | {f"{meta}_pod_name": f"{job}-hub", f"{meta}_pod_ip": address}


def scrape_config(name: str, endpoint: Mapping[str, Any], target: str, labels: Mapping[str, str]) -> Object:
    """Return what Prometheus's operator makes of an endpoint, for one target whose labels are given."""

    def snake(rule: Mapping[str, Any]) -> Object:
        return {re.sub("[A-Z]", lambda found: f"_{found[0].lower()}", key): value for key, value in rule.items()}

    return {
        "job_name": name,
        "scrape_interval": SCRAPE,
        "scrape_timeout": SCRAPE,
        "honor_labels": endpoint.get("honorLabels", False),
        "follow_redirects": endpoint.get("followRedirects", True),
        "static_configs": [{"targets": [target], "labels": dict(labels)}],
        "relabel_configs": [snake(rule) for rule in endpoint.get("relabelings", ())],
        "metric_relabel_configs": [snake(rule) for rule in endpoint.get("metricRelabelings", ())],
    }


def scrape_hub(target: str) -> Object:
    """Scrape configuration of the job's hub."""
    labels = {"namespace": TEAM, "pod": f"{JOB}-hub", **discovered_hub(JOB, target)}
    return scrape_config("hubs", monitors()["megatronapp-hubs"], target, labels)


def scrape_operator(target: str, pod: str = "operator-0") -> Object:
    """Scrape configuration of an operator in the release's namespace."""
    labels = {"namespace": HOME, "service": "megatronapp-operator", "pod": pod}
    return scrape_config(pod, monitors()["megatronapp-operator"], target, labels)


@contextlib.contextmanager
def running_prometheus(folder: pathlib.Path, *scrapes: Object) -> Iterator[Prometheus]:
    """Scrapes all of them every second, and evaluates the chart's rules."""
    config = {
        "global": {"evaluation_interval": SCRAPE},
        "rule_files": [str(CHART / "rules" / "*.yaml")],
        "scrape_configs": list(scrapes),
    }
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    with reserved_ports(1) as (port,), (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(
            [
                *("setpriv", "--pdeathsig", "KILL", "prometheus", f"--config.file={folder / 'prometheus.yaml'}"),
                *(f"--storage.tsdb.path={folder / 'tsdb'}", f"--web.listen-address=127.0.0.1:{port}"),
            ],
            stdout=log,
            stderr=log,
        )
        server = Prometheus(f"http://127.0.0.1:{port}")
        try:
            until(
                lambda: process.poll() is not None or _answers(f"http://127.0.0.1:{port}/-/ready"),
                "Prometheus is ready",
            )
            assert process.poll() is None, (folder / "prometheus.log").read_text(encoding="utf-8")
            yield server
        finally:
            server.close()
            process.kill()
            process.wait()


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, trust_env=False, verify=SHARED_TLS).status_code == httpx.codes.OK
    except httpx.TransportError:
        return False


@contextlib.contextmanager
def operator_endpoint() -> Iterator[tuple[OperatorMetrics, str]]:
    """Metrics of an operator that leads, and where they are served."""
    registry = CollectorRegistry()
    metrics = OperatorMetrics(registry, version="0.1.0")
    metrics.leader(True)
    server, thread = start_http_server(0, addr="127.0.0.1", registry=registry)
    try:
        yield metrics, f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class Jobs:
    """Operator that feeds the metrics: statuses of the real job, and of one that the plan restarts."""

    def __init__(self, metrics: OperatorMetrics, root: pathlib.Path) -> None:
        self._metrics, self._root = metrics, root
        policy = RunPolicy(max_restarts=1000, backoff=Backoff(initial_s=2, max_s=2))
        self._restarted = JobState(
            spec=JobSpec(name=RESTARTED, uid="u", worker_groups=worker_groups(1), hub=False, policy=policy),
            status=Status(),
        )

    def read_verdicts(self) -> bool:
        """Read both jobs; return whether the real one has been given its slow nodes."""
        began = time.monotonic()
        path = self._root / "status.json"
        document = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        status = read_status(document)
        if document:
            table = document.get("rankTable", {"workers": []})
            nodes = {rank: worker["node"] for worker in table["workers"] for rank in worker["ranks"]}
            facts = JobFacts(workers=2, world_size=2, nodes=nodes)
            self._metrics.observe_job(TEAM, JOB, status, now=time.time(), facts=facts)
        self._restart()
        self._metrics.request("patch", "megatronjobs", "200")
        self._metrics.watch_event("megatronjobs", time.time())
        self._metrics.queue(1, time.monotonic() - began)
        self._metrics.reconciled(time.monotonic() - began, "ok")
        return {verdict.cause for verdict in status.slow_ranks} >= {"compute", "link"}

    def _restart(self) -> None:
        """Let its only worker run at one reconciliation and have failed at the next."""
        status = self._restarted.status
        worker = Worker(index=0, attempt=status.attempt, phase=WorkerPhase.RUNNING, started_at=time.time())
        if status.running_time is not None:
            failed = WorkerOutcome(code=137, reason="RankKilled", message="words", rank=0, signal=9)
            worker = dataclasses.replace(worker, phase=WorkerPhase.FAILED, finished_at=time.time(), outcome=failed)
        workers = (worker,) if status.attempt_time is not None else ()
        made = plan(self._restarted, Observed(secret=True, workers=workers), time.time())
        self._restarted = JobState(spec=self._restarted.spec, status=made.status)
        self._metrics.observe_job(TEAM, RESTARTED, made.status, now=time.time())


def pause(cli: Cli, prometheus: Prometheus, jobs: Jobs) -> None:
    """Pause the job until the pause has been scraped."""

    def is_scraped() -> bool:
        jobs.read_verdicts()
        return bool(prometheus.values("megatron_job_paused_gpus"))

    cli.output("training", JOB, "pause")
    until(is_scraped, "the pause is scraped")
    cli.output("training", JOB, "resume")


@contextlib.contextmanager
def scraped_job(folder: pathlib.Path) -> Iterator[tuple[Prometheus, Jobs]]:
    """Everything runs, and Prometheus has seen the slow nodes of the job."""
    cli = Cli(folder)
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(manifest()), encoding="utf-8")
    root = cli.state / "megatronapp" / "jobs" / JOB
    with operator_endpoint() as (metrics, operator):
        cli.output("run", str(path), "--detach")
        try:
            until((root / "hub.json").exists, "the job has a hub")
            hub = json.loads((root / "hub.json").read_text(encoding="utf-8"))["url"].removeprefix("http://")
            with running_prometheus(folder, scrape_hub(hub), scrape_operator(operator)) as prometheus:
                jobs = Jobs(metrics, root)
                until(jobs.read_verdicts, "both faults of the job are named")
                pause(cli, prometheus, jobs)
                yield prometheus, jobs
        finally:
            cli("delete", JOB, "--ignore-not-found")
