"""Number of requests for a small job: a write of its status costs the API server more than any other."""

import collections
import contextlib
import dataclasses
from collections.abc import AsyncIterator
from typing import Any

import kube
import pytest
from operator_simulation import OperatorSimulation, manifest, simulated_operator

from megatronapp_operator.backends.kubernetes.client.resources import JOBS, Object
from megatronapp_operator.backends.kubernetes.status_writer import COUNTS_S

pytestmark = pytest.mark.asyncio
REFRESH_S = 0.2
SMALL: dict[str, Any] = {"nodes": 1, "analyzer": {"enabled": True}, "trace": {"enabled": True}}


@dataclasses.dataclass(slots=True)
class Watched:
    """Job of one pod and a hub, reconciled step by step, and what was written of it."""

    stage: OperatorSimulation
    written: list[Object] = dataclasses.field(default_factory=list)
    created: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    """Requests of the operator that create an object, by resource."""

    async def refresh(self, after_s: float = REFRESH_S) -> None:
        """Reconcile as after an event, this number of seconds later."""
        self.stage.skipped_s += after_s
        await self.stage.refresh()
        while await self.stage.reconcile():
            pass

    async def create(self) -> None:
        """Create the job and its pods, and let the operator see them."""
        await self.stage.nodes.api.create(JOBS, manifest(self.stage.namespace, **SMALL))
        await self.stage.begin()
        await self.refresh()
        await self.refresh()

    async def bind(self) -> None:
        """Give machines to its pods."""
        for name in ("job-hub", "job-worker-0"):
            await self.stage.nodes.bind(name)
            await self.refresh()

    async def run(self) -> None:
        """Let the pods run."""
        for pod in (await self.stage.nodes.pods()).values():
            await self.stage.nodes.start(pod)
            await self.refresh()

    @property
    def due_s(self) -> float:
        """Seconds until the operator looks by itself."""
        return self.stage.due[self.stage.namespace, "job"] - self.stage.now()


@contextlib.asynccontextmanager
async def watched(plane: kube.ControlPlane, namespace: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Watched]:
    async with simulated_operator(plane, namespace) as stage:
        made, replace, create = Watched(stage), stage.api.replace, stage.api.create

        async def noted(resource: Any, obj: Object, **options: Any) -> Object:
            made.written.append(obj["status"])
            return await replace(resource, obj, **options)

        async def counted(resource: Any, obj: Object, **options: Any) -> Object:
            made.created[resource.plural] += 1
            return await create(resource, obj, **options)

        monkeypatch.setattr(stage.api, "replace", noted)
        monkeypatch.setattr(stage.api, "create", counted)
        yield made


async def test_a_small_job_that_starts_is_written_when_it_is_created_and_when_it_runs(
    plane: kube.ControlPlane, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with watched(plane, namespace, monkeypatch) as made:
        await made.create()
        await made.bind()
        await made.run()
        first, second = made.written
    assert "scheduledTime" not in first and first["phase"] == "Starting"
    assert second["replicaStatuses"]["running"] == 1
    assert {"holdingTime", "scheduledTime", "runningTime"} <= second.keys()
    of_hub = {"pods": 1, "services": 1, "networkpolicies": 1, "configmaps": 1}
    assert made.created - collections.Counter(of_hub) == {
        "pods": 1, "services": 1, "networkpolicies": 1, "secrets": 1, "events": 1,
    }  # fmt: skip


async def test_where_pods_are_waits_a_second_for_more_and_is_written_before_anything_is_done(
    plane: kube.ControlPlane, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with watched(plane, namespace, monkeypatch) as made:
        await made.create()
        await made.bind()
        assert len(made.written) == 1 and 0 < made.due_s <= COUNTS_S
        await made.refresh(COUNTS_S)
        assert "scheduledTime" in made.written[1] and len(made.written) == 2
        await made.refresh(COUNTS_S)
        await made.stage.begin()  # a successor has nothing to add to what it reads
        await made.refresh()
        assert len(made.written) == 2
        await made.stage.nodes.end("job-worker-0", 42, message="boom")
        await made.refresh()
    assert made.written[2]["failures"][0]["exitCode"] == 42
