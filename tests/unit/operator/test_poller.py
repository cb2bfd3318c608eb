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
HUB, LAUNCHER = "127.8.0.1", "127.8.0.2"
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
    heard: list[str] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        heard.append(head.splitlines()[0])
        line = status if f"Authorization: Bearer {TOKEN}" in head else "401 Unauthorized"
        writer.write(f"HTTP/1.1 {line}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body)
        with contextlib.suppress(ConnectionError):
            await writer.drain()
        writer.close()

    async with await asyncio.start_server(serve, host, port):
        yield heard


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
    async with httpx.AsyncClient(trust_env=False) as client:
        return await HubPoller(client, keys=KeyRing([KEY])).poll(
            "uid", pods, before or PollResult(), attempt=1, workers=2, key_id=""
        )


async def test_the_hub_tells_how_it_goes_and_so_does_the_launcher_with_the_table() -> None:
    async with (
        answering(HUB, HUB_PORT, json.dumps(SUMMARY).encode()) as asked,
        answering(LAUNCHER, STATUS_PORT, json.dumps(LAUNCHER_ANSWER).encode()) as launcher,
    ):
        told = await polled()
        assert told.summary is not None and told.summary.progress is not None
        assert (told.summary.progress.iteration, told.rank_table) == (7, TABLE)
        again = await polled(told)
    assert again.rank_table == TABLE and again.progress is not None and again.progress.iteration == 9
    assert asked == ["GET /api/v1/summary HTTP/1.1"] * 2 and launcher == ["GET /api/v1/launcher HTTP/1.1"] * 2


async def test_a_token_that_is_refused_is_remembered_until_another_answer_comes() -> None:
    other = KeyRing(["ef" * 32])
    async with httpx.AsyncClient(trust_env=False) as client:
        async with answering(HUB, HUB_PORT, b"{}"), answering(LAUNCHER, STATUS_PORT, b"{}"):
            told = await HubPoller(client, keys=other).poll("uid", PODS, PollResult(), attempt=1, workers=2, key_id="")
        assert told.refused == ("hub", "launcher") and (told.summary, told.received_at) == (None, 0.0)
        silence = await HubPoller(client, keys=other).poll("uid", PODS, told, attempt=1, workers=2, key_id="")
        assert silence.refused == ("hub", "launcher")
        observed = observe(PODS, silence, attempt=1, refusal=None)
        assert (observed.token_refused, observed.last_contact) == (("hub", "launcher"), 0.0)
        async with answering(HUB, HUB_PORT, json.dumps(SUMMARY).encode()), answering(LAUNCHER, STATUS_PORT, b"{}"):
            both = HubPoller(client, keys=KeyRing([*other.values, KEY]))
            told = await both.poll("uid", PODS, silence, attempt=1, workers=2, key_id=key_id(KEY))
    assert told.refused == () and told.summary is not None


async def test_without_the_jobs_key_neither_is_asked_and_none_sees_a_token_of_another_key() -> None:
    ring = KeyRing([KEY])
    async with (
        httpx.AsyncClient(trust_env=False) as client,
        answering(HUB, HUB_PORT, json.dumps(SUMMARY).encode()) as hub,
        answering(LAUNCHER, STATUS_PORT, json.dumps(LAUNCHER_ANSWER).encode()) as launcher,
    ):
        known = await polled()
        lost = await HubPoller(client, keys=ring).poll("uid", PODS, known, attempt=1, workers=2, key_id="01234567")
        assert (len(hub), len(launcher)) == (1, 1)
        observed = observe(PODS, lost, attempt=1, refusal=None)
        assert (observed.unknown_key, observed.token_refused, lost.rank_table) == ("01234567", (), TABLE)
        again = await HubPoller(client, keys=ring).poll("uid", PODS, lost, attempt=1, workers=2, key_id=key_id(KEY))
    assert again.unknown_key is None and again.summary is not None


async def test_without_a_hub_the_launcher_is_asked_every_time() -> None:
    async with answering(LAUNCHER, STATUS_PORT, json.dumps(LAUNCHER_ANSWER).encode()):
        told = await polled(PollResult(rank_table=TABLE), PODS[1:])
    assert told.summary is None and told.progress is not None and told.progress.iteration == 9


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
async def test_an_answer_of_no_use_says_nothing_and_takes_nothing_away(body: bytes, status: str) -> None:
    before = PollResult(rank_table={"attempt": 0})
    async with answering(HUB, HUB_PORT, body, status=status), answering(LAUNCHER, STATUS_PORT, body, status=status):
        told = await polled(before)
    assert told == before


async def test_an_address_of_ipv6_and_one_that_is_none_are_asked_in_vain() -> None:
    assert await polled(pods=[pod(ReplicaType.HUB, "::1"), pod(ReplicaType.WORKER, "no address")]) == PollResult()


async def test_nobody_is_asked_who_does_not_run_or_is_of_another_attempt() -> None:
    waiting = [pod(ReplicaType.HUB, HUB, ready=False), pod(ReplicaType.WORKER, LAUNCHER, attempt=0)]
    async with (
        answering(HUB, HUB_PORT, b"{}") as hub,
        answering(LAUNCHER, STATUS_PORT, b"{}") as launcher,
    ):
        assert await polled(pods=waiting) == PollResult()
    assert hub == [] and launcher == []


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


async def test_a_hub_that_does_not_answer_in_time_is_asked_less_and_less_often() -> None:
    clock, told, misses = Clock(), PollResult(), []
    async with silent(HUB, HUB_PORT), httpx.AsyncClient(trust_env=False) as client:
        poller = HubPoller(client, keys=KeyRing([KEY]), clock=clock, timeout_s=0.02)
        for _ in range(40):
            told = await poller.poll("uid", PODS[:1], told, attempt=1, workers=2, key_id="")
            misses.append(told.hub.misses)
            clock.now += POLL_S
        asked = [turn for turn, (now, before) in enumerate(zip(misses, [0, *misses], strict=False)) if now > before]
        assert [POLL_S * (after - before) for before, after in itertools.pairwise(asked)] == [10, 20, 40, 60, 60]
        fresh = dataclasses.replace(PODS[0], uid="another")
        assert (await poller.poll("uid", [fresh], told, attempt=1, workers=2, key_id="")).hub.misses == 1


async def test_while_a_slow_hub_is_left_alone_its_launcher_is_asked_as_ever() -> None:
    resting = PollResult(hub=PollHealth(uid=PODS[0].uid, misses=3, due=float("inf")))
    async with (
        answering(HUB, HUB_PORT, json.dumps(SUMMARY).encode()) as hub,
        answering(LAUNCHER, STATUS_PORT, json.dumps(LAUNCHER_ANSWER).encode()),
    ):
        told = await polled(resting)
    assert (hub, told.summary, told.hub) == ([], None, resting.hub)
    assert told.progress is not None and told.progress.iteration == 9


async def test_hub_and_launcher_are_asked_beside_each_other() -> None:
    asked = asyncio.Barrier(2)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        await asked.wait()  # for the other one
        body = json.dumps(SUMMARY if b"summary" in head else LAUNCHER_ANSWER).encode()
        writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        await writer.drain()
        writer.close()

    async with (
        await asyncio.start_server(serve, HUB, HUB_PORT),
        await asyncio.start_server(serve, LAUNCHER, STATUS_PORT),
    ):
        told = await polled()
    assert told.summary is not None and told.progress is not None


def summary(updated_at: float | None, *, attempt: int = 1, agents: int | None = None) -> bytes:
    """A hub's answer; seconds are those of `Clock`."""
    said = None if updated_at is None else datetime.datetime.fromtimestamp(updated_at, datetime.UTC).isoformat()
    page = {"attempt": attempt, "iteration": 7, "updatedAt": said}
    tracer = {} if agents is None else {"tracer": {"agents": agents}}
    return json.dumps(SUMMARY | {"progress": page} | tracer).encode()


async def heard(poller: HubPoller, before: PollResult, body: bytes, port: int = HUB_PORT) -> PollResult:
    """Return what is known after this answer of the hub, or of the launcher."""
    async with answering(HUB if port == HUB_PORT else LAUNCHER, port, body):
        return await poller.poll("uid", PODS, before, attempt=1, workers=2, key_id="")


async def test_when_somebody_who_knows_of_progress_answered_is_no_news_by_itself() -> None:
    clock = Clock()
    async with httpx.AsyncClient(trust_env=False) as client:
        poller = HubPoller(client, keys=KeyRing([KEY]), clock=clock)
        assert (await heard(poller, PollResult(), summary(1000.0, attempt=0))).received_at == 0.0
        first = await heard(poller, PollResult(), summary(1000.0))
        clock.now += 5
        again = await heard(poller, first, summary(1000.0))
        assert (first.received_at, again.received_at, first == again) == (1000.0, 1005.0, True)
        clock.now += 5
        assert (await poller.poll("uid", PODS, again, attempt=1, workers=2, key_id="")).received_at == 1005.0
        nothing = b'{"rankTable": null, "progress": null}'
        assert (await heard(poller, again, nothing, STATUS_PORT)).received_at == 1010.0


@pytest.mark.parametrize(
    ("phase", "attempt", "waits"), [("Gathering", 1, True), ("Preflight", 1, False), ("Gathering", 0, False)]
)
async def test_a_launcher_says_whom_of_its_gang_it_waits_for(phase: str, attempt: int, waits: bool) -> None:
    board = GangStatus(attempt)
    board.phase, board.missing = LauncherPhase(phase), [1, 2, 3]
    async with answering(LAUNCHER, STATUS_PORT, json.dumps(board.document()).encode()):
        told = await polled()
    assert told.gathering == (GatheringStatus(attempt=1, missing=(1,)) if waits else None)
    assert observe([], told, attempt=1, refusal=None).missing == ((1,) if waits else ())
    assert observe([], told, attempt=2, refusal=None).missing == ()
    assert (await polled(told)).gathering is None


async def test_a_hub_whose_agent_has_died_says_nothing_by_its_last_page() -> None:
    clock = Clock()
    async with httpx.AsyncClient(trust_env=False) as client:
        poller = HubPoller(client, keys=KeyRing([KEY]), clock=clock)
        first = await heard(poller, PollResult(), summary(1000.0))
        clock.now += RECENT_S + 1
        stale = await heard(poller, first, summary(1000.0, agents=1))
        assert stale.received_at == 1000.0 and stale == first
        assert (await heard(poller, PollResult(), summary(1000.0))).received_at == 0.0
        assert (await heard(poller, PollResult(), summary(clock.now + 3600))).received_at == 0.0
        assert (await heard(poller, PollResult(), summary(None))).received_at == 0.0
        newer = await heard(poller, stale, summary(1000.5))  # by a clock that is behind
        assert newer.received_at == clock.now
        clock.now += 1
        assert (await heard(poller, newer, summary(1000.0))).received_at == newer.received_at


async def test_a_hub_that_has_all_agents_knows_that_a_gang_stands_still() -> None:
    clock = Clock()
    clock.now += 3600
    async with httpx.AsyncClient(trust_env=False) as client:
        poller = HubPoller(client, keys=KeyRing([KEY]), clock=clock)
        assert (await heard(poller, PollResult(), summary(1000.0, agents=1))).received_at == 0.0
        assert (await heard(poller, PollResult(), summary(1000.0, agents=2))).received_at == clock.now
        assert (await heard(poller, PollResult(), summary(1000.0, attempt=0, agents=2))).received_at == 0.0
