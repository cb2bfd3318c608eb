"""Tickets at a gateway whose cluster does not answer, or that two browsers show at once; logins that break off."""

import asyncio
from typing import cast

import pytest
from prometheus_client import CollectorRegistry
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message

from megatronapp_common.web.problems import HttpError
from megatronapp_common.web.tokens import TokenRole, derive_token, job_secret
from megatronapp_operator.backends.kubernetes.client.api import KubernetesApi, ObjectList
from megatronapp_operator.backends.kubernetes.client.errors import ApiError
from megatronapp_operator.gateway.access.authorization import Authorizer
from megatronapp_operator.gateway.access.credentials import Credentials
from megatronapp_operator.gateway.access.sessions import BrowserSessions
from megatronapp_operator.gateway.app import GatewaySettings, create_app
from megatronapp_operator.gateway.job_catalog import JobCatalog
from megatronapp_operator.gateway.metrics import GatewayMetrics
from megatronapp_operator.gateway.static_pages import MAX_FORM_BYTES
from megatronapp_operator.keys import KeyRing

KEY = "ab" * 32
TOKEN = derive_token(job_secret(KEY, "u"), TokenRole.VIEWER)
JOB = {"metadata": {"namespace": "team", "name": "gpt", "uid": "u", "creationTimestamp": "2026-01-01T00:00:00Z"}}
pytestmark = pytest.mark.asyncio


class UnreachableCluster:
    """API server with one job, which may be unreachable."""

    def __init__(self) -> None:
        self.unreachable = False

    async def list_objects(self, *_: object) -> ObjectList:
        await asyncio.sleep(0)
        if self.unreachable:
            raise ApiError("it does not answer")
        return ObjectList([JOB], "1")


def browser() -> Request:
    return Request({"type": "http", "method": "POST", "scheme": "http", "path": "/login", "headers": []})


async def test_a_ticket_outlives_a_cluster_that_does_not_answer() -> None:
    cluster, sessions = UnreachableCluster(), BrowserSessions()
    gate, credentials = (
        Authorizer(JobCatalog(cast(KubernetesApi, cluster), keys=KeyRing([KEY])), None),
        Credentials(sessions, cookie="c"),
    )
    ticket = sessions.ticket((TOKEN,), whose="job u")
    cluster.unreachable = True
    with pytest.raises(ApiError):
        await credentials.log_in(browser(), ticket, Response(), gate=gate)
    cluster.unreachable = False
    answer = await credentials.log_in(browser(), ticket, Response(), gate=gate)
    session = answer.headers["set-cookie"].partition("=")[2].partition(";")[0]
    assert sessions.tokens(session) == (TOKEN,)
    with pytest.raises(HttpError) as refused:
        await credentials.log_in(browser(), ticket, Response(), gate=gate)
    assert refused.value.status == 401


async def test_a_ticket_shown_twice_at_once_logs_in_a_single_browser() -> None:
    sessions = BrowserSessions()
    gate, credentials = (
        Authorizer(JobCatalog(cast(KubernetesApi, UnreachableCluster()), keys=KeyRing([KEY])), None),
        Credentials(sessions, cookie="c"),
    )
    ticket = sessions.ticket((TOKEN,), whose="job u")
    shown = [credentials.log_in(browser(), ticket, Response(), gate=gate) for _ in range(4)]
    answers = await asyncio.gather(*shown, return_exceptions=True)
    assert [isinstance(answer, Response) for answer in answers].count(True) == 1
    assert {answer.status for answer in answers if isinstance(answer, HttpError)} == {401}


@pytest.mark.parametrize(("body", "refused"), [(b"a" * (MAX_FORM_BYTES + 1), {"too-long": 1}), (b"a", {})])
async def test_a_login_that_breaks_off_is_not_counted_as_refused(body: bytes, refused: dict[str, int]) -> None:
    registry = CollectorRegistry()
    app = create_app(
        cast(KubernetesApi, UnreachableCluster()), GatewaySettings(keys=KeyRing([KEY])), GatewayMetrics(registry)
    )
    received: list[Message] = [{"type": "http.request", "body": body, "more_body": True}, {"type": "http.disconnect"}]

    async def receive() -> Message:
        return received.pop(0)

    async def send(_: Message) -> None:
        pass

    await app(dict(browser().scope) | {"query_string": b""}, receive, send)
    (counted,) = (metric for metric in registry.collect() if metric.name == "megatron_gateway_refusals")
    found = {sample.labels["code"]: sample.value for sample in counted.samples if sample.name.endswith("_total")}
    assert {code: count for code, count in found.items() if count} == refused
