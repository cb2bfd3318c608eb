"""Phases of bench_operator.py. Each has a fresh cluster; its side is our operator, the Job controller or a peer."""

import asyncio
import contextlib
import dataclasses
import datetime
import re
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Collection, Sequence

import httpx
from operator_client import Binder, Object, Running, poll
from operator_cluster import NAMESPACE, Cluster, Program, cluster, node_names
from operator_jobs import indexed_job, megatron_job
from operator_peers import Peer, group_path, peer_job, serving_certificates, start_peer
from prometheus_client.parser import text_string_to_metric_families

from megatronapp_common.job.crd import PLURAL
from megatronapp_common.names import API_VERSION

MEGATRON_JOBS = f"/apis/{API_VERSION}/namespaces/{NAMESPACE}/{PLURAL}"
INDEXED_JOBS = f"/apis/batch/v1/namespaces/{NAMESPACE}/jobs"
PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"
LEASE = f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases/megatronapp-operator"
APPLIERS = 16
SETTLE_S = 3.0
"""After the last pod runs; what a process does then belongs to its CPU time."""
IDLE_S = 600.0
"""Two of the intervals at which the operator lists all objects again."""
CALM_S = 15.0
"""Before memory is read."""
POLL_S = 0.05
FAILED = 42
"""Exit code of a failed pod. Code 1 in the first minute may mean wrong arguments: the operator waits 5 s for more."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """Measured controller, and how its pods are bound to nodes."""

    qps: int | None
    """Request rate of the Job controller's client; None: the side is our operator."""
    hub: bool
    """True if pods have an agent; the operator's jobs have a hub, too."""
    scheduler: bool = False
    """True for Kubernetes' scheduler, false for the bench's binder."""
    peer: Peer | None = None
    """Another controller of training jobs, above the Job controller."""

    @property
    def who(self) -> str:
        if self.peer is not None:
            return self.peer.value
        return "operator" if self.qps is None else f"Job controller, QPS {self.qps}"

    @property
    def restarts(self) -> bool:
        """True if it restarts a gang of which a pod has failed."""
        return self.qps is None or self.peer is not None

    @property
    def path(self) -> str:
        """Path of its jobs."""
        if self.peer is not None:
            return group_path(self.peer, NAMESPACE)
        return MEGATRON_JOBS if self.qps is None else INDEXED_JOBS

    def job(self, name: str, pods: int) -> Object:
        if self.peer is not None:
            return peer_job(self.peer, NAMESPACE, name, pods)
        make = megatron_job if self.qps is None else indexed_job
        return make(NAMESPACE, name, pods, hub=self.hub)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One figure and its cost. Seconds are None where the end was not reached in time."""

    phase: str
    side: Side
    pods: int
    seconds: float | None
    cpu_s: float
    """CPU time of the measured process, until `SETTLE_S` after the end."""
    peak_mib: float
    rss_mib: float
    others_cpu_s: dict[str, float]
    """CPU time of all other processes that took part."""
    note: str = ""


@dataclasses.dataclass(slots=True, kw_only=True)
class Stage:
    """A cluster with one side in it."""

    cluster: Cluster
    side: Side
    program: Program
    running: Running
    limit_s: float
    helpers: Sequence[Program] = ()
    """Programs that the measured one needs as well, whose cost is added to its own."""

    @property
    def measured(self) -> list[Program]:
        """Programs whose cost is that of this side."""
        return [self.program, *self.helpers]

    @property
    def cpu_s(self) -> float:
        """CPU seconds of this side so far."""
        return sum(program.cpu_s for program in self.measured)

    async def apply(self, names: Sequence[str], pods: int) -> None:
        """Create jobs of `pods` pods each, some at a time."""
        limit = asyncio.Semaphore(APPLIERS)

        async def create(name: str) -> None:
            async with limit:
                await self.cluster.client.send("POST", self.side.path, self.side.job(name, pods))

        await asyncio.gather(*map(create, names))

    async def fail(self, pod: str) -> None:
        """End all containers of a pod as a training that has failed, as its kubelet would report it."""
        found = await self.cluster.client.send("GET", f"{PODS}/{pod}")
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
        ended = {"terminated": {"exitCode": FAILED, "reason": "Error", "startedAt": now, "finishedAt": now}}
        statuses = [{**status, "ready": False, "state": ended} for status in found["status"]["containerStatuses"]]
        status = {"phase": "Failed", "containerStatuses": statuses}
        await self.cluster.client.send("PATCH", f"{PODS}/{pod}/status", {"status": status})


class Stopwatch:
    """Wall time, and CPU time of all who take part, from its making on."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._others = stage.cluster.others(stage.measured)
        self._cpu_s = stage.cpu_s
        self.began = time.monotonic()

    async def measured(self, phase: str, pods: int, ended: float | None, note: str = "") -> Measured:
        """Return the cost of a phase, after all processes have settled."""
        await asyncio.sleep(SETTLE_S)
        stage = self._stage
        others = stage.cluster.others(stage.measured)
        return Measured(
            phase=phase,
            side=stage.side,
            pods=pods,
            seconds=None if ended is None else ended - self.began,
            cpu_s=stage.cpu_s - self._cpu_s,
            peak_mib=sum(program.peak_mib for program in stage.measured),
            rss_mib=sum(program.rss_mib for program in stage.measured),
            others_cpu_s={name: used - self._others.get(name, 0.0) for name, used in others.items()},
            note=note or ("" if ended is not None else f"{len(stage.running.names)} pods run at the end"),
        )


@contextlib.asynccontextmanager
async def staged(side: Side, limit_s: float) -> AsyncIterator[Stage]:
    """A fresh cluster with this side in it, which has already run a job of one pod."""
    async with cluster() as made, contextlib.AsyncExitStack() as stack, asyncio.TaskGroup() as group:
        running = Running()
        tasks = [group.create_task(running.follow(made.client, NAMESPACE))]
        if side.scheduler:
            made.scheduler()
        else:
            tasks.append(group.create_task(Binder(made.client, NAMESPACE, node_names()).run()))
        program, *helpers = await _start_side(made, side, stack)
        stage = Stage(cluster=made, side=side, program=program, running=running, limit_s=limit_s, helpers=helpers)
        await stage.apply(["warm-up"], 1)
        if await running.until(1, limit_s=limit_s) is None:
            raise RuntimeError(f"{side.who} does not run a job of one pod:\n{program.text[-3000:]}")
        await asyncio.sleep(SETTLE_S)
        yield stage
        for task in tasks:
            task.cancel()


async def _start_side(made: Cluster, side: Side, stack: contextlib.AsyncExitStack) -> list[Program]:
    """Start the programs of a side, the one that it is named by first."""
    if side.qps is None:
        return [made.operator()]
    if side.peer is None:
        return [made.job_controller(side.qps)]
    stack.enter_context(serving_certificates(made.plane))
    jobs = made.job_controller(side.qps, "garbage-collector-controller")
    return [*await start_peer(made, side.peer, NAMESPACE), jobs]


async def single_gang(side: Side, pods: int, limit_s: float) -> AsyncIterator[Measured]:
    """Measure a job of many pods from apply to all running; then it loses a pod, and all run again."""
    async with staged(side, limit_s) as stage:
        yield await _start(stage, "one job", ["gang"], pods)
        if side.restarts:
            known, clock = set(stage.running.names), Stopwatch(stage)
            await stage.fail(min(name for name in stage.running.names.values() if name.startswith("gang-")))
            ended = await stage.running.until(pods, limit_s=limit_s, known=known)
            yield await clock.measured("gang restart", pods, ended)


async def many_jobs(side: Side, jobs: int, limit_s: float) -> AsyncIterator[Measured]:
    """Many jobs of one pod, from the first apply to all running."""
    async with staged(side, limit_s) as stage:
        yield await _start(stage, "jobs of one pod", [f"small-{number}" for number in range(jobs)], 1)


async def idle(side: Side, jobs: int, limit_s: float) -> AsyncIterator[Measured]:
    """Count the operator's API requests while its jobs run without any change."""
    async with staged(side, limit_s) as stage:
        yield await _start(stage, "jobs of one pod", [f"idle-{number}" for number in range(jobs)], 1)
        await asyncio.sleep(CALM_S)
        before, clock = requests(stage), Stopwatch(stage)
        await asyncio.sleep(IDLE_S)
        found, ended = requests(stage) - before, time.monotonic()
        rate = found.total() / (jobs + 1) * 300 / (ended - clock.began)
        most = ", ".join(f"{count} {what}" for what, count in found.most_common(6))
        note = f"{found.total()} requests, {rate:.2f} a job in 5 min ({most})"
        yield await clock.measured("unchanged jobs", jobs + 1, ended, note)


def requests(stage: Stage) -> Counter[str]:
    """Requests of our operator so far by verb and resource, but for watches and the lease."""
    port = re.search(r"probes at port (\d+)", stage.program.text)
    assert port is not None, stage.program.text
    page = httpx.get(f"http://127.0.0.1:{port[1]}/metrics", trust_env=False).raise_for_status().text
    found: Counter[str] = Counter()
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if sample.name == "megatron_operator_api_requests_total":
                found[f"{sample.labels['verb']} {sample.labels['resource']}"] += int(sample.value)
    return found


async def _start(stage: Stage, phase: str, names: Sequence[str], pods: int) -> Measured:
    known, clock = set(stage.running.names), Stopwatch(stage)
    await stage.apply(names, pods)
    applied = time.monotonic() - clock.began
    total = len(names) * pods
    ended = await stage.running.until(total, limit_s=stage.limit_s, known=known)
    return await clock.measured(phase, total, ended, f"applied within {applied:.1f} s" if len(names) > 1 else "")


async def large(
    side: Side, pods: int, gangs: Collection[str], more: Collection[str], limit_s: float
) -> AsyncIterator[Measured]:
    """Kill our operator while large gangs run and start it again; then add more gangs, and read its memory."""
    async with staged(side, limit_s) as stage:
        yield await _start(stage, f"{len(gangs)} jobs", list(gangs), pods)
        for gang, lease in zip(gangs, (False, True), strict=False):
            yield await _killed(stage, gang, lease=lease)
            if await stage.running.until(len(gangs) * pods + 1, limit_s=limit_s) is None:
                raise RuntimeError(f"the gang does not run again:\n{stage.program.text[-3000:]}")
            await asyncio.sleep(SETTLE_S)
        clock, total = Stopwatch(stage), (len(gangs) + len(more)) * pods
        await stage.apply(list(more), pods)
        ended = await stage.running.until(total + 1, limit_s=limit_s)
        await asyncio.sleep(CALM_S)
        yield await clock.measured(f"memory, {len(gangs) + len(more)} jobs", total, ended)


async def _killed(stage: Stage, gang: str, *, lease: bool) -> Measured:
    """From the start of a new operator to its first write, about a pod that failed while there was none."""
    client, pods = stage.cluster.client, len(stage.running.names)
    stage.program.stop(signal.SIGKILL)
    await stage.fail(f"{gang}-worker-0")
    if not lease:
        await client.send("DELETE", LEASE)
    path = f"{MEGATRON_JOBS}/{gang}"
    before = (await client.send("GET", path))["metadata"]["resourceVersion"]

    async def acted() -> bool:
        return bool((await client.send("GET", path))["metadata"]["resourceVersion"] != before)

    stage.program = stage.cluster.operator()
    clock = Stopwatch(stage)
    led = await stage.program.wait_for_line("leading as") - clock.began
    ended = await poll(acted, limit_s=stage.limit_s, pause_s=POLL_S)
    name = "operator killed, its lease left" if lease else "operator killed, its lease gone"
    return await clock.measured(name, pods, ended, f"leads after {led:.1f} s")
