"""Metrics of the operator: what statuses become, what is removed, and that nothing is counted twice."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from megatronapp_common.job.api.analyzer import SlowRank
from megatronapp_common.job.api.progress import TimeSpent
from megatronapp_common.job.api.status import (
    MAX_FAILURES,
)
from megatronapp_operator.metrics import EARLIER, SLOW_NODES_SHOWN, JobFacts, OperatorMetrics
from megatronapp_operator.plan import Condition, ConditionType, Failure, FailureAction, Phase, Progress, Status

NOW = 1000.0
JOB = {"namespace": "team", "name": "gpt"}


class Scrape:
    """Metrics and what a scrape of them gives."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.metrics = OperatorMetrics(self.registry, version="0.1.0")

    def see(self, status: Status, name: str = "gpt", now: float = NOW, facts: JobFacts | None = None) -> None:
        self.metrics.observe_job("team", name, status, now=now, facts=facts)

    def value(self, metric: str, /, **labels: str) -> float | None:
        return self.registry.get_sample_value(metric, labels)

    def rows(self, prefix: str) -> dict[str, list[dict[str, str]]]:
        families = text_string_to_metric_families(generate_latest(self.registry).decode())
        samples = [sample for family in families for sample in family.samples if sample.name.startswith(prefix)]
        return {
            name: [sample.labels for sample in samples if sample.name == name]
            for name in {sample.name for sample in samples}
        }


@pytest.fixture
def scrape() -> Scrape:
    return Scrape()


def test_a_gang_without_a_first_step_has_made_no_progress_since_it_began_to_run(scrape: Scrape) -> None:
    """The alert MegatronJobNoProgress needs a time for it."""
    times: list[float | None] = []
    for status in (
        Status(phase=Phase.STARTING),
        Status(phase=Phase.RUNNING, running_time=NOW - 60),
        Status(phase=Phase.RUNNING, running_time=NOW - 60, progress_time=NOW),
    ):
        scrape.see(status)
        times.append(scrape.value("megatron_job_progress_timestamp_seconds", **JOB))
    assert times == [None, NOW - 60, NOW]


def failure(attempt: int, reason: str = "RankFailed", action: FailureAction = FailureAction.RESTART) -> Failure:
    return Failure(time=NOW + attempt, attempt=attempt, reason=reason, message="words", action=action)


def slow(number: int, *ranks: int, state: str = "confirmed", cause: str = "compute", cost: float = 0.5) -> SlowRank:
    return SlowRank(
        id=f"v{number}",
        subject="rank",
        ranks=ranks,
        cause=cause,
        state=state,
        sentence="slow",
        slowdown=1.5,
        seconds_per_step=cost,
    )


def test_a_status_becomes_series_without_pod_or_rank(scrape: Scrape) -> None:
    progress = Progress(attempt=2, iteration=7, total_iterations=9, loss=1.5, tokens_per_second=64.0, seconds_left=3.0)
    status = Status(phase=Phase.RUNNING, attempt=2, progress=progress, progress_time=NOW, start_time=NOW - 60)
    scrape.see(status, facts=JobFacts(workers=2, world_size=16, queue="gpus"))
    assert scrape.value("megatron_job_phase", **JOB, phase="Running") == 1
    assert scrape.value("megatron_job_phase", **JOB, phase="Pending") is None
    assert scrape.value("megatron_job_info", **JOB, mode="train", workers="2", world_size="16", queue="gpus") == 1
    for name, value in {"attempt": 2, "iteration": 7, "total_iterations": 9, "loss": 1.5, "stalled": 0}.items():
        assert scrape.value(f"megatron_job_{name}", **JOB) == value
    assert scrape.value("megatron_job_completion_timestamp_seconds", **JOB) is None
    labels = {label for rows in scrape.rows("megatron_").values() for row in rows for label in row}
    assert not labels & {"rank", "pod", "step", "uid"}


@pytest.mark.parametrize(
    ("phase", "reason", "stalled", "unknown"),
    [
        (Phase.RUNNING, "RankHung", 1, []),
        (Phase.RUNNING, "ProgressUnknown", 0, ["ProgressUnknown"]),
        (Phase.FAILED, "ProgressDeadlineExceeded", 0, []),
        (Phase.SUSPENDED, "ProgressUnknown", 0, []),
    ],
)
def test_a_job_without_information_is_not_reported_as_hanging(
    scrape: Scrape, phase: Phase, reason: str, stalled: int, unknown: list[str]
) -> None:
    condition = Condition(
        type=ConditionType.STALLED, status=True, reason=reason, message="words", since=NOW, generation=1
    )
    scrape.see(Status(phase=phase, conditions=(condition,)))
    assert scrape.value("megatron_job_stalled", **JOB) == stalled
    name = "megatron_job_progress_unknown"
    assert [row["reason"] for row in scrape.rows(name).get(name, [])] == unknown
    refused = dataclasses.replace(condition, type=ConditionType.TOKEN_ACCEPTED, status=False, reason="TokenRefused")
    scrape.see(Status(phase=Phase.RUNNING, conditions=(refused,)))
    assert scrape.value("megatron_job_progress_unknown", **JOB, reason="TokenRefused") == 1


@pytest.mark.parametrize("phase", [Phase.RUNNING, Phase.STARTING, Phase.SUSPENDED, Phase.SUCCEEDED])
def test_a_hub_that_does_not_start_is_reported_while_the_job_needs_it(scrape: Scrape, phase: Phase) -> None:
    name = "megatron_job_hub_ready"
    scrape.see(Status(phase=phase))
    assert scrape.value(name, **JOB) is None
    waits = Condition(type=ConditionType.HUB_READY, status=False, reason="ImagePullBackOff", since=NOW)
    scrape.see(Status(phase=phase, conditions=(waits,)))
    needed = phase in {Phase.RUNNING, Phase.STARTING}
    assert scrape.value(name, **JOB) == (0 if needed else None)
    scrape.see(Status(phase=phase, conditions=(dataclasses.replace(waits, status=True),)))
    assert scrape.value(name, **JOB) == (1 if needed else None)


def test_a_pause_has_a_beginning_and_gpus_while_it_lasts(scrape: Scrape) -> None:
    paused = Condition(type=ConditionType.PAUSED, status=True, reason="PausedByOrder", since=NOW - 60)
    scrape.see(Status(phase=Phase.RUNNING, conditions=(paused,)), facts=JobFacts(gpus=16))
    assert scrape.value("megatron_job_paused_since_timestamp_seconds", **JOB) == NOW - 60
    assert scrape.value("megatron_job_paused_gpus", **JOB) == 16
    scrape.see(Status(phase=Phase.RUNNING, conditions=(dataclasses.replace(paused, status=False),)))
    assert scrape.value("megatron_job_paused_gpus", **JOB) is None


def test_facts_stay_until_new_facts_are_reported(scrape: Scrape) -> None:
    scrape.see(Status(), facts=JobFacts(workers=3))
    scrape.see(Status(phase=Phase.STARTING))
    assert scrape.value("megatron_job_info", **JOB, mode="train", workers="3", world_size="0", queue="") == 1


def test_a_deleted_job_leaves_nothing(scrape: Scrape) -> None:
    scrape.see(Status(slow_ranks=(slow(1, 0),), restarts=1))
    scrape.see(Status(), name="other")
    scrape.metrics.forget_job("team", "gpt")
    scrape.metrics.forget_job("team", "gpt")
    left = {row["name"] for rows in scrape.rows("megatron_job_").values() for row in rows if "name" in row}
    assert left == {"other"}


def test_an_operator_without_the_lease_reports_no_jobs(scrape: Scrape) -> None:
    scrape.metrics.leader(True)
    scrape.see(Status())
    assert scrape.value("megatron_operator_is_leader") == 1
    scrape.metrics.leader(False)
    assert scrape.value("megatron_operator_is_leader") == 0
    assert scrape.value("megatron_job_phase", **JOB, phase="Pending") is None


def test_time_to_running_is_counted_once_for_each_attempt_that_was_watched(scrape: Scrape) -> None:
    running = Status(attempt=0, attempt_time=NOW, running_time=NOW + 12)
    scrape.see(running)  # seen by an earlier process already
    scrape.see(running)
    assert scrape.value("megatron_job_time_to_running_seconds_count") == 0
    again = Status(attempt=1, attempt_time=NOW + 50)
    for status in (again, dataclasses.replace(again, running_time=NOW + 70), running):
        scrape.see(status)
    assert scrape.value("megatron_job_time_to_running_seconds_count") == 1
    assert scrape.value("megatron_job_time_to_running_seconds_sum") == 20


def test_restarts_by_reason_and_those_from_before(scrape: Scrape) -> None:
    scrape.see(Status(), name="fresh")
    assert scrape.value("megatron_job_restarts_total", namespace="team", name="fresh", reason=EARLIER) == 0
    scrape.see(Status(restarts=4, failures=(failure(2), failure(3))))
    assert scrape.value("megatron_job_restarts_total", **JOB, reason=EARLIER) == 4
    scrape.see(Status(restarts=5, failures=(failure(2), failure(3), failure(4, "NodeLost"))))
    assert scrape.value("megatron_job_restarts_total", **JOB, reason="NodeLost") == 1
    ended = failure(5, "RankFailed", FailureAction.FAIL_JOB)
    scrape.see(Status(restarts=5, failures=(failure(3), failure(4, "NodeLost"), ended)))
    assert scrape.value("megatron_job_restarts_total", **JOB, reason="RankFailed") is None


def test_a_gang_that_ends_to_grow_is_not_restarted(scrape: Scrape) -> None:
    scrape.see(Status(restarts=1, failures=(failure(1, "LostNode"),)))
    grows = [failure(number, "DataParallelGrows") for number in (2, 3)]
    scrape.see(Status(restarts=2, failures=(failure(1, "LostNode"), failure(4, "RankFailed"), *grows)))
    rows = scrape.rows("megatron_job_restarts_total")["megatron_job_restarts_total"]
    assert {row["reason"] for row in rows} == {EARLIER, "RankFailed"}
    assert scrape.value("megatron_job_restarts_total", **JOB, reason="RankFailed") == 1


@given(st.lists(st.sampled_from(["RankFailed", "PeerLost", "Preempted"]), max_size=30), st.integers(1, 20))
def test_restarts_over_all_reasons_are_what_the_status_counts(reasons: list[str], stride: int) -> None:
    scrape, failures = Scrape(), [failure(number, reason) for number, reason in enumerate(reasons)]
    for end in [*range(0, len(failures), stride), len(failures)]:
        scrape.see(Status(restarts=end, failures=tuple(failures[:end][-MAX_FAILURES:])))
        rows = scrape.rows("megatron_job_restarts_total").get("megatron_job_restarts_total", [])
        assert sum(scrape.value("megatron_job_restarts_total", **row) or 0 for row in rows) == end


def test_a_slow_node_is_named_with_its_cost_and_since_when(scrape: Scrape) -> None:
    facts = JobFacts(nodes={0: "gpu-a", 1: "gpu-a", 2: "gpu-b"})
    scrape.see(Status(), facts=facts)
    scrape.see(Status(slow_ranks=(slow(1, 0), slow(2, 2, state="suspect"), slow(3, 2, cause="hang"))), now=NOW + 1)
    scrape.see(Status(slow_ranks=(slow(1, 0), slow(4, 1, cost=0.75))), now=NOW + 30)
    node = {**JOB, "node": "gpu-a", "cause": "compute"}
    assert scrape.rows("megatron_job_slow_node")["megatron_job_slow_node"] == [node]
    assert scrape.value("megatron_job_slow_node", **node) == 1.5
    assert scrape.value("megatron_job_slow_node_seconds_per_step", **node) == 0.75
    assert scrape.value("megatron_job_slow_node_since_timestamp_seconds", **node) == NOW + 1
    scrape.see(Status(slow_ranks=(slow(4, 2, cause="link"),)))
    assert scrape.rows("megatron_job_slow_node")["megatron_job_slow_node"] == [
        {**JOB, "node": "gpu-b", "cause": "link"}
    ]


def test_texts_of_a_job_that_cannot_be_encoded_leave_the_others_readable(scrape: Scrape) -> None:
    """JSON of a hub or a container may hold half of a surrogate pair."""
    verdict = dataclasses.replace(slow(1, 0, cause="\ud800"), node="\udfff")
    scrape.see(Status())
    scrape.see(Status(slow_ranks=(verdict,), restarts=1, failures=(failure(0, "\ud800"),)))
    text = generate_latest(scrape.registry).decode()
    assert 'cause="?"' in text and 'node="?"' in text and 'reason="?"' in text


def test_nodes_and_times_of_a_verdict_precede_computed_ones(scrape: Scrape) -> None:
    verdict = dataclasses.replace(slow(1, 0), node="gpu-z", since_time=NOW - 77)
    scrape.see(Status(slow_ranks=(verdict,)), facts=JobFacts(nodes={0: "gpu-a"}))
    name = "megatron_job_slow_node_since_timestamp_seconds"
    assert scrape.value(name, **JOB, node="gpu-z", cause="compute") == NOW - 77
    assert len(scrape.rows(name)[name]) == 1


def test_after_a_fail_over_a_slow_node_is_known_since_the_condition(scrape: Scrape) -> None:
    condition = Condition(
        type=ConditionType.SLOW_NODE_DETECTED, status=True, reason="Compute", message="m", since=NOW - 500, generation=1
    )
    scrape.see(Status(slow_ranks=(slow(1, 0),), conditions=(condition,)))
    name = "megatron_job_slow_node_since_timestamp_seconds"
    assert scrape.value(name, **JOB, node="", cause="compute") == NOW - 500


def test_a_job_with_very_many_slow_nodes_names_the_costliest(scrape: Scrape) -> None:
    count = 2 * SLOW_NODES_SHOWN
    facts = JobFacts(nodes={rank: f"node-{rank}" for rank in range(count)})
    scrape.see(Status(slow_ranks=tuple(slow(rank, rank, cost=float(rank)) for rank in range(count))), facts=facts)
    shown = {row["node"] for row in scrape.rows("megatron_job_slow_node")["megatron_job_slow_node"]}
    assert shown == {f"node-{rank}" for rank in range(SLOW_NODES_SHOWN, count)}


def test_the_loop_itself(scrape: Scrape) -> None:
    metrics = scrape.metrics
    metrics.reconciled(0.02, "ok")
    metrics.queue(3, 1.5)
    metrics.request("create", "pods", "201")
    metrics.request("create", "pods", "error")
    metrics.watch_event("pods", NOW)
    metrics.missed("pods", 2)
    assert scrape.value("megatron_operator_reconcile_duration_seconds_count", outcome="ok") == 1
    assert scrape.value("megatron_operator_reconcile_duration_seconds_count", outcome="error") == 0
    assert scrape.value("megatron_operator_queue_depth") == 3
    assert scrape.value("megatron_operator_queue_oldest_seconds") == 1.5
    assert scrape.value("megatron_operator_api_requests_total", verb="create", resource="pods", code="201") == 1
    assert scrape.value("megatron_operator_api_requests_total", verb="create", resource="pods", code="error") == 1
    assert scrape.value("megatron_operator_watch_last_event_timestamp_seconds", resource="pods") == NOW
    assert scrape.value("megatron_operator_watch_missed_total", resource="pods") == 2
    assert scrape.value("megatron_operator_watch_missed_total", resource="megatronjobs") == 0
    assert scrape.value("megatron_operator_build_info", version="0.1.0") == 1


def test_replicas_and_the_cost_of_absent_workers_are_exported(scrape: Scrape) -> None:
    facts = JobFacts(data_parallel_size=3, desired_data_parallel_size=4)
    spent = TimeSpent(since=NOW, absent=1, absent_since=NOW, absent_seconds=60.0, absent_gpu_seconds=480.0)
    scrape.see(Status(time_spent=spent), facts=facts)
    scrape.see(Status(time_spent=TimeSpent(since=NOW)), "without")
    sizes = [scrape.value("megatron_job_data_parallel_size", **JOB, state=state) for state in ("desired", "current")]
    assert sizes == [4, 3]
    names = ("megatron_job_absent_worker_seconds", "megatron_job_absent_gpu_seconds")
    assert [scrape.value(name, **JOB) for name in names] == [60, 480]
    assert [scrape.value(name, **JOB | {"name": "without"}) for name in names] == [None] * 2


def test_the_cost_of_spares_is_exported_for_jobs_that_have_had_some(scrape: Scrape) -> None:
    scrape.see(Status(time_spent=TimeSpent(since=NOW)), "without")
    spent = TimeSpent(since=NOW, spares=1, spares_since=NOW, spare_seconds=60.0, spare_gpu_seconds=480.0)
    scrape.see(Status(time_spent=spent))
    names = ("megatron_job_spares", "megatron_job_spare_seconds", "megatron_job_spare_gpu_seconds")
    assert [scrape.value(name, **JOB) for name in names] == [1, 60, 480]
    assert [scrape.value(name, **JOB | {"name": "without"}) for name in names] == [None] * 3


def test_refused_evictions_are_exported_for_jobs_that_have_had_a_budget(scrape: Scrape) -> None:
    for refused in (True, False):
        condition = Condition(type=ConditionType.EVICTIONS_REFUSED, status=refused, reason="Protected")
        scrape.see(Status(conditions=(condition,)))
        assert scrape.value("megatron_job_evictions_refused", **JOB) == refused
        assert scrape.value("megatron_job_eviction_waits", **JOB) == 0
    condition = Condition(type=ConditionType.EVICTIONS_REFUSED, status=True, reason="EvictionWaits")
    scrape.see(Status(conditions=(condition,), progress=Progress(iteration=9, checkpoint_time=NOW)))
    assert scrape.value("megatron_job_eviction_waits", **JOB) == 1
    assert scrape.value("megatron_job_checkpoint_timestamp_seconds", **JOB) == NOW
    scrape.see(Status(), "without")
    assert scrape.value("megatron_job_evictions_refused", **JOB | {"name": "without"}) is None
