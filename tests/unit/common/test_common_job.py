"""Loading of manifests, and the world that follows from nodes, processes and groups."""

import json
import pathlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatronapp_common.errors import JobError, TopologyError
from megatronapp_common.job import (
    Condition,
    ConditionType,
    Data,
    Fbd,
    ForwardWorkers,
    MegatronJob,
    Metadata,
    Model,
    Parallelism,
    Phase,
    Resources,
    SlowRank,
    Spec,
    Status,
    Training,
    derive_world,
    load_job,
    load_stored_job,
    manifest_text,
    parse_manifest,
    read_status,
    status_document,
)
from megatronapp_common.job.api.model import MAX_PROC_PER_NODE
from megatronapp_common.job.load import MAX_LEVELS, require_readable_depth
from megatronapp_common.topology import RankRole, fbd_world, fbd_world_of


def test_every_example_is_accepted(repository: pathlib.Path) -> None:
    examples = sorted(repository.glob("examples/*.yaml"))
    assert examples
    for path in examples:
        load_job(path.read_text(encoding="utf-8"))


def test_numbers_are_read_as_the_api_server_reads_them() -> None:
    document = parse_manifest("a: 1e-4\nb: 1.5E+3\nc: 12\nd: 2026-01-02\ne: 1e4x\nf: .5\ng: '1e-4'\n")
    assert document == {"a": 1e-4, "b": 1500.0, "c": 12, "d": "2026-01-02", "e": "1e4x", "f": 0.5, "g": "1e-4"}


def test_whole_numbers_are_accepted_as_floats(build: Any) -> None:
    training = load_job(build({"spec.training.weightDecay": 0})).spec.training
    assert training is not None
    assert training.weight_decay == 0.0


def test_what_is_dumped_loads_to_the_same_job(build: Any) -> None:
    job = load_job(build({"spec.faults": [{"rank": 1, "kind": "host", "factor": 2, "fromStep": 1, "steps": 2}]}))
    assert load_job(job.to_dict()) == job
    assert load_job(manifest_text(job.to_dict())) == job
    assert load_job(json.dumps(job.to_dict())) == job


@given(texts=st.lists(st.text(alphabet="0123456789eE.+-_:xo", max_size=6) | st.text(max_size=6), max_size=4))
def test_texts_like_numbers_stay_texts(texts: list[str]) -> None:
    """Arguments such as 1e-8 are texts, which an API server, too, would read as numbers without quotes."""
    again = [texts, texts]
    assert parse_manifest(manifest_text({"args": again})) == {"args": again}


def test_an_object_of_the_api_server_is_accepted(build: Any) -> None:
    server_side = {
        "metadata.uid": "0c2e",
        "metadata.resourceVersion": "77",
        "metadata.generation": 2,
        "metadata.creationTimestamp": "2026-01-02T03:04:05Z",
        "metadata.managedFields": [{"manager": "kubectl"}],
        "status": {"phase": "Running", "attempt": 1, "fieldOfANewerRelease": 3},
    }
    job = load_job(build(server_side))
    assert (job.metadata.uid, job.status.phase, job.status.attempt) == ("0c2e", "Running", 1)


@pytest.mark.parametrize(
    "older",
    [
        {"spec.env": [{"name": "NNODES", "value": "2"}]},
        {"spec.env": [{"name": "MEGATRON_NODE_IPS", "value": "10.0.0.1"}]},
        {"spec.network": {"mode": "HostNetwork", "policy": "None", "rdma": {"enabled": True}}},
        {"spec.scheduling": {"gang": "Volcano", "minAvailable": 1}},
    ],
)
def test_a_stored_job_is_not_judged_by_rules_that_are_stricter_now(build: Any, older: dict[str, Any]) -> None:
    document = build(older)
    with pytest.raises(JobError):
        load_job(document)
    with pytest.raises(JobError):
        load_stored_job(document, accepted=False)
    job, unknown = load_stored_job(document)
    assert (job.spec.nodes, unknown) == (2, ())
    newer = build({**older, "spec.newerField": 1})
    assert load_stored_job(newer) == (job, ("spec.newerField",))
    with pytest.raises(JobError):
        load_stored_job(newer, accepted=False)


def test_a_stored_job_of_wrong_types_is_refused(build: Any) -> None:
    with pytest.raises(JobError, match=r"spec\.nodes"):
        load_stored_job(build({"spec.nodes": "many"}))


@pytest.mark.parametrize("levels", [MAX_LEVELS + 1, 900, 5000])
def test_a_field_that_is_nested_too_deep_is_refused_by_name(build: Any, levels: int) -> None:
    def nested(levels: int) -> Any:
        found: Any = []
        for level in range(levels - 1):
            found = {"a": found} if level % 2 else [found]
        return found

    document = build({"spec.podTemplate": {"spec": {"affinity": nested(levels - 2)}}, "spec.affinity": nested(levels)})
    problem = "is nested more than 64 levels deep; write fewer"
    for load in (load_job, load_stored_job, lambda job: load_stored_job(job, accepted=False)):
        with pytest.raises(JobError) as raised:
            load(document)
        assert set(raised.value.problems) == {f"spec.podTemplate: {problem}", f"spec.affinity: {problem}"}
    require_readable_depth(build({"spec.affinity": nested(MAX_LEVELS), "status": nested(levels)}))
    with pytest.raises(JobError, match="affinity"):
        require_readable_depth({"spec": {"template": {}, "affinity": nested(levels)}})


def test_status_round_trip_leaves_absent_fields_out() -> None:
    condition = Condition(type=ConditionType.RUNNING, status=True, reason="Training", since=1767323045.0)
    status = Status(phase=Phase.RUNNING, conditions=(condition,), slow_ranks=(SlowRank(id="v1"),))
    dumped = status_document(status)
    assert dumped["conditions"][0]["lastTransitionTime"] == "2026-01-02T03:04:05Z"
    assert "completionTime" not in dumped
    assert read_status(dumped) == status


def test_jobs_do_not_change(build: Any) -> None:
    job = load_job(build())
    with pytest.raises(ValueError, match="frozen"):
        job.spec = job.spec  # type: ignore[misc]


def make_spec(nodes: int | None, per_node: int | None, gpus: int, *, fbd: Fbd | None = None, **layout: Any) -> Spec:
    return Spec(
        fbd=fbd or Fbd(),
        nodes=nodes,
        proc_per_node=per_node,
        gpus_per_node=gpus,
        parallelism=Parallelism(**layout),
        model=Model(num_layers=4, hidden_size=64, num_attention_heads=4, seq_length=32),
        training=Training(micro_batch_size=1, train_iters=10, lr=1e-3),
        data=Data(path=("a",)),
    )


@pytest.mark.parametrize(
    ("nodes", "per_node", "gpus", "layout", "expected", "data"),
    [
        (2, 2, 0, {"pipeline": 2}, (2, 2), 2),  # data derived
        (2, 2, 0, {"pipeline": 2, "data": 2}, (2, 2), 2),  # both agree
        (None, None, 0, {"pipeline": 2, "data": 2}, (4,), 2),  # all on one node
        (2, None, 0, {"pipeline": 2, "data": 2}, (2, 2), 2),
        (None, 1, 0, {"pipeline": 2, "data": 2}, (1, 1, 1, 1), 2),
        (None, None, 8, {"tensor": 4, "data": 4}, (8, 8), 4),  # gpusPerNode ranks on each
        (None, None, 8, {"tensor": 2, "data": 2}, (4,), 2),  # fewer ranks than GPUs of a node
        (2, None, 8, {"tensor": 2}, (8, 8), 8),
        (2, None, 0, {"tensor": 2, "pipeline": 2}, (2, 2), 1),
        (None, None, 0, {}, (1,), 1),
        (3, 2, 0, {"context": 3}, (2, 2, 2), 2),
    ],
)
def test_world(
    *, nodes: int | None, per_node: int | None, gpus: int, layout: dict[str, Any], expected: tuple[int, ...], data: int
) -> None:
    world = derive_world(make_spec(nodes, per_node, gpus, **layout))
    assert (world.proc_per_node, world.data_parallel_size) == (expected, data)
    assert world.world_size == sum(expected)
    assert world.nodes == len(expected)


sizes = st.integers(1, 5)
maybe = st.none() | st.integers(1, 8)


@given(nodes=maybe, per_node=maybe, gpus=st.integers(0, 8), tensor=sizes, pipeline=sizes, context=sizes, data=maybe)
def test_a_world_has_the_requested_sizes_or_is_refused(
    *, nodes: int | None, per_node: int | None, gpus: int, tensor: int, pipeline: int, context: int, data: int | None
) -> None:
    spec = make_spec(nodes, per_node, gpus, tensor=tensor, pipeline=pipeline, context=context, data=data)
    try:
        world = derive_world(spec)
    except JobError as error:
        assert len(error.problems) == 1
        return
    assert world.world_size == tensor * pipeline * context * world.data_parallel_size
    assert nodes in {None, world.nodes}
    assert per_node is None or set(world.proc_per_node) == {per_node}
    assert data in {None, world.data_parallel_size}
    assert world.placement.world_size == world.topology.world_size == world.world_size


@given(tensor=sizes, pipeline=sizes, data=sizes, merged=st.booleans())
def test_fbd_within_nodes_is_the_doubled_world(*, tensor: int, pipeline: int, data: int, merged: bool) -> None:
    expected = fbd_world(tensor=tensor, pipeline=pipeline, data=data, merged=merged)
    per_node = expected.world_size // data
    if per_node > MAX_PROC_PER_NODE:
        return
    fbd = Fbd(enabled=True, ignore_forward_tensor_parallel=merged)
    started = make_spec(data, per_node, 0, fbd=fbd, tensor=tensor, pipeline=pipeline)
    requested = make_spec(data, None, 0, fbd=fbd, tensor=tensor, pipeline=pipeline, data=data)
    for spec in (started, requested):
        world = derive_world(spec)
        assert world.fbd == expected
        assert world.fbd == fbd_world_of(world.world_size, tensor=tensor, pipeline=pipeline, merged=merged)
        assert (world.data_parallel_size, world.proc_per_node) == (data, (per_node,) * data)
        assert [group.role for group in world.worker_groups] == [RankRole.ALL]


@given(tensor=sizes, pipeline=sizes, served=st.integers(1, 4), forward_ranks=sizes, apart=st.booleans())
def test_replicas_with_common_forward_ranks_add_fewer_ranks(
    *, tensor: int, pipeline: int, served: int, forward_ranks: int, apart: bool
) -> None:
    expected = fbd_world(
        tensor=tensor, pipeline=pipeline, data=served * forward_ranks, backward_per_forward=served, apart=apart
    )
    within = expected.backward_ranks if apart else expected.world_size
    if within > MAX_PROC_PER_NODE:
        return
    fbd = Fbd(enabled=True, backward_per_forward=served, forward=ForwardWorkers() if apart else None)
    started = make_spec(1, within, 0, fbd=fbd, tensor=tensor, pipeline=pipeline)
    requested = make_spec(None, None, 0, fbd=fbd, tensor=tensor, pipeline=pipeline, data=expected.trained.data)
    for spec in (started, requested):
        world = derive_world(spec)
        assert world.fbd == expected
        assert (world.world_size, world.data_parallel_size) == (expected.world_size, served * forward_ranks)


def test_replicas_without_a_whole_forward_rank_are_refused() -> None:
    shared = Fbd(enabled=True, backward_per_forward=2)
    with pytest.raises(JobError, match="1 nodes x 4 ranks do not fit groups of 2 replicas, groups of 3 ranks"):
        derive_world(make_spec(1, 4, 0, fbd=shared))
    with pytest.raises(JobError, match=r"spec\.fbd: backward_per_forward: 2 and merged forward ranks exclude"):
        derive_world(make_spec(1, 6, 0, fbd=shared.model_copy(update={"ignore_forward_tensor_parallel": True})))


@given(tensor=sizes, pipeline=sizes, data=sizes, merged=st.booleans(), per_node=st.integers(1, 4))
def test_forward_workers_are_appended_with_their_own_ranks(
    *, tensor: int, pipeline: int, data: int, merged: bool, per_node: int
) -> None:
    expected = fbd_world(tensor=tensor, pipeline=pipeline, data=data, merged=merged, apart=True)
    if tensor * pipeline > MAX_PROC_PER_NODE or expected.forward_ranks % per_node:
        return
    forward = ForwardWorkers(
        proc_per_node=per_node, node_selector={"pool": "cpu"}, resources=Resources(limits={"cpu": "4"})
    )
    fbd = Fbd(enabled=True, ignore_forward_tensor_parallel=merged, forward=forward)
    world = derive_world(make_spec(data, None, 0, fbd=fbd, tensor=tensor, pipeline=pipeline, data=data))
    backward, apart = world.worker_groups
    assert world.fbd == expected
    assert (backward.role, apart.role) == (RankRole.BACKWARD, RankRole.FORWARD)
    assert [*backward.indices, *apart.indices] == list(range(world.nodes))
    assert world.world_size == world.placement.world_size == expected.world_size
    first = world.placement.ranks_of(apart.first)[0]
    assert first == expected.backward_ranks == world.topology.world_size
    assert {rank for worker in apart.indices for rank in world.placement.ranks_of(worker)} == set(
        range(first, expected.world_size)
    )
    assert (apart.node_selector, apart.resources.limits) == ({"pool": "cpu"}, {"cpu": "4"})
    assert all(world.group_of(worker) in world.worker_groups for worker in range(world.nodes))
    with pytest.raises(TopologyError, match="does not exist"):
        world.group_of(world.nodes)


def test_forward_workers_are_placed_like_the_others_unless_configured() -> None:
    spec = make_spec(2, 4, 4, fbd=Fbd(enabled=True, forward=ForwardWorkers(gpus_per_node=2)), tensor=2)
    spec = spec.model_copy(update={"node_selector": {"gpu": "a"}, "resources": Resources(limits={"cpu": "8"})})
    backward, forward = derive_world(spec).worker_groups
    assert (forward.node_selector, forward.resources) == (backward.node_selector, backward.resources)
    assert (backward.gpus_per_node, forward.gpus_per_node) == (4, 2)
    assert derive_world(spec).proc_per_node == (4, 4, 2, 2, 2, 2)


def test_forward_workers_that_do_not_fit_are_refused() -> None:
    spec = make_spec(2, 4, 0, fbd=Fbd(enabled=True, forward=ForwardWorkers(nodes=3)))
    with pytest.raises(JobError, match="8 forward ranks do not fit 3 nodes x 2"):
        derive_world(spec)


def test_experts_that_do_not_divide_the_replicas_are_refused() -> None:
    with pytest.raises(JobError, match=r"spec\.parallelism\.expert: 3 does not divide"):
        derive_world(make_spec(1, 4, 0, expert=3))


def test_the_job_knows_its_world() -> None:
    job = MegatronJob(
        api_version="megatronapp.io/v1alpha1",
        kind="MegatronJob",
        metadata=Metadata(name="a"),
        spec=make_spec(2, 2, 0, tensor=2),
    )
    assert job.world.data_parallel_size == 2
