"""Requests of a new leader to the cluster, and how long it waits for an answer."""

import asyncio
import pathlib
from typing import Any, cast

import pytest
from prometheus_client import CollectorRegistry

from megatronapp_operator.backends.kubernetes.client.api import KubernetesApi
from megatronapp_operator.backends.kubernetes.client.errors import ForbiddenError, InvalidError
from megatronapp_operator.backends.kubernetes.client.resources import (
    KUBERNETES_POD_GROUPS,
    RESOURCE_CLAIMS,
    Object,
    Resource,
)
from megatronapp_operator.backends.kubernetes.lease import LeaseHolder
from megatronapp_operator.controller import capabilities
from megatronapp_operator.controller.capabilities import find_pod_groups, has_container_restarts, has_resource_claims
from megatronapp_operator.controller.main import _lead
from megatronapp_operator.controller.service import ControllerHealth
from megatronapp_operator.controller.settings import parse
from megatronapp_operator.metrics import OperatorMetrics


class AdmissionServer:
    """API server that answers a dry run with an error, or as one that drops the field."""

    def __init__(self, error: Exception | None, minor: int) -> None:
        self._error, self._minor = error, minor

    async def create(self, _resource: Any, obj: Object, *, dry_run: bool) -> Object:
        assert dry_run
        if self._error is not None:
            raise self._error
        containers = [{"name": container["name"]} for container in obj["spec"]["containers"]]
        return obj | {"spec": obj["spec"] | {"containers": containers}}

    async def minor_version(self) -> int:
        return self._minor


@pytest.mark.parametrize(
    ("error", "minor", "expected"),
    [
        (None, 36, False),
        (InvalidError("spec.containers[1].restartPolicy: Forbidden: may not be set"), 36, False),
        (InvalidError("ValidatingAdmissionPolicy 'images' denied request: no digest"), 35, True),
        (InvalidError("ValidatingAdmissionPolicy 'images' denied request: no digest"), 34, False),
        (ForbiddenError("exceeded quota"), 35, True),
        (ForbiddenError("exceeded quota"), 34, False),
    ],
)
@pytest.mark.asyncio
async def test_a_feature_that_a_provider_switched_off_is_not_used(
    error: Exception | None, minor: int, expected: bool
) -> None:
    assert await has_container_restarts(cast(KubernetesApi, AdmissionServer(error, minor)), "n") is expected


class SilentServer(AdmissionServer):
    """API server that answers no dry run."""

    async def create(self, _resource: Any, _obj: Object, *, dry_run: bool) -> Object:
        assert dry_run
        await asyncio.Event().wait()
        raise AssertionError("nothing sets it")


@pytest.mark.asyncio
async def test_the_version_decides_where_a_webhook_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capabilities, "ANSWER_S", 0.01)
    assert await has_container_restarts(cast(KubernetesApi, SilentServer(None, 35)), "n")
    assert not await has_container_restarts(cast(KubernetesApi, SilentServer(None, 34)), "n")


class DiscoveringServer:
    """API server that serves these kinds."""

    def __init__(self, *kinds: Resource) -> None:
        self._kinds = kinds

    async def served(self, api_version: str) -> frozenset[str]:
        return frozenset(kind.plural for kind in self._kinds if kind.api_version == api_version)


@pytest.mark.asyncio
async def test_the_newest_kind_of_pod_groups_that_is_served_is_taken() -> None:
    priorities = Resource("scheduling.k8s.io/v1beta1", "priorityclasses")
    for at, kind in enumerate(KUBERNETES_POD_GROUPS):
        server = DiscoveringServer(priorities, *reversed(KUBERNETES_POD_GROUPS[at:]))
        assert await find_pod_groups(cast(KubernetesApi, server)) == kind
    assert await find_pod_groups(cast(KubernetesApi, DiscoveringServer(priorities))) is None


@pytest.mark.asyncio
async def test_claims_of_any_version_are_found() -> None:
    for kind in RESOURCE_CLAIMS:
        assert await has_resource_claims(cast(KubernetesApi, DiscoveringServer(kind)))
    assert not await has_resource_claims(cast(KubernetesApi, DiscoveringServer()))


class RequestError(Exception):
    """The question has arrived."""


class CuriousServer:
    """API server that ends the operator at its first question."""

    def __init__(self) -> None:
        self.renewals: list[bool] = []
        self.renewing = False

    async def hold(self) -> None:
        """Hold the lease as LeaseHolder.hold does."""
        self.renewing = True
        await asyncio.Event().wait()

    async def create(self, *_arguments: Any, **_options: Any) -> Object:
        """Create the object as Api.create does."""
        await asyncio.sleep(0)
        self.renewals.append(self.renewing)
        raise RequestError


@pytest.mark.asyncio
async def test_the_lease_is_renewed_while_the_first_question_waits(tmp_path: pathlib.Path) -> None:
    (tmp_path / "keys").write_text("ab" * 32)
    flags = ["--trainer-image", "a", "--analyzer-image", "b", "--key-file", str(tmp_path / "keys")]
    server, metrics = CuriousServer(), OperatorMetrics(CollectorRegistry(), version="0")
    with pytest.raises((RequestError, ExceptionGroup)):
        await _lead(cast(KubernetesApi, server), cast(LeaseHolder, server), parse(flags), metrics, ControllerHealth())
    assert server.renewals == [True]
