"""Prometheus metrics of the operator: its own loop, and the statuses of its jobs.

Series of a job are made at scrape time from its newest status, so they end when the job is deleted. No label has a
rank, a pod, a step or a time. Only the leader has series of jobs, or each would exist twice, once outdated.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from megatronapp_common.job.api.analyzer import SlowRank
from megatronapp_common.job.api.progress import Progress, TimeSpent
from megatronapp_common.job.api.status import (
    TERMINAL_PHASES,
    ConditionType,
    Phase,
    Replicas,
    Status,
)
from megatronapp_operator.plan import reasons
from megatronapp_operator.plan.policies.report import HANG, NAMED_STATES

RECONCILE_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
"""Upper bounds in seconds of one reconcile."""
RUNNING_BUCKETS_S = (5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 900.0, 1800.0, 3600.0)
"""Upper bounds in seconds from the creation of a gang until it runs."""
SLOW_NODES_SHOWN = 32
"""Most nodes of one job that are listed, costliest first."""
EARLIER = "Earlier"
"""Reason of restarts that the status had counted before this process saw the job."""
WATCHED = ("megatronjobs", "pods")
_JOB = ("namespace", "name")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JobFacts:
    """Properties of a job's spec and placement for metrics."""

    mode: str = "train"
    workers: int = 0
    world_size: int = 0
    data_parallel_size: int = 0
    """Model replicas of the current attempt."""
    desired_data_parallel_size: int = 0
    """Model replicas of the spec."""
    queue: str = ""
    gpus: int = 0
    """GPUs of all workers."""
    nodes: Mapping[int, str] = dataclasses.field(default_factory=dict)
    """Node of each rank, for verdicts without a node; an unknown rank has an empty one."""


@dataclasses.dataclass(frozen=True, slots=True)
class SlowNode:
    """Node that confirmed verdicts name, with the costliest of them."""

    node: str
    cause: str
    since: float
    seconds_per_step: float
    slowdown: float


@dataclasses.dataclass(slots=True)
class _JobMetrics:
    """State and history of one job."""

    status: Status
    facts: JobFacts
    restarts: dict[str, int] = dataclasses.field(default_factory=dict)
    """Restarts by reason."""
    verdict_times: dict[str, float] = dataclasses.field(default_factory=dict)
    """Times at which verdicts were first seen, by id."""


class OperatorMetrics:
    """All metrics of one operator process. Not thread-safe."""

    def __init__(self, registry: CollectorRegistry, *, version: str = "") -> None:
        self._reconcile = Histogram(
            "megatron_operator_reconcile_duration_seconds",
            "Seconds of one reconcile, from observing the job to writing its status.",
            ["outcome"],
            buckets=RECONCILE_BUCKETS_S,
            registry=registry,
        )
        for outcome in ("ok", "error"):
            self._reconcile.labels(outcome)
        self._depth = Gauge("megatron_operator_queue_depth", "Jobs that wait to be reconciled.", registry=registry)
        self._oldest = Gauge(
            "megatron_operator_queue_oldest_seconds",
            "Seconds that the oldest waiting job has waited.",
            registry=registry,
        )
        self._requests = Counter(
            "megatron_operator_api_requests",
            "Requests to the API server; the code is an HTTP status, 'terminating' (403: the namespace is being "
            "terminated), or 'error' (no answer).",
            ["verb", "resource", "code"],
            registry=registry,
        )
        self._watch = Gauge(
            "megatron_operator_watch_last_event_timestamp_seconds",
            "When a watch last received an event.",
            ["resource"],
            registry=registry,
        )
        self._missed = Counter(
            "megatron_operator_watch_missed",
            "Changes that a list found and no watch had reported.",
            ["resource"],
            registry=registry,
        )
        for resource in WATCHED:
            self._missed.labels(resource)
        self._leader = Gauge("megatron_operator_is_leader", "1 while this process holds the lease.", registry=registry)
        self._to_running = Histogram(
            "megatron_job_time_to_running_seconds",
            "From the creation of a gang until all its workers run.",
            buckets=RUNNING_BUCKETS_S,
            registry=registry,
        )
        build = Gauge("megatron_operator_build_info", "1; the version as a label.", ["version"], registry=registry)
        build.labels(version).set(1)
        if registry is not REGISTRY:  # which has it already
            ProcessCollector(registry=registry)
        self._jobs: dict[tuple[str, str], _JobMetrics] = {}
        registry.register(_JobCollector(self._jobs))

    def observe_job(
        self, namespace: str, name: str, status: Status, *, now: float, facts: JobFacts | None = None
    ) -> None:
        """Store the newest status of a job; `now` is in seconds since the epoch."""
        before = self._jobs.get((namespace, name))
        if before is not None and _became_running(before.status, status):
            assert status.running_time is not None and status.attempt_time is not None
            self._to_running.observe(status.running_time - status.attempt_time)
        kept = before.facts if before is not None else JobFacts()
        self._jobs[namespace, name] = _JobMetrics(
            status=status,
            facts=kept if facts is None else facts,
            restarts=_restarts(before, status),
            verdict_times=_verdict_times(before, status, now),
        )

    def forget_job(self, namespace: str, name: str) -> None:
        """Drop the series of a deleted job from the next scrape on."""
        self._jobs.pop((namespace, name), None)

    def reconciled(self, seconds: float, outcome: str) -> None:
        """Count a finished reconcile; `outcome` is "ok" or "error"."""
        self._reconcile.labels(outcome).observe(seconds)

    def request(self, verb: str, resource: str, code: str) -> None:
        """Count a request by the code of its answer (`code` of ApiError, or an HTTP status).

        `resource` is the plural, never an object's name.
        """
        self._requests.labels(verb, resource, code).inc()

    def queue(self, depth: int, oldest_s: float) -> None:
        """Set the number of waiting jobs, and the seconds that the oldest has waited."""
        self._depth.set(depth)
        self._oldest.set(oldest_s)

    def leader(self, leads: bool) -> None:
        """Set whether this process holds the lease; without it, all series of jobs are dropped."""
        self._leader.set(leads)
        if not leads:
            self._jobs.clear()

    def watch_event(self, resource: str, at: float) -> None:
        """Record the time of an event of a watch, in seconds since the epoch."""
        self._watch.labels(resource).set(at)

    def missed(self, resource: str, count: int) -> None:
        """Count objects of a list, other than the first, that differ from what the watch reported."""
        self._missed.labels(resource).inc(count)


def _became_running(before: Status, after: Status) -> bool:
    """Return True if all workers of an attempt run for the first time since this process sees the job."""
    if after.running_time is None or after.attempt_time is None:
        return False
    return before.running_time is None or before.attempt < after.attempt


def _restarts(before: _JobMetrics | None, status: Status) -> dict[str, int]:
    """Return restarts by reason, whose sum is the count of the status; that lists only the newest failures."""
    if before is None or status.restarts < before.status.restarts:
        return {EARLIER: status.restarts}  # also 0: without a first value the first restart is no increase
    missing = status.restarts - before.status.restarts
    counted = dict(before.restarts)
    newest = [
        failure
        for failure in status.failures
        if "Restart" in failure.action.value
        and failure.reason != reasons.DATA_PARALLEL_GROWS  # which the status does not count
        and failure not in before.status.failures
    ]
    named = [failure.reason for failure in newest[-missing:]] if missing else []
    for reason in [*named, *[EARLIER] * (missing - len(named))]:
        counted[reason] = counted.get(reason, 0) + 1
    return counted


def _named(status: Status) -> list[SlowRank]:
    return [verdict for verdict in status.slow_ranks if verdict.state in NAMED_STATES and verdict.cause != HANG]


def _verdict_times(before: _JobMetrics | None, status: Status, now: float) -> dict[str, float]:
    """Return when each verdict began or was first seen; for those of an earlier process, when the first of them was."""
    known = {} if before is None else before.verdict_times
    condition = status.condition(ConditionType.SLOW_NODE_DETECTED)
    first = condition.since if before is None and condition is not None and condition.status else now
    return {verdict.id: verdict.since_time or known.get(verdict.id, first) for verdict in _named(status)}


def slow_nodes(status: Status, facts: JobFacts, times: Mapping[str, float]) -> list[SlowNode]:
    """Return one entry per node and cause, the costliest first; a link has the nodes of both ends."""
    found: dict[tuple[str, str], SlowNode] = {}
    for verdict in _named(status):
        cost = verdict.seconds_per_step or 0.0
        for node in {verdict.node} if verdict.node else {facts.nodes.get(rank, "") for rank in verdict.ranks}:
            old = found.get((node, verdict.cause))
            since = times.get(verdict.id, 0.0)
            found[node, verdict.cause] = SlowNode(
                node=node,
                cause=verdict.cause,
                since=since if old is None else min(old.since, since),
                seconds_per_step=cost if old is None else max(old.seconds_per_step, cost),
                slowdown=max(verdict.slowdown or 1.0, 1.0 if old is None else old.slowdown),
            )
    return sorted(found.values(), key=lambda slow: (-slow.seconds_per_step, slow.node, slow.cause))[:SLOW_NODES_SHOWN]


class _JobCollector(Collector):
    """Collector of the series of all jobs."""

    def __init__(self, jobs: Mapping[tuple[str, str], _JobMetrics]) -> None:
        self._jobs = jobs

    def describe(self) -> Iterable[Metric]:
        """Return no metrics up front, so that registering does not scrape."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yield all families with the series of all jobs."""
        jobs = sorted(self._jobs.items())
        yield _info(jobs)
        yield _labelled("phase", "1 for the phase that the job is in.", "phase", jobs, lambda j: {j.status.phase: 1})
        yield _labelled(
            "workers", "Workers of the current attempt.", "state", jobs, lambda j: _workers(j.status.replicas)
        )
        yield _labelled(
            "data_parallel_size", "Model replicas: of the spec, and of the current attempt.", "state", jobs, _replicas
        )
        yield _labelled("time_spent_seconds", "Time since the submission, by use.", "use", jobs, _time_spent)
        for name, text, read in _GAUGES:
            yield _gauge(name, text, jobs, read)
        restarts = CounterMetricFamily(
            "megatron_job_restarts", "Restarts of the gang by reason.", labels=[*_JOB, "reason"]
        )
        for key, job in jobs:
            for reason, count in sorted(job.restarts.items()):
                restarts.add_metric([*key, _valid(reason)], count)
        yield restarts
        yield _labelled(
            "progress_unknown",
            "1 while the progress of the job is not known.",
            "reason",
            jobs,
            lambda j: _unknown(j.status),
        )
        yield from _paused(jobs)
        yield from _slow(jobs)


_Jobs = list[tuple[tuple[str, str], _JobMetrics]]


def _valid(label: str) -> str:
    """Return a label that can be encoded: JSON of a job's hub or pods may hold half of a surrogate pair."""
    return label.encode("utf-8", "replace").decode()


def _info(jobs: _Jobs) -> Metric:
    labels = [*_JOB, "mode", "workers", "world_size", "queue"]
    family = GaugeMetricFamily("megatron_job_info", "1; properties that do not change while a job runs.", labels=labels)
    for key, job in jobs:
        family.add_metric([*key, job.facts.mode, str(job.facts.workers), str(job.facts.world_size), job.facts.queue], 1)
    return family


def _labelled(
    name: str, text: str, label: str, jobs: _Jobs, read: Callable[[_JobMetrics], Mapping[str, float]]
) -> Metric:
    family = GaugeMetricFamily(f"megatron_job_{name}", text, labels=[*_JOB, label])
    for key, job in jobs:
        for value, number in read(job).items():
            family.add_metric([*key, _valid(str(value))], number)
    return family


def _gauge(name: str, text: str, jobs: _Jobs, read: Callable[[Status], float | None]) -> Metric:
    family = GaugeMetricFamily(f"megatron_job_{name}", text, labels=_JOB)
    for key, job in jobs:
        value = read(job.status)
        if value is not None:
            family.add_metric(key, value)
    return family


def _paused(jobs: _Jobs) -> Iterator[Metric]:
    since = GaugeMetricFamily(
        "megatron_job_paused_since_timestamp_seconds", "When the training was paused; absent if it is not.", labels=_JOB
    )
    gpus = GaugeMetricFamily(
        "megatron_job_paused_gpus", "GPUs that a pause leaves idle; absent if it is not paused.", labels=_JOB
    )
    for key, job in jobs:
        condition = job.status.condition(ConditionType.PAUSED)
        if condition is not None and condition.status:
            since.add_metric(key, condition.since)
            gpus.add_metric(key, job.facts.gpus)
    yield from (since, gpus)


def _slow(jobs: _Jobs) -> Iterator[Metric]:
    labels = [*_JOB, "node", "cause"]
    ratio = GaugeMetricFamily(
        "megatron_job_slow_node", "Time of a confirmed slow node over the time expected.", labels=labels
    )
    cost = GaugeMetricFamily(
        "megatron_job_slow_node_seconds_per_step", "Seconds that the node costs each step.", labels=labels
    )
    since = GaugeMetricFamily(
        "megatron_job_slow_node_since_timestamp_seconds", "When the node was first reported as slow.", labels=labels
    )
    for key, job in jobs:
        for slow_node in slow_nodes(job.status, job.facts, job.verdict_times):
            place = [*key, _valid(slow_node.node), _valid(slow_node.cause)]
            ratio.add_metric(place, slow_node.slowdown)
            cost.add_metric(place, slow_node.seconds_per_step)
            since.add_metric(place, slow_node.since)
    yield from (ratio, cost, since)


def _time_spent(job: _JobMetrics) -> dict[str, float]:
    """Return the seconds of a job by use."""
    spent = job.status.time_spent
    return {} if spent is None else {use.value: seconds for use, seconds in spent.seconds().items()}


def _workers(replicas: Replicas) -> dict[str, float]:
    """Return the numbers of workers by state."""
    states = ("desired", "pending", "running", "succeeded", "failed")
    return {state: getattr(replicas, state) for state in states}


def _replicas(job: _JobMetrics) -> dict[str, float]:
    """Return the model replicas that the spec asks for, and those of the current attempt."""
    facts = job.facts
    return {"desired": facts.desired_data_parallel_size, "current": facts.data_parallel_size}


def _progress(read: Callable[[Progress], float | None]) -> Callable[[Status], float | None]:
    return lambda status: None if status.progress is None else read(status.progress)


def _spent(read: Callable[[TimeSpent], float]) -> Callable[[Status], float | None]:
    """Return the reader of a number about spares; None: the job has never had one."""
    return lambda s: None if s.time_spent is None or s.time_spent.spares_since is None else read(s.time_spent)


def _absent(read: Callable[[TimeSpent], float]) -> Callable[[Status], float | None]:
    """Return the reader of a number about absent workers; None: the gang has always been whole."""
    return lambda s: None if s.time_spent is None or s.time_spent.absent_since is None else read(s.time_spent)


def _hub_ready(status: Status) -> float | None:
    """Return whether the hub of a job that has not ended runs; None: it has never failed to start, or is not needed."""
    condition = status.condition(ConditionType.HUB_READY)
    if condition is None or status.phase in TERMINAL_PHASES | {Phase.SUSPENDED}:
        return None
    return float(condition.status)


def _evictions_refused(status: Status) -> float | None:
    """Return whether evictions are refused; None: the job has never had a budget."""
    condition = status.condition(ConditionType.EVICTIONS_REFUSED)
    return None if condition is None else float(condition.status)


def _eviction_waits(status: Status) -> float | None:
    """Return whether an eviction waits for a checkpoint; None: the job has never had a budget."""
    condition = status.condition(ConditionType.EVICTIONS_REFUSED)
    return None if condition is None else float(condition.status and condition.reason == reasons.EVICTION_WAITS)


def _stalled(status: Status) -> bool:
    """Return True if ranks of a job that has not ended are known to make no progress (not if progress is unknown)."""
    condition = status.condition(ConditionType.STALLED)
    if condition is None or not condition.status or status.phase in TERMINAL_PHASES:
        return False
    return condition.reason != reasons.PROGRESS_UNKNOWN


def _unknown(status: Status) -> dict[str, float]:
    """Return the reasons for which the progress of a running gang is not known."""
    if status.phase in TERMINAL_PHASES | {Phase.SUSPENDED}:
        return {}
    stalled, token = status.condition(ConditionType.STALLED), status.condition(ConditionType.TOKEN_ACCEPTED)
    silent = stalled is not None and stalled.status and stalled.reason == reasons.PROGRESS_UNKNOWN
    locked = {token.reason: 1.0} if token is not None and not token.status else {}
    return ({reasons.PROGRESS_UNKNOWN: 1.0} if silent else {}) | locked


_GAUGES: tuple[tuple[str, str, Callable[[Status], float | None]], ...] = (
    ("attempt", "Life of the gang, counted from 0.", lambda s: s.attempt),
    ("stalled", "1 while ranks are known to make no progress.", lambda s: float(_stalled(s))),
    ("iteration", "Newest step.", _progress(lambda page: page.iteration)),
    ("total_iterations", "Steps of the whole training.", _progress(lambda page: page.total_iterations)),
    (
        "progress_timestamp_seconds",
        "When the newest step was received; before the first, when the gang began to run.",
        lambda s: s.running_time if s.progress_time is None else s.progress_time,
    ),
    ("loss", "Newest loss.", _progress(lambda page: page.loss)),
    ("tokens_per_second", "Speed of the whole job.", _progress(lambda page: page.tokens_per_second)),
    ("seconds_left", "Until the last step, at this speed.", _progress(lambda page: page.seconds_left)),
    (
        "effective_training_time_ratio",
        "Time spent on steps that were kept, over the time since submission.",
        lambda s: None if s.time_spent is None else s.time_spent.ratio,
    ),
    ("hub_ready", "0 while the hub does not start; absent if it has always started.", _hub_ready),
    ("spares", "Spares that hold nodes.", _spent(lambda spent: spent.spares)),
    ("spare_seconds", "Time for which spares have held nodes.", _spent(lambda spent: spent.spare_seconds)),
    (
        "spare_gpu_seconds",
        "Time for which spares have held GPUs, over all of them.",
        _spent(lambda spent: spent.spare_gpu_seconds),
    ),
    (
        "absent_worker_seconds",
        "Time for which smaller gangs ran, times the workers that they lacked.",
        _absent(lambda spent: spent.absent_seconds),
    ),
    (
        "absent_gpu_seconds",
        "The same for each GPU of these workers.",
        _absent(lambda spent: spent.absent_gpu_seconds),
    ),
    (
        "evictions_refused",
        "1 while a budget refuses evictions of the gang; absent if the job never had a budget.",
        _evictions_refused,
    ),
    ("eviction_waits", "1 while an eviction waits for a checkpoint; absent likewise.", _eviction_waits),
    (
        "checkpoint_timestamp_seconds",
        "When the newest checkpoint of the attempt was taken.",
        _progress(lambda page: page.checkpoint_time),
    ),
    ("start_timestamp_seconds", "When the first gang was created.", lambda s: s.start_time),
    ("completion_timestamp_seconds", "When the job ended.", lambda s: s.completion_time),
)
