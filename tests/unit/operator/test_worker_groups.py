"""Jobs whose forward ranks have workers of their own: one gang, numbered on from group to group."""

import dataclasses
import itertools
import pathlib

import pytest
import rendered
from hypothesis import given, settings
from hypothesis import strategies as st

from megatronapp_common.job import MegatronJob, megatron_arguments
from megatronapp_common.names import LABEL_ROLE, Env, RankOrder
from megatronapp_operator.backends.kubernetes import render
from megatronapp_operator.backends.kubernetes.render import AttemptSettings
from megatronapp_operator.backends.process import settings_builder
from megatronapp_operator.backends.process.settings import worker_devices, worker_environment
from megatronapp_operator.backends.process.state.paths import JobPaths
from megatronapp_operator.plan import (
    ConditionType,
    CreateWorker,
    FailureAction,
    JobState,
    Observed,
    Progress,
    Worker,
    WorkerOutcome,
    WorkerPhase,
    plan,
)
from megatronapp_operator.plan_io.spec_reader import build_spec
from megatronapp_trainer.launch.ranks.roles import fbd_world_of_flags
from megatronapp_trainer.launch.rendezvous.messages import JoinRequest
from megatronapp_trainer.launch.rendezvous.rank_table import build_table

FEW = settings(max_examples=25, deadline=None)


@st.composite
def patches(draw: st.DrawFn) -> rendered.Object:
    """Specs with as many forward ranks as backward ranks, on any number of workers."""
    nodes, per_node = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    ranks = nodes * per_node
    forward_nodes = draw(st.sampled_from([count for count in range(1, ranks + 1) if ranks % count == 0]))
    gpus, forward_gpus = draw(
        st.sampled_from([(0, 0), (per_node, 0), (per_node, ranks // forward_nodes)])  # no GPUs for forward ranks alone
    )
    return {
        "nodes": nodes,
        "procPerNode": per_node,
        "gpusPerNode": gpus,
        "fbd": {"enabled": True, "ship": "full", "forward": {"nodes": forward_nodes, "gpusPerNode": forward_gpus}},
        "model": {"attentionDropout": 0, "hiddenDropout": 0},
    }


def without_forward_group(patch: rendered.Object) -> MegatronJob:
    return rendered.make_job({name: value for name, value in patch.items() if name != "fbd"})


@FEW
@given(patch=patches(), order=st.sampled_from(RankOrder))
def test_ranks_are_numbered_group_by_group_in_every_order(patch: rendered.Object, order: RankOrder) -> None:
    job = rendered.make_job(patch)
    world = job.world
    backward, forward = world.worker_groups
    joins = [  # forward workers have the lower addresses, and the last workers of a group the first labels
        JoinRequest(
            uid="u",
            attempt=0,
            index=index,
            address=f"10.0.{int(group is backward)}.{index}",
            node="n",
            num_ranks=group.proc_per_node,
            port=1,
            topology=f"{world.nodes - index:03}",
        )
        for group in (forward, backward)
        for index in group.indices
    ]
    table = build_table(joins, order, fbd_world_of_flags(megatron_arguments(job), world.world_size))
    indices = [entry.index for entry in table.workers]
    assert [rank for entry in table.workers for rank in entry.ranks] == list(range(world.world_size))
    assert set(indices[: backward.nodes]) == set(backward.indices)
    assert indices == list(range(world.nodes)) or order is RankOrder.TOPOLOGY
    for entry in table.workers:
        group = world.group_of(entry.index)
        assert entry.roles == (group.role,) * group.proc_per_node


@FEW
@given(patch=patches())
def test_each_worker_has_its_own_place_and_the_first_group_keeps_its_names(patch: rendered.Object) -> None:
    job, alone = rendered.make_job(patch), without_forward_group(patch)
    pods = [rendered.make_worker(job, index) for group in job.world.worker_groups for index in group.indices]
    names = [pod["metadata"]["name"] for pod in pods]
    prefixes = [rendered.environment(pod)[Env.SHM_PREFIX] for pod in pods]
    assert len(set(names)) == len(set(prefixes)) == job.world.nodes
    today = [rendered.make_worker(alone, index) for index in range(alone.world.nodes)]
    assert names[: len(today)] == [pod["metadata"]["name"] for pod in today]
    labels = [pod["metadata"]["labels"] for pod in pods]
    roles = [group.role.value for group in job.world.worker_groups for _ in group.indices]
    assert [of_pod.pop(LABEL_ROLE) for of_pod in labels] == roles
    assert labels[: len(today)] == [pod["metadata"]["labels"] for pod in today]


@FEW
@given(patch=patches(), gang=st.sampled_from(["Volcano", "Coscheduling", "KAI"]))
def test_a_scheduler_places_the_workers_of_all_groups_together(patch: rendered.Object, gang: str) -> None:
    job = rendered.make_job({**patch, "scheduling": {"gang": gang}})
    objects = render.gang_objects(job, rendered.owner_of(job), AttemptSettings(number=0), rendered.SETTINGS)
    (group,) = [obj for _, obj in objects if obj["kind"] == "PodGroup"]
    assert group["spec"]["minMember"] == sum(group.nodes for group in job.world.worker_groups)


@FEW
@given(patch=patches())
def test_the_plan_waits_for_the_workers_of_all_groups(patch: rendered.Object) -> None:
    job = rendered.make_job(patch)
    state = JobState(spec=build_spec(job, uid="u"))
    made = plan(state, Observed(secret=True), 1000.0)
    created = [action for action in made.actions if isinstance(action, CreateWorker)]
    assert [action.index for action in created] == list(range(job.world.nodes))
    assert made.status.replicas.desired == job.world.nodes
    workers = [Worker(index=action.index, attempt=0, phase=WorkerPhase.RUNNING) for action in created]
    for running in (False, True):
        workers[-1] = dataclasses.replace(workers[-1], phase=[WorkerPhase.PENDING, WorkerPhase.RUNNING][running])
        state = dataclasses.replace(state, status=made.status)
        seen = Observed(secret=True, workers=tuple(workers), progress=Progress(attempt=0, iteration=1))
        made = plan(state, seen, 1001.0)
        assert made.status.is_true(ConditionType.RUNNING) is running


@FEW
@given(patch=patches(), failed=st.integers(0))
def test_a_killed_worker_of_either_role_restarts_the_gang(patch: rendered.Object, failed: int) -> None:
    job = rendered.make_job(patch)
    state = JobState(spec=build_spec(job, uid="u"))
    made = plan(state, Observed(secret=True), 1000.0)
    workers = [Worker(index=index, attempt=0, phase=WorkerPhase.RUNNING) for index in range(job.world.nodes)]
    killed = failed % job.world.nodes
    outcome = WorkerOutcome(code=1, reason="RankKilled", rank=job.world.placement.ranks_of(killed)[0], signal=9)
    workers[killed] = dataclasses.replace(workers[killed], phase=WorkerPhase.FAILED, outcome=outcome)
    made = plan(dataclasses.replace(state, status=made.status), Observed(secret=True, workers=tuple(workers)), 1001.0)
    assert (made.status.failures[-1].worker, made.status.failures[-1].action) == (killed, FailureAction.RESTART)


@FEW
@given(patch=patches())
def test_processes_of_all_groups_use_separate_gpus(patch: rendered.Object) -> None:
    job = rendered.make_job(patch)
    made = settings_builder.build_settings(
        job, uid="u", paths=JobPaths(pathlib.Path("/jobs")), commands=settings_builder.build_commands(job)
    )
    with pytest.MonkeyPatch.context() as patched:
        patched.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        environments = [
            worker_environment(made, index=index, attempt=0, coordinator="", hub_url="")
            for index in range(job.world.nodes)
        ]
        devices = [worker_devices(job.world, index) for index in range(job.world.nodes)]
    for name in (Env.ADDRESS, Env.RUN_DIR, Env.SHM_PREFIX):
        assert len({environment[name] for environment in environments}) == job.world.nodes
    assert {environment[Env.NUM_WORKERS] for environment in environments} == {str(job.world.nodes)}
    counts = [group.gpus_per_node for group in job.world.worker_groups for _ in group.indices]
    assert [len(numbers) for numbers in devices] == counts
    assert [int(device) for device in itertools.chain(*devices)] == list(range(sum(map(len, devices))))
