"""R1: an operator that is cut off at any request to the API server, and started again, reaches the same end.

A history is first played through without a cut, to count its requests and to see its end. Then it is played again for
a request after the other, cut off before it was sent or after it was answered. R2: the same with answers that say that
something went wrong: conflicts, throttling, faults of the server, answers that are never received.
"""

import dataclasses
import itertools
import os
import random
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import kube
import pytest
from operator_simulation import KillableApi, OperatorSimulation, manifest, refuse, simulated_operator
from pytest_workers import FULL

from megatronapp_operator.backends.kubernetes.client.resources import JOBS, PODS, Object

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(900)]
STRIDE = int(os.environ.get("MEGATRONAPP_CUT_STRIDE", "0"))
"""Distance between the requests that are cut; 1: all of them, 0: as many as POSITIONS."""
POSITIONS = 7 if FULL else 2
UNSTEADY = 20
"""Requests by which two runs of a history may differ: objects of a job are restored at an hour of the job's own."""


async def fails_and_ends(stage: OperatorSimulation) -> None:
    """A worker fails, the next gang is preempted, the third one ends well."""
    await run(stage, "job")
    await stage.nodes.end("job-worker-1", 42, message="boom")
    await stage.rest()
    await stage.pass_time(11)
    await train(stage, "job")
    await stage.nodes.api.delete(PODS, (await stage.nodes.pods())["job-worker-0"], grace_s=0)
    await stage.rest()
    await stage.pass_time(60)
    await train(stage, "job")
    for name in ("job-worker-0", "job-worker-1"):
        await stage.nodes.end(name, 0)
    await stage.rest()
    await stage.pass_time(400)


async def run(stage: OperatorSimulation, name: str) -> None:
    analyzer = {"analyzer": {"enabled": True}, "runPolicy": {"cleanPodPolicy": "All"}}
    await stage.nodes.api.create(JOBS, manifest(stage.namespace, name, **analyzer))
    await stage.rest()
    await train(stage, name)


async def train(stage: OperatorSimulation, name: str) -> None:
    """Let the ranks begin, under any operator."""
    for _ in range(3):
        if stage.reconciler.memory((stage.namespace, name)) is None:
            await stage.rest()
        stage.report_progress(name)
        await stage.rest()


@dataclasses.dataclass(frozen=True)
class End:
    """State that must not depend on when the operator was cut off."""

    phase: str
    attempt: int
    restarts: int
    counted: int
    failures: tuple[tuple[str, str], ...]
    pods: frozenset[str]


async def end_of(stage: OperatorSimulation) -> End:
    status = (await stage.job())["status"]
    failures = tuple((failure["reason"], failure["action"]) for failure in status["failures"])
    counts = status["attempt"], status["restarts"], status["restartsTowardsMax"]
    return End(status["phase"], *counts, failures, frozenset(await stage.nodes.pods()))


async def played(
    plane: kube.ControlPlane,
    namespace: str,
    change: Callable[[KillableApi], None],
    history: Callable[[OperatorSimulation], Awaitable[None]],
) -> tuple[End, OperatorSimulation]:
    """Play one history in a separate namespace."""
    assert plane.kubectl("create", "namespace", namespace).returncode == 0
    async with simulated_operator(plane, namespace) as stage:
        change(stage.api)
        await stage.begin()
        await history(stage)
        return await end_of(stage), stage


def kill_positions(count: int) -> Iterable[int]:
    """Return the numbers of the requests to cut, of a history with `count` requests."""
    if STRIDE:
        return range(1, count + 1, STRIDE)
    return [part * (count - UNSTEADY) // POSITIONS for part in range(1, POSITIONS + 1)]


class Once:
    """Cuts one request, the first time that it is reached."""

    def __init__(self, number: int, when: str) -> None:
        self._number, self._when = number, when

    def give(self, api: KillableApi) -> None:
        api.kill_at = self

    def __call__(self, number: int) -> str | None:
        return self._when if number == self._number else None


async def test_an_operator_killed_at_any_request_reaches_the_same_end(
    plane: kube.ControlPlane, namespace: str, record_property: Callable[[str, object], None]
) -> None:
    expected, whole = await played(plane, f"{namespace}-whole", lambda _api: None, fails_and_ends)
    assert expected.phase == "Succeeded" and (expected.attempt, expected.counted) == (2, 1) and not expected.pods
    steps, kills = whole.api.count, 0
    for number, when in itertools.product(kill_positions(whole.api.count), ("before", "after")):
        once = Once(number, when)
        found, stage = await played(plane, f"{namespace}-{number}-{when}", once.give, fails_and_ends)
        reached = stage.api.count >= number  # requests depend a little on real time: the last ones may not be made
        assert reached or number > whole.api.count - UNSTEADY, f"{stage.api.count} of {whole.api.count} requests"
        assert (found, stage.lives) == (expected, 2 if reached else 1), f"cut {when} request {number}"
        steps, kills = steps + stage.api.count, kills + reached
    record_property("steps", steps)
    print(f"{kills} cuts, {steps} requests")
    assert STRIDE or kills == 2 * POSITIONS


class Faulty:
    """Faults of requests in one way, one in five by chance; a lost answer follows the completed request."""

    def __init__(self, seed: int, kind: str) -> None:
        self._random, self._kind = random.Random(seed), kind

    def __call__(self, _number: int) -> str | None:
        if self._random.random() > 0.2:
            return None
        refuse(self._kind)
        return "lost"


@pytest.mark.full("the other kinds", but=("conflict", "lost"))
@pytest.mark.parametrize("kind", ["conflict", "throttled", "unavailable", "lost"])
async def test_answers_that_go_wrong_change_nothing_about_the_end(
    plane: kube.ControlPlane, namespace: str, kind: str
) -> None:
    def fault(api: KillableApi) -> None:
        api.kill_at = Faulty(1, kind)

    found, stage = await played(plane, f"{namespace}-{kind}", fault, fails_and_ends)
    assert (found.phase, found.attempt, found.counted, found.pods) == ("Succeeded", 2, 1, frozenset())
    assert stage.lives == 1


async def test_a_leader_that_wakes_late_changes_nothing_of_its_successor(
    plane: kube.ControlPlane, namespace: str
) -> None:
    async with simulated_operator(plane, namespace) as stage:
        await stage.begin()
        await run(stage, "job")
        asleep, store = stage.reconciler, stage.store
        await stage.begin()
        await stage.nodes.end("job-worker-1", 42, message="boom")
        await stage.rest()
        await stage.pass_time(11)
        before = await uids(stage), await stage.job()
        stage.reconciler, stage.store = asleep, store
        await stage.reconcile()
        after = await uids(stage), await stage.job()
    assert after == before


async def uids(stage: OperatorSimulation) -> dict[str, str]:
    pods: dict[str, Object] = await stage.nodes.pods()
    return {name: pod["metadata"]["uid"] for name, pod in pods.items() if not deleted(pod)}


def deleted(pod: Object) -> Any:
    return pod["metadata"].get("deletionTimestamp")
