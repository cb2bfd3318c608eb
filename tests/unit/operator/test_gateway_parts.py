"""Parts of the gateway that need no cluster: answers that are kept, logins, requests, and its document."""

import asyncio
import base64
import json
import pathlib
import time
import types
import urllib.parse
from collections.abc import AsyncGenerator
from typing import cast

import aiohttp
import pytest
from fake_clock import FakeClock
from hypothesis import given
from hypothesis import strategies as st

from megatronapp_common.names import GATEWAY_AUDIENCE
from megatronapp_common.web.problems import HttpError
from megatronapp_common.web.tokens import TokenRole
from megatronapp_operator.backends.kubernetes.client.api import KubernetesApi, ObjectList
from megatronapp_operator.backends.kubernetes.client.errors import UnavailableError
from megatronapp_operator.gateway.access.authorization import Caller
from megatronapp_operator.gateway.access.credentials import cookie_name
from megatronapp_operator.gateway.access.sessions import LIFE_S, MAX_TOKENS, TICKET_LIFE_S, BrowserSessions, TokenStore
from megatronapp_operator.gateway.access.subject_access import User, audiences_of
from megatronapp_operator.gateway.app import build_api
from megatronapp_operator.gateway.gateway import (
    MAX_REQUESTS,
    MAX_SOCKETS,
    Gateway,
    concurrency_keys,
    concurrency_limits,
    rate_limit_keys,
)
from megatronapp_operator.gateway.job_catalog import CatalogJob, JobCatalog
from megatronapp_operator.gateway.proxy.http_proxy import AT_ONCE, address_of, new_session
from megatronapp_operator.gateway.proxy.hub_addresses import is_owned_by
from megatronapp_operator.gateway.proxy.websocket_proxy import reason_of
from megatronapp_operator.gateway.routes import (
    readyz,
)
from megatronapp_operator.gateway.ttl_cache import TtlCache
from megatronapp_operator.gateway.websocket_admission import CALLERS_SOCKETS, JOBS_SOCKETS
from megatronapp_operator.keys import KeyRing


def test_the_committed_openapi_document_is_that_of_the_gateway() -> None:
    committed = pathlib.Path(__file__).parents[3] / "frontend" / "src" / "api" / "gateway.json"
    assert json.loads(committed.read_text(encoding="utf-8")) == json.loads(json.dumps(build_api().openapi()))


@pytest.mark.asyncio
async def test_concurrent_requests_are_answered_by_a_single_load() -> None:
    loads: list[str] = []
    go = asyncio.Event()

    async def load(key: str) -> int:
        loads.append(key)
        await go.wait()
        return len(loads)

    clock = FakeClock()
    cache = TtlCache(load, ttl_s=5, size=2, clock=clock)
    waiting = [asyncio.ensure_future(cache.get("a")) for _ in range(3)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    go.set()
    assert await asyncio.gather(*waiting[1:]) == [1, 1]
    clock.now = 4.9
    assert await cache.get("a") == 1
    clock.now = 5.0
    assert await cache.get("a") == 2
    await cache.get("b")
    await cache.get("c")
    await cache.get("a")
    assert loads == ["a", "a", "b", "c", "a"]


@pytest.mark.asyncio
async def test_a_failure_is_raised_and_not_cached() -> None:
    answers: list[OSError | int] = [OSError("no"), 7]

    async def load(_: str) -> int:
        answer = answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return answer

    cache = TtlCache(load, ttl_s=5)
    with pytest.raises(OSError, match="no"):
        await cache.get("a")
    assert await cache.get("a") == 7


class NoJobs:
    """An API server without jobs, which counts how often it is asked for them."""

    def __init__(self) -> None:
        self.requests = 0

    async def list_objects(self, *_: object) -> ObjectList:
        self.requests += 1
        return ObjectList([], "1")


@pytest.mark.asyncio
async def test_a_token_of_a_deleted_job_is_resolved_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that requests of a browser with several such tokens do not wait for one more listing for each of them."""
    monkeypatch.setattr("megatronapp_operator.gateway.job_catalog.FRESH_S", 1.0)
    api = NoJobs()
    catalog = JobCatalog(cast(KubernetesApi, api), keys=KeyRing(["ab" * 32]))
    tokens, began = [f"{number:064x}" for number in range(16)], time.monotonic()
    assert await asyncio.gather(*map(catalog.job_of, tokens)) == [None] * 16
    assert [await catalog.job_of(token) for token in tokens] == [None] * 16
    assert 2 <= api.requests <= 2 + time.monotonic() - began, "a list is a second old at most"


class PagedCluster:
    """Lists jobs page by page, while it answers."""

    def __init__(self) -> None:
        self.answers, self.requests = False, list[tuple[str | None, int]]()

    async def pages(self, _resource: object, namespace: str | None, *, page: int) -> AsyncGenerator[ObjectList, None]:
        self.requests.append((namespace, page))
        if not self.answers:
            raise UnavailableError("no answer")
        yield ObjectList([], "1")
        yield ObjectList([], "1")


@pytest.mark.asyncio
async def test_the_gateway_is_ready_once_the_cluster_has_answered() -> None:
    cluster = PagedCluster()
    catalog = JobCatalog(cast(KubernetesApi, cluster), keys=KeyRing(["ab" * 32]), namespaces=("a", "b"))
    gateway = cast(Gateway, types.SimpleNamespace(catalog=catalog, reached=False))
    with pytest.raises(UnavailableError):
        await readyz(gateway)
    cluster.answers = True
    assert (await readyz(gateway)).status == "ok"
    assert cluster.requests == [("a", 1), ("a", 1), ("b", 1)]
    cluster.answers = False
    assert (await readyz(gateway)).status == "ok" and len(cluster.requests) == 3


@given(st.text())
def test_the_reason_of_a_close_frame_fits(text: str) -> None:
    reason = reason_of(HttpError(403, "no-right", text, ""))
    assert text.startswith(reason)
    assert len(reason.encode()) <= 123


def test_a_ticket_is_good_once_and_for_five_minutes() -> None:
    clock = FakeClock()
    sessions = BrowserSessions(clock=clock)
    ticket, late = sessions.ticket(("token",), whose="a"), sessions.ticket(("token",), whose="a")
    assert sessions.redeem(ticket) == ("token",)
    assert sessions.redeem(ticket) == ()
    clock.now = TICKET_LIFE_S
    assert sessions.redeem(late) == ()


def test_a_browser_keeps_what_it_showed_until_its_time_is_over() -> None:
    clock = FakeClock()
    sessions = BrowserSessions(clock=clock)
    first = sessions.log_in(("one",), whose="a")
    second = sessions.log_in(("two",), whose="a", before=first)
    assert sessions.tokens(first) == ()
    assert sessions.tokens(second) == ("two", "one")
    again = sessions.log_in(("one",), whose="a", before=second)
    assert sessions.tokens(again) == ("one", "two")
    sessions.log_out(again)
    assert sessions.tokens(again) == ()
    other = sessions.log_in(("three",), whose="a")
    clock.now = LIFE_S
    assert sessions.tokens(other) == ()


@given(st.lists(st.text(min_size=1), max_size=40))
def test_a_browser_keeps_at_most_so_many_tokens_the_newest(tokens: list[str]) -> None:
    sessions, session_token = BrowserSessions(), ""
    for token in tokens:
        session_token = sessions.log_in((token,), whose="a", before=session_token)
    newest = list(dict.fromkeys(reversed(tokens)))
    assert list(sessions.tokens(session_token)) == newest[:MAX_TOKENS]


def test_the_oldest_sessions_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatronapp_operator.gateway.access.sessions.MAX_SESSIONS", 2)
    store = TokenStore(life_s=3600)
    tokens = [store.add((str(number),), whose=str(number)) for number in range(3)]
    assert [store.get(token) for token in tokens] == [(), ("1",), ("2",)]


def test_the_tokens_of_all_sessions_fit_into_their_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatronapp_operator.gateway.access.sessions.MAX_BYTES", 100)
    store = TokenStore(life_s=3600)
    tokens = [store.add(("x" * 40,), whose=str(number)) for number in range(3)]
    assert [bool(store.get(token)) for token in tokens] == [False, True, True]
    store.drop(tokens[1])
    tokens += [store.add(("x" * 40,), whose="y")]
    assert [bool(store.get(token)) for token in tokens] == [False, False, True, True]


def test_who_logs_in_again_and_again_logs_out_only_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatronapp_operator.gateway.access.sessions.MAX_EACH", 2)
    store = TokenStore(life_s=3600)
    other = store.add(("other",), whose="other")
    tokens = [store.add((str(number),), whose="me") for number in range(4)]
    assert [store.get(token) for token in [other, *tokens]] == [("other",), (), (), ("2",), ("3",)]


@given(st.dictionaries(st.text(min_size=1), st.text()))
def test_a_query_reaches_the_hub_as_it_was_but_for_tokens(query: dict[str, str]) -> None:
    given = urllib.parse.urlencode(query | {"token": "secret"})
    url = address_of("10.0.0.1:8080", "heatmap", given)
    assert (url.host, url.port, url.path) == ("10.0.0.1", 8080, "/api/v1/heatmap")
    found = dict(urllib.parse.parse_qsl(url.raw_query_string, keep_blank_values=True))
    assert found == {key: value for key, value in query.items() if key != "token"}


@pytest.mark.parametrize(
    ("token", "passes"), [("11", True), ("4294967295", True), ("ab" * 32, False), ("1" * 64, False), ("-1", False)]
)
def test_numbers_of_a_model_s_tokens_reach_the_hub(token: str, passes: bool) -> None:
    url = address_of("10.0.0.1:8080", "scope/runs/one/lens", f"top=3&token={token}")
    assert url.query.get("token") == (token if passes else None)
    assert url.query["top"] == "3"


def claims(**fields: object) -> str:
    body = base64.urlsafe_b64encode(json.dumps(fields).encode()).decode().rstrip("=")
    return f"head.{body}.signature"


def test_audiences_of_a_token_are_read() -> None:
    assert audiences_of(claims(aud=[GATEWAY_AUDIENCE, 7])) == [GATEWAY_AUDIENCE]
    assert audiences_of(claims(aud=GATEWAY_AUDIENCE)) == [GATEWAY_AUDIENCE]
    assert [audiences_of(token) for token in ("", "a.b", "a.!.c", claims(sub="x"), claims(aud=7))] == [[]] * 5


@given(st.text())
def test_no_token_is_too_odd(token: str) -> None:
    assert audiences_of(token) == [] or "." in token


def test_no_caller_exceeds_its_limit_of_sockets() -> None:
    limits = concurrency_limits("sockets", 4)
    first = limits.acquire({"alice": 2, "hub one": 3})
    with limits.acquire({"alice": 2, "hub two": 3}), pytest.raises(HttpError, match="alice has 2 sockets at once"):
        limits.acquire({"hub three": 3, "alice": 2})
    assert limits.in_use() == 1
    with limits.acquire({"hub three": 2}), limits.acquire({"hub three": 2}), limits.acquire({"alice": 2}):
        assert limits.in_use() == 4
        with pytest.raises(HttpError, match="the gateway has 4 sockets at once"):
            limits.acquire({"bob": 2})
    first.close()
    with limits.acquire({"alice": 2}), limits.acquire({"alice": 2}):
        pass
    assert limits.in_use() == 0


def test_no_caller_can_exhaust_the_limit_of_a_job() -> None:
    job, alice = CatalogJob("team", "gpt", "u"), Caller(User("alice"), frozenset())
    limits = concurrency_keys(alice, job)
    assert limits["user alice at the hub of team/gpt"] < limits["hub of team/gpt"] < MAX_REQUESTS
    assert CALLERS_SOCKETS < JOBS_SOCKETS < MAX_SOCKETS


def test_who_holds_a_viewer_s_token_takes_nothing_of_who_holds_the_controller_s() -> None:
    job, uids = CatalogJob("team", "gpt", "u"), frozenset({"u"})
    viewer, controller = Caller(None, uids), Caller(None, uids, uids)
    shared = concurrency_keys(viewer, job).keys() & concurrency_keys(controller, job).keys()
    assert shared == {"hub of team/gpt"}, "of which no caller can fill more than a part"
    assert (
        not rate_limit_keys(viewer, job, TokenRole.VIEWER).keys()
        & rate_limit_keys(controller, job, TokenRole.CONTROLLER).keys()
    )
    catalog = JobCatalog(cast("KubernetesApi", None), keys=KeyRing(["ab" * 32]))
    assert catalog.alias(job, viewer.identity) != catalog.alias(job, controller.identity), "nor at the hub"
    both = Caller(None, frozenset({"a", "u"}), uids)
    assert both.identity == controller.identity


@pytest.mark.asyncio
async def test_hubs_wait_for_none_but_themselves() -> None:
    async with new_session() as session:
        connector = session.connector
        assert isinstance(connector, aiohttp.TCPConnector)
        assert (connector.limit, connector.limit_per_host) == (0, AT_ONCE)


def test_cookies_of_two_installations_do_not_meet() -> None:
    assert cookie_name("ab" * 32) != cookie_name("ac" * 32)


def test_whose_pod_it_is() -> None:
    owner = {"kind": "MegatronJob", "uid": "u", "controller": True}
    pods = [owner, owner | {"uid": "v"}, owner | {"kind": "Job"}, owner | {"controller": False}]
    found = [is_owned_by({"metadata": {"ownerReferences": [reference]}}, "u") for reference in pods]
    assert found == [True, False, False, False]
    assert not is_owned_by({"metadata": {}}, "u")
