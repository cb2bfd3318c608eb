"""Pauses of a candidate that waits for the lease of a holder that has died."""

import asyncio
from typing import Any, cast

import pytest

from megatronapp_operator.backends.kubernetes.client.api import KubernetesApi
from megatronapp_operator.backends.kubernetes.client.errors import ForbiddenError
from megatronapp_operator.backends.kubernetes.client.resources import Object
from megatronapp_operator.backends.kubernetes.lease import LeaseHolder, LeaseSettings


class LeaseServer:
    """API server with a lease of another holder, which is renewed at the times of `renewals`."""

    def __init__(self, *renewals: float) -> None:
        self.now = 100.0
        self.renewals = renewals
        self.pauses: list[float] = []

    async def get(self, *_arguments: Any, **_options: Any) -> Object:
        version = sum(at <= self.now for at in self.renewals)
        spec = {"holderIdentity": "dead", "leaseDurationSeconds": 15}
        return {"metadata": {"name": "operator", "resourceVersion": str(version)}, "spec": spec}

    async def replace(self, _resource: Any, obj: Object, **_options: Any) -> Object:
        return obj

    async def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds


@pytest.mark.parametrize(
    ("renewals", "expected_s"), [((), 15.0), ((105.0,), 6.0 + 15.0)], ids=["dead before", "dies while it waits"]
)
@pytest.mark.asyncio
async def test_a_lease_is_taken_as_soon_as_its_time_is_over(
    monkeypatch: pytest.MonkeyPatch, renewals: tuple[float, ...], expected_s: float
) -> None:
    server = LeaseServer(*renewals)
    monkeypatch.setattr(asyncio, "sleep", server.sleep)
    holder = LeaseHolder(
        cast("KubernetesApi", server),
        namespace="n",
        name="operator",
        identity="second",
        settings=LeaseSettings(retry_s=2.0),
        clock=lambda: server.now,
    )
    await holder.acquire()
    assert server.now == 100.0 + expected_s, "seen at 106 s, a renewal of 105 s gives 15 s more"
    assert max(server.pauses) == 2.0, "a renewal or a release must not be missed for longer"


@pytest.mark.asyncio
async def test_why_a_lease_cannot_be_taken_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    server = LeaseServer()
    refusals = [ForbiddenError("leases is forbidden", status=403)] * 3

    async def get(*_arguments: Any, **_options: Any) -> Object | None:
        if refusals:
            raise refusals.pop()
        return None

    async def create(_resource: Any, obj: Object) -> Object:
        return obj

    monkeypatch.setattr(asyncio, "sleep", server.sleep)
    monkeypatch.setattr(server, "get", get)
    monkeypatch.setattr(server, "create", create, raising=False)
    holder = LeaseHolder(
        cast("KubernetesApi", server), namespace="n", name="operator", identity="one", clock=lambda: server.now
    )
    await holder.acquire()
    assert holder.is_leader
    assert [record.getMessage() for record in caplog.records] == [
        "the lease n/operator cannot be taken or renewed: leases is forbidden"
    ]
