"""Requests to hub and launcher over real HTTP, as they answer, answer nonsense, or do not answer."""

import asyncio
import contextlib
import dataclasses
import datetime
import itertools
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from fake_clock import FakeClock
from ports import own_addresses
from shared_tls import SHARED_TLS

from megatronapp_common.names import HUB_PORT, STATUS_PORT, ReplicaType
from megatronapp_common.web.tokens import TokenRole, derive_token, job_secret
from megatronapp_operator.backends.kubernetes.hub_poller import MAX_BYTES, POLL_S, RECENT_S, HubPoller
from megatronapp_operator.backends.kubernetes.observe import GatheringStatus, PollHealth, PollResult, observe
from megatronapp_operator.backends.kubernetes.pod_record import ContainerState, PodRecord
from megatronapp_operator.keys import KeyRing, key_id
from megatronapp_trainer.launch.rendezvous.gang_status import GangPhase as LauncherPhase
from megatronapp_trainer.launch.rendezvous.gang_status import GangStatus

pytestmark = pytest.mark.asyncio
KEY = "cd" * 32
ADDRESSES = own_addresses()
HUB, LAUNCHER = next(ADDRESSES), next(ADDRESSES)
PATIENCE_S = 120.0
"""For answers of a server in this process, which may be stopped at any moment."""
TOKEN = derive_token(job_secret(KEY, "uid"), TokenRole.VIEWER)
SUMMARY = {"attempt": 1, "progress": {"attempt": 1, "iteration": 7}, "slowRanks": [], "hungRanks": []}
TABLE = {"attempt": 1, "digest": "d", "masterAddr": "10.0.0.1", "masterPort": 29500, "workers": []}
LAUNCHER_ANSWER = {"attempt": 1, "rankTable": TABLE, "progress": {"attempt": 1, "iteration": 9}, "phase": "Running"}


def pod(kind: ReplicaType, address: str, **changes: Any) -> PodRecord:
    record = PodRecord(
        namespace="n", name=kind.value, uid=kind.value, version=1, job="job", job_uid="uid", type=kind, index=0,
        attempt=1, phase="Running", created_at=0.0, node="a", address=address, scheduled=True, ready=True,
        main=ContainerState(running=True),
    )  # fmt: skip
    return dataclasses.replace(record, **changes)


PODS = [pod(ReplicaType.HUB, HUB), pod(ReplicaType.WORKER, LAUNCHER)]


@contextlib.asynccontextmanager
async def answering(host: str, port: int, body: bytes, *, status: str = "200 OK") -> AsyncIterator[list[str]]:
    """A server with one answer for who has the token; gives the requests that it got."""
    requests: list[str] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        requests.append(head.splitlines()[0])
        line = status if f"Authorization: Bearer {TOKEN}" in head else "401 Unauthorized"
        writer.write(f"HTTP/1.1 {line}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body)
        with contextlib.suppress(ConnectionError):
            await writer.drain()
        writer.close()

    async with await asyncio.start_server(serve, host, port):
        yield requests


@contextlib.asynccontextmanager
async def silent(host: str, port: int) -> AsyncIterator[None]:
    """Listen and never answer, until the client has disconnected."""
    tasks: set[asyncio.Task[None] | None] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.add(asyncio.current_task())
        await reader.read()
        writer.close()

    async with await asyncio.start_server(serve, host, port):
        yield
        await asyncio.gather(*(task for task in tasks if task is not None))


async def polled(before: PollResult | None = None, pods: list[PodRecord] = PODS) -> PollResult:
    async with httpx.AsyncClient(trust_env=False, verify=SHARED_TLS) as client:
        return await HubPoller(client, timeout_s=PATIENCE_S, keys=KeyRing([KEY])).poll(
            "uid", pods, before or PollResult(), attempt=1, workers=2, ranks=16, key_id=""
        )


async def test_hub_and_launcher_report_progress_and_the_rank_table() -> None:
    async with (
        answering(HUB, HUB_PORT, json.dumps(SUMMARY).encode()) as hub,
        answering(LAUNCHER, STATUS_PORT, json.dumps(LAUNCHER_ANSWER).encode()) as launcher,
    ):
        result = await polled()
        assert result.summary is not None and result.summary.progress is not None
        assert (result.summary.progress.iteration, result.rank_table) == (7, TABLE)
        again = await polled(result)
    assert again.rank_table == TABLE and again.progress is not None and again.progress.iteration == 9
    assert hub == ["GET /api/v1/summary HTTP/1.1"] * 2 and launcher == ["GET /api/v1/launcher HTTP/1.1"] * 2


async def test_a_refused_token_is_remembered_until_the_next_answer() -> None:
    other = KeyRing(["ef" * 32])
    async with httpx.AsyncClient(trust_env=False, verify=SHARED_TLS) as client:
        async with answering(HUB, HUB_PORT, b"{}"), answering(LAUNCHER, STATUS_PORT, b"{}"):
            result = await HubPoller(client, timeout_s=PATIENCE_S, keys=other).poll(
                "uid", PODS, PollResult(), attempt=1, workers=2, ranks=16, key_id=""
            )
        assert result.refused == ("hub", "launcher") and (result.summary, result.received_at) == (None, 0.0)
        silence = await HubPoller(client, timeout_s=PATIENCE_S, keys=other).poll(
            "uid", PODS, result, attempt=1, workers=2, ranks=16, key_id=""
        )
        assert silence.refused == ("hub", "launcher")
        observed = observe(PODS, silence, attempt=1, refusal=None)
        assert (observed.token_refused, observed.last_contact) == (("hub", "launcher"), 0.0)
        async with answering(HUB, HUB_PORT, json.dumps(SUMMARY).encode()), answering(LAUNCHER, STATUS_PORT, b"{}"):
            both = HubPoller(client, timeout_s=PATIENCE_S, keys=KeyRing([*other.values, KEY]))
            result = await both.poll("uid", PODS, silence, attempt=1, workers=2, ranks=16, key_id=key_id(KEY))
    assert result.refused == () and result.summary is not None


async def test_without_the_key_of_the_job_no_request_is_sent() -> None:
    ring = KeyRing([KEY])
    async with (
        httpx.AsyncClient(trust_env=False, verify=SHARED_TLS) as client,
        answering(HUB, HUB_PORT, json.dumps(SUMMARY).encode()) as hub,
        answering(LAUNCHER, STATUS_PORT, json.dumps(LAUNCHER_ANSWER).encode()) as launcher,
    ):
        known = await polled()
        lost = await HubPoller(client, timeout_s=PATIENCE_S, keys=ring).poll(
            "uid", PODS, known, attempt=1, workers=2, ranks=16, key_id="01234567"
        )
        assert (len(hub), len(launcher)) == (1, 1)
        observed = observe(PODS, lost, attempt=1, refusal=None)
        assert (observed.unknown_key, observed.token_refused, lost.rank_table) == ("01234567", (), TABLE)
        again = await HubPoller(client, timeout_s=PATIENCE_S, keys=ring).poll(
            "uid", PODS, lost, attempt=1, workers=2, ranks=16, key_id=key_id(KEY)
        )
    assert again.unknown_key is None and again.summary is not None


async def test_without_a_hub_the_launcher_is_polled_every_time() -> None:
    async with answering(LAUNCHER, STATUS_PORT, json.dumps(LAUNCHER_ANSWER).encode()):
        result = await polled(PollResult(rank_table=TABLE), PODS[1:])
    assert result.summary is None and result.progress is not None and result.progress.iteration == 9


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"<html>", "200 OK"),
        (b"[]", "200 OK"),
        (b"{}", "503 Service Unavailable"),
        (b" " * (MAX_BYTES + 1), "200 OK"),
        (b'{"attempt": "x", "rankTable": 3, "progress": []}', "200 OK"),
        (b"{}", "302 Found"),
        (b"[" * 100_000, "200 OK"),
        (b'{"attempt": 1e999, "progress": null, "slowRanks": [], "hungRanks": []}', "200 OK"),
        (b'{"rankTable": {"attempt": 0, "workers": 5}, "progress": null}', "200 OK"),
        (b'{"rankTable": null, "progress": {"iteration": 1, "totalIterations": "boom"}}', "200 OK"),
    ],
)
async def test_a_useless_answer_changes_nothing(body: bytes, status: str) -> None:
    before = PollResult(rank_table={"attempt": 0})
    async with answering(HUB, HUB_PORT, body, status=status), answering(LAUNCHER, STATUS_PORT, body, status=status):
        result = await polled(before)
    assert result == before


@pytest.mark.parametrize("ranks", [[[*range(17)]], [[0], [1], [2]]], ids=["more ranks", "more workers"])
async def test_a_rank_table_of_a_larger_gang_is_absent(ranks: list[list[int]]) -> None:
    """The operator stores tables of all jobs, and a launcher is the users'."""
    workers = [{"index": place, "address": "10.0.0.1", "ranks": found} for place, found in enumerate(ranks)]
    body = json.dumps(LAUNCHER_ANSWER | {"rankTable": TABLE | {"workers": workers}}).encode()
    async with answering(LAUNCHER, STATUS_PORT, body):
        result = await polled(PollResult(rank_table=TABLE))
    assert result.rank_table == TABLE
    assert result.progress is not None


async def test_an_ipv6_or_invalid_address_is_not_polled() -> None:
    assert await polled(pods=[pod(ReplicaType.HUB, "::1"), pod(ReplicaType.WORKER, "no address")]) == PollResult()


async def test_pods_that_do_not_run_or_are_of_another_attempt_are_not_polled() -> None:
    waiting = [pod(ReplicaType.HUB, HUB, ready=False), pod(ReplicaType.WORKER, LAUNCHER, attempt=0)]
    async with (
        answering(HUB, HUB_PORT, b"{}") as hub,
        answering(LAUNCHER, STATUS_PORT, b"{}") as launcher,
    ):
        assert await polled(pods=waiting) == PollResult()
    assert hub == [] and launcher == []


async def test_a_hub_that_times_out_is_polled_less_and_less_often() -> None:
    clock, result, misses = FakeClock(1000.0), PollResult(), []
    async with silent(HUB, HUB_PORT), httpx.AsyncClient(trust_env=False, verify=SHARED_TLS) as client:
        poller = HubPoller(client, keys=KeyRing([KEY]), clock=clock, timeout_s=0.02)
        for _ in range(40):
            result = await poller.poll("uid", PODS[:1], result, attempt=1, workers=2, ranks=16, key_id="")
            misses.append(result.hub.misses)
            clock.now += POLL_S
        polled_at = [poll for poll, (now, before) in enumerate(zip(misses, [0, *misses], strict=False)) if now > before]
        assert [POLL_S * (after - before) for before, after in itertools.pairwise(polled_at)] == [10, 20, 40, 60, 60]
        fresh = dataclasses.replace(PODS[0], uid="another")
        assert (await poller.poll("uid", [fresh], result, attempt=1, workers=2, ranks=16, key_id="")).hub.misses == 1


async def test_a_launcher_is_polled_while_its_slow_hub_is_left_alone() -> None:
    resting = PollResult(hub=PollHealth(uid=PODS[0].uid, misses=3, due=float("inf")))
    async with (
        answering(HUB, HUB_PORT, json.dumps(SUMMARY).encode()) as hub,
        answering(LAUNCHER, STATUS_PORT, json.dumps(LAUNCHER_ANSWER).encode()),
    ):
        result = await polled(resting)
    assert (hub, result.summary, result.hub) == ([], None, resting.hub)
    assert result.progress is not None and result.progress.iteration == 9


async def test_hub_and_launcher_are_polled_in_parallel() -> None:
    both_connected = asyncio.Barrier(2)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        await both_connected.wait()  # for the other one
        body = json.dumps(SUMMARY if b"summary" in head else LAUNCHER_ANSWER).encode()
        writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        await writer.drain()
        writer.close()

    async with (
        await asyncio.start_server(serve, HUB, HUB_PORT),
        await asyncio.start_server(serve, LAUNCHER, STATUS_PORT),
    ):
        result = await polled()
    assert result.summary is not None and result.progress is not None


def summary(updated_at: float | None, *, attempt: int = 1, agents: int | None = None) -> bytes:
    """A hub's answer; seconds are those of `FakeClock`."""
    updated = None if updated_at is None else datetime.datetime.fromtimestamp(updated_at, datetime.UTC).isoformat()
    page = {"attempt": attempt, "iteration": 7, "updatedAt": updated}
    tracer = {} if agents is None else {"tracer": {"agents": agents}}
    return json.dumps(SUMMARY | {"progress": page} | tracer).encode()


async def poll_hub(poller: HubPoller, before: PollResult, body: bytes, port: int = HUB_PORT) -> PollResult:
    """Return what is known after this answer of the hub, or of the launcher."""
    async with answering(HUB if port == HUB_PORT else LAUNCHER, port, body):
        return await poller.poll("uid", PODS, before, attempt=1, workers=2, ranks=16, key_id="")


async def test_the_time_of_the_last_contact_alone_is_no_change() -> None:
    clock = FakeClock(1000.0)
    async with httpx.AsyncClient(trust_env=False, verify=SHARED_TLS) as client:
        poller = HubPoller(client, timeout_s=PATIENCE_S, keys=KeyRing([KEY]), clock=clock)
        assert (await poll_hub(poller, PollResult(), summary(1000.0, attempt=0))).received_at == 0.0
        first = await poll_hub(poller, PollResult(), summary(1000.0))
        clock.now += 5
        again = await poll_hub(poller, first, summary(1000.0))
        assert (first.received_at, again.received_at, first == again) == (1000.0, 1005.0, True)
        clock.now += 5
        assert (await poller.poll("uid", PODS, again, attempt=1, workers=2, ranks=16, key_id="")).received_at == 1005.0
        nothing = b'{"rankTable": null, "progress": null}'
        assert (await poll_hub(poller, again, nothing, STATUS_PORT)).received_at == 1010.0


@pytest.mark.parametrize(
    ("phase", "attempt", "waits"), [("Gathering", 1, True), ("Preflight", 1, False), ("Gathering", 0, False)]
)
async def test_a_launcher_reports_the_workers_it_waits_for(phase: str, attempt: int, waits: bool) -> None:
    status = GangStatus(attempt)
    status.phase, status.missing = LauncherPhase(phase), [1, 2, 3]
    async with answering(LAUNCHER, STATUS_PORT, json.dumps(status.document()).encode()):
        result = await polled()
    assert result.gathering == (GatheringStatus(attempt=1, missing=(1,)) if waits else None)
    assert observe([], result, attempt=1, refusal=None).missing == ((1,) if waits else ())
    assert observe([], result, attempt=2, refusal=None).missing == ()
    assert (await polled(result)).gathering is None


async def test_a_hub_whose_agent_has_died_reports_no_contact() -> None:
    clock = FakeClock(1000.0)
    async with httpx.AsyncClient(trust_env=False, verify=SHARED_TLS) as client:
        poller = HubPoller(client, timeout_s=PATIENCE_S, keys=KeyRing([KEY]), clock=clock)
        first = await poll_hub(poller, PollResult(), summary(1000.0))
        clock.now += RECENT_S + 1
        stale = await poll_hub(poller, first, summary(1000.0, agents=1))
        assert stale.received_at == 1000.0 and stale == first
        assert (await poll_hub(poller, PollResult(), summary(1000.0))).received_at == 0.0
        assert (await poll_hub(poller, PollResult(), summary(clock.now + 3600))).received_at == 0.0
        assert (await poll_hub(poller, PollResult(), summary(None))).received_at == 0.0
        newer = await poll_hub(poller, stale, summary(1000.5))  # by a clock that is behind
        assert newer.received_at == clock.now
        clock.now += 1
        assert (await poll_hub(poller, newer, summary(1000.0))).received_at == newer.received_at


async def test_a_hub_with_all_agents_knows_that_a_gang_hangs() -> None:
    clock = FakeClock(1000.0)
    clock.now += 3600
    async with httpx.AsyncClient(trust_env=False, verify=SHARED_TLS) as client:
        poller = HubPoller(client, timeout_s=PATIENCE_S, keys=KeyRing([KEY]), clock=clock)
        assert (await poll_hub(poller, PollResult(), summary(1000.0, agents=1))).received_at == 0.0
        assert (await poll_hub(poller, PollResult(), summary(1000.0, agents=2))).received_at == clock.now
        assert (await poll_hub(poller, PollResult(), summary(1000.0, attempt=0, agents=2))).received_at == 0.0
