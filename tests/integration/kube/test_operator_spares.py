"""Spares on a real API server: who takes which place, by orders in annotations, over operators that end in between."""

from typing import Any

import kube
import pytest
from operator_simulation import KillableApi, OperatorSimulation, manifest, simulated_operator

from megatronapp_common.names import ANNOTATION_RESTART, LABEL_ATTEMPT, LABEL_REPLICA_INDEX, LABEL_SPARE
from megatronapp_common.text.times import seconds_of
from megatronapp_operator.backends.kubernetes.client.resources import EVENTS
from megatronapp_operator.backends.kubernetes.observe import PollResult, ReportedEnd
from megatronapp_operator.plan import Progress, SlowRank, WorkerOutcome
from megatronapp_operator.plan.policies.spares import CHECKED_S
from megatronapp_operator.plan_io.hub_summary import HubSummary

pytestmark = pytest.mark.asyncio
SPARES: dict[str, Any] = {"runPolicy": {"restart": "InPlace", "spares": 1}}
FIRST_SPARE, NEXT_SPARE = "job-spare-0-0", "job-spare-0-1"


async def begun(stage: OperatorSimulation, **spec: Any) -> None:
    """Start a job whose two workers train while a spare waits."""
    await stage.train(manifest(stage.namespace, **(SPARES | spec)))


async def seen(stage: OperatorSimulation) -> dict[str, tuple[str, str, str | None, str | None]]:
    """Return index, attempt, label of a spare, and order of each worker pod."""
    pods = {name: pod["metadata"] for name, pod in (await stage.nodes.pods()).items() if not name.endswith("hub")}
    return {
        name: (
            metadata["labels"][LABEL_REPLICA_INDEX],
            metadata["labels"][LABEL_ATTEMPT],
            metadata["labels"].get(LABEL_SPARE),
            metadata["annotations"].get(ANNOTATION_RESTART),
        )
        for name, metadata in pods.items()
    }


def coordinator(pod: str, stage: OperatorSimulation) -> str:
    return f"{pod}.job-workers.{stage.namespace}.svc.cluster.local:19400"


def report_ends(stage: OperatorSimulation, codes: dict[int, int], reason: str = "RankFailed") -> None:
    """Let the launcher of worker 0 report how ranks have ended."""
    memory = stage.reconciler.memory((stage.namespace, "job"))
    assert memory is not None
    ends = {
        index: ReportedEnd(
            attempt=0, outcome=WorkerOutcome(code=code, reason=reason, message="boom"), finished_at=stage.now()
        )
        for index, code in codes.items()
    }
    page = Progress(attempt=0, iteration=1)
    memory.poll_result = PollResult(progress=page, launcher_attempt=0, ends=ends, received_at=stage.now())


async def test_a_spare_waits_next_to_the_gang(plane: kube.ControlPlane, namespace: str) -> None:
    async with simulated_operator(plane, namespace) as stage:
        await begun(stage)
        assert await seen(stage) == {
            "job-worker-0": ("0", "0", None, None),
            "job-worker-1": ("1", "0", None, None),
            FIRST_SPARE: ("2", "0", "true", None),
        }
        status = (await stage.job())["status"]
        assert status["replicaStatuses"]["desired"] == status["replicaStatuses"]["running"] == 2
        ready = next(entry for entry in status["conditions"] if entry["type"] == "SparesReady")
        assert (ready["status"], ready["message"]) == ("True", "1 of 1 spare waits")
        await stage.pass_time(120)
        spent = (await stage.job())["status"]["timeSpent"]
        assert spent["spares"] == 1 and spent["spareSeconds"] >= 119


@pytest.mark.parametrize("lost", [0, 1])
async def test_a_spare_takes_the_place_of_a_deleted_pod(plane: kube.ControlPlane, namespace: str, lost: int) -> None:
    async with simulated_operator(plane, namespace) as stage:
        await begun(stage)
        await stage.nodes.end(f"job-worker-{lost}", 75)
        report_ends(stage, {1 - lost: 75})
        await stage.rest()
        await stage.pass_time(11)
        where = coordinator(FIRST_SPARE if lost == 0 else "job-worker-0", stage)
        expected = {
            f"job-worker-{1 - lost}": (str(1 - lost), "1", None, f"1 600 {1 - lost} {where}"),
            FIRST_SPARE: (str(lost), "1", None, f"1 0 {lost} {where}"),
            NEXT_SPARE: ("2", "1", "true", None),
        }
        assert await seen(stage) == expected
        assert (await stage.job())["status"]["takeovers"] == [{"worker": lost, "pod": FIRST_SPARE}]
        stage.report_progress("job")
        await stage.rest()
        assert (await stage.job())["status"]["phase"] == "Running"


@pytest.mark.full("more places of one run", but=("after-4",))
@pytest.mark.parametrize("place", range(1, 11))
@pytest.mark.parametrize("when", ["before", "after", "lost"])
async def test_operators_that_end_during_a_takeover_give_no_place_twice(
    plane: kube.ControlPlane, namespace: str, when: str, place: int
) -> None:
    async with simulated_operator(plane, namespace) as stage:
        await begun(stage)
        await stage.nodes.end("job-worker-0", 75)
        report_ends(stage, {1: 75})
        await stage.refresh()  # all have ended, so that none is waited for
        await stage.reconcile()  # the failure is on record
        api: KillableApi = stage.api
        stage.skipped_s += 11
        at = api.count + place
        api.kill_at = staticmethod(lambda number: when if number == at else None)
        await stage.rest()
        where = coordinator(FIRST_SPARE, stage)
        assert await seen(stage) == {
            "job-worker-1": ("1", "1", None, f"1 600 1 {where}"),
            FIRST_SPARE: ("0", "1", None, f"1 0 0 {where}"),
            NEXT_SPARE: ("2", "1", "true", None),
        }
        assert (await stage.job())["status"]["restarts"] == 1


async def test_without_a_spare_the_worker_gets_a_new_pod(plane: kube.ControlPlane, namespace: str) -> None:
    async with simulated_operator(plane, namespace) as stage:
        await begun(stage)
        await stage.nodes.end(FIRST_SPARE, 1)
        await stage.nodes.end("job-worker-1", 75)
        report_ends(stage, {0: 75})
        await stage.rest()
        await stage.pass_time(11)
        found = await seen(stage)
        assert found["job-worker-1"] == ("1", "1", None, None)
        assert "takeovers" not in (await stage.job())["status"]
        await stage.pass_time(61)
        assert NEXT_SPARE in await seen(stage)


SLOW = "node-of-job-worker-1"


async def with_slow_node(stage: OperatorSimulation) -> None:
    """Start a job that swaps slow nodes, and let the hub report the node of worker 1."""
    volume = {"claim": "runs", "mountPath": "/runs"}
    await begun(
        stage,
        gpusPerNode=8,
        resources={"limits": {"nvidia.com/gpu": 8}},
        analyzer={"enabled": True, "slowNode": {"action": "SwapAtCheckpoint", "minSeconds": 1}},
        trace={"enabled": True},
        checkpoint={"save": "/runs/a", "saveInterval": 2, "volume": volume},
    )
    await stage.pass_time(CHECKED_S)
    memory = stage.reconciler.memory((stage.namespace, "job"))
    assert memory is not None
    verdict = SlowRank(
        id="v", subject="node", cause="compute", state="confirmed", sentence="It is slow.", slowdown=2.0, node=SLOW,
        ranks=(8, 9), since_attempt=0, since_time=stage.now() - 60, gpu_hours=2.5, cost=6.25,
    )  # fmt: skip
    page = Progress(attempt=0, iteration=1)
    memory.poll_result = PollResult(summary=HubSummary(slow_ranks=(verdict,)), progress=page)


async def ends_with_its_checkpoint(stage: OperatorSimulation) -> None:
    """Check that the gang trains on with the order to worker 0, and let it end with a checkpoint."""
    where = coordinator("job-worker-0", stage)
    assert (await seen(stage))["job-worker-0"] == ("0", "0", None, f"0 0 0 {where} checkpoint")
    status = (await stage.job())["status"]
    assert (status["phase"], status["attempt"]) == ("Running", 0)
    assert [entry["node"] for entry in status["excludedNodes"]] == [SLOW]
    (slow,) = status["slowNodes"]
    (verdict,) = status["slowRanks"]
    assert seconds_of(slow.pop("since")) == verdict["since"]["time"]
    assert slow == {"node": SLOW, "ranks": [8, 9], "causes": ["compute"], "gpuHours": 2.5, "cost": 6.25}
    condition = next(entry for entry in status["conditions"] if entry["type"] == "SlowNodeDetected")
    waits = f"The gang ends with its next checkpoint; then a spare takes the place of worker 1, which leaves {SLOW}."
    assert condition["message"] == f"It is slow. {waits}"
    report_ends(stage, {0: 75, 1: 75}, "Preempted")
    await stage.rest()


async def check_swapped(stage: OperatorSimulation) -> None:
    """Check that the spare has the place of worker 1, without a pause, and that another avoids the slow node."""
    status, where = (await stage.job())["status"], coordinator("job-worker-0", stage)
    assert [failure["reason"] for failure in status["failures"]] == ["SlowNodeSwapped"]
    assert (status["restarts"], status.get("restartsTowardsMax", 0)) == (1, 0)
    assert await seen(stage) == {
        "job-worker-0": ("0", "1", None, f"1 600 0 {where}"),
        FIRST_SPARE: ("1", "1", None, f"1 0 1 {where}"),
        NEXT_SPARE: ("2", "1", "true", None),
    }
    (replacement,) = [pod for name, pod in (await stage.nodes.pods()).items() if name == NEXT_SPARE]
    assert SLOW in str(replacement["spec"]["affinity"]["nodeAffinity"])


async def reasons(stage: OperatorSimulation) -> dict[str, str]:
    """Return the messages of the job's Events by their reasons."""
    found = (await stage.nodes.api.list_objects(EVENTS, stage.namespace)).items
    return {event["reason"]: event["note"] for event in found}


async def test_a_slow_node_is_swapped_at_a_checkpoint(plane: kube.ControlPlane, namespace: str) -> None:
    async with simulated_operator(plane, namespace) as stage:
        await with_slow_node(stage)
        await stage.rest()
        await stage.pass_time(3600)
        await ends_with_its_checkpoint(stage)
        await check_swapped(stage)
        events = await reasons(stage)
        assert events["NodeExcluded"].startswith(f"{SLOW} gets no worker of this job for 86400 s")
        assert events["SwapWaits"].startswith("The gang ends with its next checkpoint; ")
        assert events["SlowNodeSwapped"] == f"a checkpoint is written; worker 1 leaves the slow node {SLOW}"
        assert events["SpareTookOver"] == f"spare {FIRST_SPARE} on node-of-{FIRST_SPARE} takes the place of worker 1"
        spent = (await stage.job())["status"]["timeSpent"]
        assert spent["spareGpuSeconds"] == pytest.approx(8 * spent["spareSeconds"], abs=0.01)
        assert spent["spareSeconds"] >= 3590


async def test_a_spare_on_the_slow_node_is_replaced_before_the_swap(plane: kube.ControlPlane, namespace: str) -> None:
    async with simulated_operator(plane, namespace) as stage:
        stage.nodes.places[FIRST_SPARE] = SLOW
        await with_slow_node(stage)
        await stage.reconcile()
        found = await seen(stage)
        assert found["job-worker-0"] == ("0", "0", None, None), "no spare waits elsewhere"
        assert (await reasons(stage))["SwapWaits"] == f"Worker 1 stays on {SLOW} until a spare waits on another node."
        del stage.nodes.places[FIRST_SPARE]
        await stage.rest()
        await stage.pass_time(CHECKED_S)
        await ends_with_its_checkpoint(stage)
        await check_swapped(stage)


@pytest.mark.full("more places of one run")
@pytest.mark.parametrize("place", range(1, 9))
@pytest.mark.parametrize("when", ["before", "after", "lost"])
async def test_operators_that_end_during_a_swap_swap_once(
    plane: kube.ControlPlane, namespace: str, when: str, place: int
) -> None:
    """The operator ends once before the order, and once after the checkpoint."""
    async with simulated_operator(plane, namespace) as stage:
        await with_slow_node(stage)
        verdicts = stage.reconciler.memory((namespace, "job"))
        assert verdicts is not None
        polled = verdicts.poll_result
        for end in (False, True):
            api: KillableApi = stage.api
            at = api.count + place
            api.kill_at = staticmethod(lambda number, at=at: when if number == at else None)
            if end:
                report_ends(stage, {0: 75, 1: 75}, "Preempted")
            await stage.rest()
            memory = stage.reconciler.memory((namespace, "job"))
            assert memory is not None
            if not end:
                memory.poll_result = polled
            elif (await stage.job())["status"]["attempt"] == 0:
                report_ends(stage, {0: 75, 1: 75}, "Preempted")
            await stage.rest()
        await check_swapped(stage)
