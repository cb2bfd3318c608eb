import dataclasses
from typing import Any

import numpy as np
import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from megatronapp_analyzer.detect.engine import Detector
from megatronapp_analyzer.hub.http import views
from megatronapp_analyzer.hub.http.megascan.views import tracer_view
from megatronapp_analyzer.hub.judge.links import LocalJudge
from megatronapp_analyzer.hub.metrics import build_registry, stage_imbalance
from megatronapp_analyzer.hub.service import Hub
from megatronapp_analyzer.hub.settings import HubSettings, JobIdentity
from megatronapp_analyzer.hub.state.agent_link import AgentLink
from megatronapp_analyzer.hub.state.progress import Progress
from megatronapp_analyzer.model import Cause, JobLayout, JobMoment, SubjectType, Verdict, VerdictState, VerdictSubject
from megatronapp_common.frames import Frame, FrameType
from megatronapp_common.scope.layer_statistics import SiteLayer, of_values, statistics_frame
from megatronapp_common.shared_memory_space import LEAST_BYTES, SharedMemorySpace
from megatronapp_common.topology import Coordinates, RankRole
from megatronapp_common.trace import RecordKind

COST_NS = 1000.0
CONFIRMED = Verdict(
    id="a",
    subject=VerdictSubject(type=SubjectType.RANK, ranks=(1,)),
    cause=Cause.COMPUTE,
    state=VerdictState.CONFIRMED,
    seconds_per_step=1.0,
    seconds_lost=3.5,
    slowdown=2.0,
    confidence=0.9,
    evidence_steps=(7, 8),
    evidence_text=(),
    since=JobMoment(attempt=0, step=5, time=1.0),
    until=None,
)


def overhead(hub: Hub) -> list[float]:
    families = text_string_to_metric_families(generate_latest(build_registry(hub)).decode())
    return [
        sample.value
        for family in families
        if family.name == "megascan_tracer_overhead_ratio"
        for sample in family.samples
    ]


@pytest.fixture
def hub(ring_header: Any) -> Hub:
    hub = Hub(HubSettings(job=JobIdentity(name="demo", uid="uid-1"), state_dir=None), LocalJudge(Detector))
    for rank in (0, 1):
        header = ring_header(rank)
        header["metadata"] |= {"recordCostNs": COST_NS}
        hub.ingest.add_ring(0, header)
    return hub


def test_steps_with_lost_records_do_not_count_for_the_tracer_cost(hub: Hub, step_rows: Any) -> None:
    """A step of which only the end is left would look as if it had cost hardly anything."""
    first = [0, 0]
    for step in range(3):
        for rank in (0, 1):
            rows = step_rows(rank, step)
            rows = rows[rows["kind"] < RecordKind.METRIC]
            left = rows if step == 1 else rows[-1:]
            header = {"rank": rank, "worker": rank, "first": first[rank] + len(rows) - len(left), "lost": 0}
            if step == 0:
                header["lost"] = header["first"]
            hub.ingest.add_records(0, header, left.tobytes())
            first[rank] += len(rows)
        assert [digest.complete for digest in hub.ingest.store.recent(1)] == [step == 1]
        assert overhead(hub) == ([] if step == 0 else pytest.approx([5 * COST_NS / 10_000_000]))


def test_shared_memory_is_a_metric_and_a_full_segment_is_in_the_summary(hub: Hub) -> None:
    """Check also an attempt whose rings found no memory: only the agent's status reports it."""
    full = SharedMemorySpace(path="/dev/shm", total=64 << 20, free=LEAST_BYTES - 1)
    spaces: dict[int, SharedMemorySpace | None] = {0: full, 1: dataclasses.replace(full, free=LEAST_BYTES), 2: None}
    for worker, space in spaces.items():
        link = AgentLink(attempt=7, worker=worker, node=f"n{worker}")
        hub.connect(link)
        status: dict[str, Any] = {"rings": [], "progress": None, "sharedMemory": space and space.to_json()}
        hub.take_frame(link, Frame(FrameType.STATUS, status), b"")
    (entry,) = views.summary(hub).full_shared_memory
    assert (entry.worker, entry.node, entry.free_bytes) == (0, "n0", LEAST_BYTES - 1)
    text = generate_latest(build_registry(hub)).decode()
    assert 'megascan_shared_memory_bytes{job_id="demo",pod="demo-worker-0"} 6.7108864e+07' in text
    assert 'megascan_shared_memory_free_bytes{job_id="demo",pod="demo-worker-1"} 4.194304e+06' in text
    assert 'pod="demo-worker-2"' not in text


def values_of(hub: Hub, prefix: str) -> dict[str, float]:
    """Return the values of families by name, with the site where there is one."""
    families = text_string_to_metric_families(generate_latest(build_registry(hub)).decode())
    return {
        f"{sample.name} {sample.labels.get('site', '')}".rstrip(): sample.value
        for family in families
        for sample in family.samples
        if sample.name.startswith(prefix) and not sample.name.endswith("_created")
    }


def test_pauses_and_captures_of_a_training_are_metrics(hub: Hub) -> None:
    assert values_of(hub, "megascope_") == {"megascope_rejected_captures_total": 0}
    control = {"state": "paused", "pausedSeconds": 2.5, "captureEvery": 4, "perturbation": "00c0ffee0000"}
    hub.ranks.progress = Progress.model_validate({"control": control})
    sites = [SiteLayer("residual", 0), SiteLayer("residual", 1), SiteLayer("mlp1", 0)]
    body = b"".join(of_values(np.array(own)).tobytes() for own in ([np.nan, 1.0], [np.inf, np.nan], [1.0]))
    header = {"rank": 0, "ranks": 1, "step": 8, "attempt": 0}
    hub.captures.store.take(statistics_frame(FrameType.TRAINING_STATISTICS, header, sites, body))
    assert values_of(hub, "megascope_") == {
        "megascope_rejected_captures_total": 0,
        "megascope_training_paused": 1,
        "megascope_training_paused_seconds_total": 2.5,
        "megascope_training_perturbed": 1,
        "megascope_capture_interval_steps": 4,
        "megascope_captured_step": 8,
        "megascope_captured_not_finite_values residual": 3,
        "megascope_captured_not_finite_values mlp1": 0,
    }


def test_the_load_of_experts_is_a_metric(hub: Hub) -> None:
    assert 'expert="' not in generate_latest(build_registry(hub)).decode()
    experts = {"losses": {"z_loss": 0.5}, "dropped": 0.125, "layers": [{"layer": 3, "load": [500, 1500]}]}
    hub.ranks.progress = Progress.model_validate({"experts": experts})
    text = generate_latest(build_registry(hub)).decode()
    assert 'megascan_expert_load_ratio{expert="1",job_id="demo",layer="3"} 1.5' in text
    assert 'megascan_router_loss{job_id="demo",loss="z_loss"} 0.5' in text
    assert 'megascan_dropped_choices_ratio{job_id="demo"} 0.125' in text


def test_checkpoints_are_metrics(hub: Hub) -> None:
    assert values_of(hub, "megascan_checkpoint_") == {}
    report = {"iteration": 20, "blockedSeconds": 0.5, "writeSeconds": 8.0, "failures": 2, "lastFailure": "disk full"}
    hub.ranks.progress = Progress.model_validate({"checkpoint": report})
    assert values_of(hub, "megascan_checkpoint_") == {
        "megascan_checkpoint_step": 20,
        "megascan_checkpoint_blocked_seconds": 0.5,
        "megascan_checkpoint_write_seconds": 8.0,
        "megascan_checkpoint_failures_total": 2,
    }
    memory = {"iteration": 24, "resumedIteration": 12, "blockedSeconds": 0.1, "writeSeconds": 0.5, "bytes": 4096}
    hub.ranks.progress = Progress.model_validate({"checkpoint": {**report, "memory": memory}})
    assert values_of(hub, "megascan_memory_checkpoint_") == {
        "megascan_memory_checkpoint_step": 24,
        "megascan_memory_checkpoint_resumed_step": 12,
        "megascan_memory_checkpoint_blocked_seconds": 0.1,
        "megascan_memory_checkpoint_write_seconds": 0.5,
        "megascan_memory_checkpoint_bytes": 4096,
        "megascan_memory_checkpoint_ended": 0,
    }
    ended = {"memory": {"lastFailure": "rank 3: the peer is lost"}}
    hub.ranks.progress = Progress.model_validate({"checkpoint": {**report, **ended}})
    assert values_of(hub, "megascan_memory_checkpoint_") == {"megascan_memory_checkpoint_ended": 1}
    hub.ranks.progress = Progress.model_validate({"state": "done", "checkpoint": {**report, **ended}})
    assert values_of(hub, "megascan_memory_checkpoint_") == {}, "the hub stays for a while, and nothing is at risk"
    hub.ranks.progress = Progress.model_validate({"iteration": 21, "checkpoint": {"failures": -1}})
    assert values_of(hub, "megascan_checkpoint_") == {}


def test_losses_of_corpora_and_validation_sets_are_metrics(hub: Hub) -> None:
    losses = {"sourceLosses": {"wiki": 2.5, "code": None}, "validationLosses": {"held-out": 3.25}}
    hub.ranks.progress = Progress.model_validate(losses)
    text = generate_latest(build_registry(hub)).decode()
    assert 'megascan_source_loss{job_id="demo",source="wiki"} 2.5' in text
    assert 'source="code"' not in text
    assert 'megascan_validation_set_loss{job_id="demo",set="held-out"} 3.25' in text
    assert Progress.model_validate({"sourceLosses": [1], "iteration": 3}).source_losses == {}


def test_experts_of_another_shape_leave_the_rest_of_the_progress() -> None:
    progress = Progress.model_validate({"iteration": 3, "experts": {"layers": [{"layer": -1}]}})
    assert (progress.iteration, progress.experts) == (3, None)


def test_a_training_that_is_paused_before_its_first_step_is_running(hub: Hub) -> None:
    assert views.phase(hub) == "Starting"
    hub.ranks.progress = Progress.model_validate({"state": "paused"})
    assert views.phase(hub) == "Running"


def test_the_clock_of_another_node_is_unknown_until_traffic_ties_it(hub: Hub, ring_header: Any) -> None:
    for rank, boot_id in ((0, "a"), (1, "b")):
        hub.ingest.add_ring(1, ring_header(rank) | {"bootId": boot_id})
    assert [worker.clock_seconds for worker in tracer_view(hub, []).workers] == [0.0, None]
    text = generate_latest(build_registry(hub)).decode()
    assert 'megascan_clock_residual_seconds{job_id="demo",pod="demo-worker-0"} 0.0' in text
    assert 'megascan_clock_residual_seconds{job_id="demo",pod="demo-worker-1"}' not in text
    newest = hub.ingest.newest
    assert newest is not None
    newest.clock_uncertainty_s = {0: 0.0, 1: 2e-5}
    assert [worker.clock_seconds for worker in tracer_view(hub, []).workers] == [0.0, 2e-5]


@pytest.mark.parametrize(("attempt", "end"), [(0, 10), (1, 2)])
def test_a_verdict_costs_the_seconds_lost_times_ranks(hub: Hub, attempt: int, end: int) -> None:
    until = JobMoment(attempt=attempt, step=end, time=2.0)
    hub.verdicts.update([dataclasses.replace(CONFIRMED, state=VerdictState.CLEARED, until=until)])
    (view,) = views.verdicts(hub)
    assert view.effect.gpu_hours == pytest.approx(3.5 * 2 / 3600, rel=0.01)


def hub_with_rings(ring_header: Any, *attempts: dict[int, str]) -> Hub:
    """Return a hub of attempts whose ranks, all of worker 0, have these devices."""
    hub = Hub(HubSettings(job=JobIdentity(name="demo", uid="uid-1"), state_dir=None), LocalJudge(Detector))
    for attempt, devices in enumerate(attempts):
        for rank, device in devices.items():
            header = ring_header(rank) | {"worker": 0}
            header["metadata"] |= {"world": len(devices), "localRank": rank, "device": device}
            header["metadata"]["layout"] |= {"pipeline": len(devices)}
            hub.ingest.add_ring(attempt, header)
    return hub


@pytest.mark.parametrize(
    ("devices", "counted"),
    [
        (["cuda:0 NVIDIA H200", "cuda:0 NVIDIA H200", "cuda:1 NVIDIA H200", "cuda:1 NVIDIA H200"], 2),
        (["cuda:0 NVIDIA H200", "cuda:1 NVIDIA H200", "cpu"], 2),
        (["cpu", "cpu", "cpu"], 3),
        (["cuda", "cuda"], 2),
    ],
    ids=["shared GPUs", "forward ranks on CPUs", "no GPU", "GPUs without index"],
)
def test_gpus_of_the_attempt_of_a_verdict_have_lost_its_time(
    ring_header: Any, devices: list[str], counted: int
) -> None:
    """A later attempt has another size: it changes no older cost."""
    hub = hub_with_rings(ring_header, dict(enumerate(devices)), dict.fromkeys(range(8), "cpu"))
    first = hub.ingest.attempts[0]
    assert first.layout is not None and first.layout.devices == first.devices == counted
    later = dataclasses.replace(CONFIRMED, id="b", since=JobMoment(attempt=1, step=5, time=2.0))
    unknown = dataclasses.replace(CONFIRMED, id="c", since=JobMoment(attempt=7, step=5, time=3.0))
    hub.verdicts.update([CONFIRMED, later, unknown])
    hours = {view.id: view.effect.gpu_hours for view in views.verdicts(hub)}
    expected = {"a": counted, "b": 8, "c": 8}
    assert hours == pytest.approx({id_: 3.5 * count / 3600 for id_, count in expected.items()}, rel=0.01)
    assert {view.id: view.effect.gpu_hours for view in views.summary(hub).slow_ranks or ()} == hours


def test_ranks_without_a_ring_count_like_the_others(ring_header: Any) -> None:
    hub = hub_with_rings(ring_header, dict.fromkeys(range(4), "cuda:0 NVIDIA H200"))
    state = hub.ingest.attempts[0]
    assert state.devices == 1
    del state.rings[3], state.rings[2]
    state.add_ring(dataclasses.replace(state.rings[1], device="cuda:1 NVIDIA H200"))
    assert state.devices == 4


@pytest.mark.parametrize(
    ("device", "label"), [("cuda:1 NVIDIA H200", "1"), ("cpu", ""), ("cuda", "3"), ("cudax:2", "")]
)
def test_the_gpu_of_a_suspect_is_that_of_its_rank(ring_header: Any, device: str, label: str) -> None:
    hub = hub_with_rings(ring_header, dict(enumerate(["cpu", "cpu", "cpu", device])))
    subject = dataclasses.replace(CONFIRMED.subject, ranks=(3,))
    hub.verdicts.update([dataclasses.replace(CONFIRMED, subject=subject)])
    text = generate_latest(build_registry(hub)).decode()
    assert f'megascan_suspect_info{{cause="compute",gpu="{label}",job_id="demo",node="node-3",rank="3"' in text


def test_stages_are_compared_within_their_role() -> None:
    """Backward stages take twice as long as forward stages, which is no imbalance."""
    plain = JobLayout.grid(pp=4)
    table = np.array([[1.0, 1.0, 2.0, 2.4], [1.0, 1.0, 2.0, 2.4]], np.float32)
    roles = (RankRole.FORWARD, RankRole.FORWARD, RankRole.BACKWARD, RankRole.BACKWARD)
    places = tuple(Coordinates(tp=0, cp=0, ep=0, dp=0, pp=stage) for stage in (0, 1, 0, 1))
    disaggregated = dataclasses.replace(plain, pp=2, coordinates=places, roles=roles)
    assert stage_imbalance(table, disaggregated) == pytest.approx(2.4 / 2.2)
    assert stage_imbalance(table, plain) == pytest.approx(2.4 / 1.6)
    table[:, 2:] = np.nan
    assert stage_imbalance(table, disaggregated) == 1.0
    assert stage_imbalance(np.zeros((1, 4), np.float32), disaggregated) is None


@pytest.mark.parametrize(("cause", "ranks", "is_known"), [(Cause.LINK, (0, 1), True), (Cause.COMPUTE, (0, 1), False)])
def test_uneven_data_is_a_metric_of_ranks_that_are_not_named_for_their_passes(
    hub: Hub, step_rows: Any, cause: Cause, ranks: tuple[int, ...], is_known: bool
) -> None:
    first = [0, 0]
    for step in range(10):
        for rank in (0, 1):
            parts = [step_rows(rank, step, compute_ms=1.0 + microbatch % 2) for microbatch in range(4)]
            for microbatch, part in enumerate(parts):
                part["microbatch"] = microbatch
                part["ordinal"] += microbatch
            records = np.concatenate([part[:-1] if number < 3 else part for number, part in enumerate(parts)])
            records = records[records["kind"] < RecordKind.METRIC]
            header = {"rank": rank, "worker": rank, "first": first[rank], "lost": 0}
            hub.ingest.add_records(0, header, records.tobytes())
            first[rank] += len(records)
    assert values_of(hub, "megascan_data_skew")["megascan_data_skew_correlation"] == pytest.approx(1.0)
    kind = SubjectType.LINK if cause is Cause.LINK else SubjectType.STAGE
    subject = VerdictSubject(type=kind, ranks=ranks)
    hub.verdicts.update([dataclasses.replace(CONFIRMED, subject=subject, cause=cause)])
    assert bool(values_of(hub, "megascan_data_skew")) is is_known
