"""Gathering over real sockets on the loopback network, several launchers in one event loop."""

import asyncio
import contextlib
import dataclasses
import json
import re
import socket
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from refusals import failure_with, first_refusal

from megatronapp_common.names import ExitCode, RankOrder
from megatronapp_trainer.errors import MessageError, RendezvousError, StoppedError
from megatronapp_trainer.launch.config import address
from megatronapp_trainer.launch.config.settings import Endpoint
from megatronapp_trainer.launch.rendezvous import member, messages
from megatronapp_trainer.launch.rendezvous.coordinator import Coordinator
from megatronapp_trainer.launch.rendezvous.gang_connection import connection_lost_notice
from megatronapp_trainer.launch.rendezvous.gang_status import GangStatus
from megatronapp_trainer.launch.rendezvous.member import GangMember, join_gang
from megatronapp_trainer.launch.rendezvous.messages import EndNotice, ExpectedGang, JoinRequest, Notices, StopNotice
from megatronapp_trainer.launch.rendezvous.secure_channel import SecureChannel

TOKEN = "ab" * 32
HOST = "127.0.0.2"
DEADLINE_S = 120.0
EXPECTED = ExpectedGang(uid="u", attempt=2, proc_per_node=(2, 1, 3))


def join(index: int, **changes: Any) -> JoinRequest:
    base = JoinRequest(
        uid="u",
        attempt=2,
        index=index,
        address=f"127.0.0.{2 + index}",
        node=f"node-{index}",
        num_ranks=EXPECTED.proc_per_node[index],
        port=29500 + index,
    )
    return dataclasses.replace(base, **changes)


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    with address.reserved_port(HOST) as port:
        yield Endpoint(host=HOST, port=port)


@contextlib.asynccontextmanager
async def coordinating(
    endpoint: Endpoint, timeout_s: float = DEADLINE_S, token: str = TOKEN, **changes: Any
) -> AsyncIterator[asyncio.Task[Coordinator]]:
    """Worker 0 while it gathers; the task ends with the gang complete."""
    attempt = changes.pop("attempt", EXPECTED.attempt)
    expected = dataclasses.replace(EXPECTED, attempt=attempt)
    coordinator = Coordinator(token=token, expected=expected, own=join(0, attempt=attempt), **changes)

    async def gather() -> Coordinator:
        await coordinator.gather(address.listening_socket(endpoint, endpoint.host), timeout_s)
        return coordinator

    task = asyncio.create_task(gather())
    await asyncio.sleep(0)
    try:
        yield task
    finally:
        await coordinator.close()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def enter(
    endpoint: Endpoint, own: JoinRequest, *, token: str = TOKEN, timeout_s: float = DEADLINE_S
) -> GangMember:
    return await join_gang(endpoint, token=token, own=own, timeout_s=timeout_s)


@contextlib.asynccontextmanager
async def gang(endpoint: Endpoint) -> AsyncIterator[tuple[Coordinator, GangMember, GangMember]]:
    async with coordinating(endpoint) as task:
        first, second = await asyncio.gather(enter(endpoint, join(1)), enter(endpoint, join(2)))
        try:
            yield await task, first, second
        finally:
            await first.close()
            await second.close()


async def next_notice(peer: Coordinator | GangMember) -> Notices:
    async with asyncio.timeout(DEADLINE_S):
        return await peer.notices.get()


@pytest.mark.asyncio
async def test_all_get_the_same_table_in_worker_order(endpoint: Endpoint) -> None:
    async with gang(endpoint) as (coordinator, first, second):
        assert coordinator.briefing.table == first.briefing.table == second.briefing.table
        assert [worker.ranks for worker in first.briefing.table.workers] == [(0, 1), (2,), (3, 4, 5)]
        assert [worker.node for worker in first.briefing.table.workers] == ["node-0", "node-1", "node-2"]
        assert (first.briefing.table.master_address, first.briefing.table.master_port) == ("127.0.0.2", 29500)


@pytest.mark.asyncio
async def test_members_may_connect_before_the_coordinator_listens(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = first_refusal(monkeypatch)
    early = [asyncio.create_task(enter(endpoint, join(index))) for index in (1, 2)]
    await refused.wait()
    async with coordinating(endpoint) as task:
        coordinator = await task
        for task_of_member in early:
            found = await task_of_member
            assert found.briefing.table == coordinator.briefing.table
            await found.close()


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("own", "message"),
    [
        (join(1, attempt=1), "attempt 1 joins attempt 2, late"),
        (join(0), "worker 0 is already here"),
        (dataclasses.replace(join(1), index=7), "index 7 in a gang of 3"),
        (join(1, num_ranks=8), "worker 1 brings 8 ranks, not 1"),
        (join(1, address="::1"), "not one of IPv4"),
    ],
)
async def test_the_wrong_worker_is_refused_at_once_with_the_reason(
    endpoint: Endpoint, own: JoinRequest, message: str
) -> None:
    async with coordinating(endpoint) as task:
        with pytest.raises(RendezvousError, match=f"worker 0 refused this worker: .*{message}"):
            await enter(endpoint, own)
        assert not task.done()


@pytest.mark.full("each waits until the deadline", but=("attempt",))
@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("own", "token", "message"),
    [
        pytest.param(join(1), "cd" * 32, "wrong secret", id="secret"),
        pytest.param(join(1, uid="another"), TOKEN, "this is job u, not another", id="job"),
        pytest.param(join(1, attempt=3), TOKEN, "early: this gang is about to end", id="attempt"),
    ],
)
async def test_who_may_meet_a_stale_coordinator_tries_until_the_deadline(
    endpoint: Endpoint, own: JoinRequest, token: str, message: str
) -> None:
    async with coordinating(endpoint):
        failure = await failure_with(message, lambda limit_s: enter(endpoint, own, token=token, timeout_s=limit_s))
    assert re.search(rf"no rank table from .* within \S+ s; last: .*{message}", failure)


@pytest.mark.asyncio
async def test_a_refused_worker_does_not_hinder_the_others(endpoint: Endpoint) -> None:
    async with coordinating(endpoint) as task:
        with pytest.raises(RendezvousError):
            await enter(endpoint, join(1, attempt=0))
        first, second = await asyncio.gather(enter(endpoint, join(1)), enter(endpoint, join(2)))
        assert (await task).briefing.table == first.briefing.table
        await first.close()
        await second.close()


@pytest.mark.asyncio
async def test_strangers_are_refused(endpoint: Endpoint) -> None:
    async with coordinating(endpoint):
        reader, writer = await asyncio.open_connection(endpoint.host, endpoint.port)
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        async with asyncio.timeout(DEADLINE_S):
            greeting, answer = await reader.readline(), await reader.readline()
            assert await reader.read() == b""
        writer.close()
        await writer.wait_closed()
        assert TOKEN.encode() not in greeting + answer
        assert json.loads(answer)["refused"]


@pytest.mark.asyncio
async def test_duplicates_are_refused_and_a_worker_that_left_early_may_rejoin(
    endpoint: Endpoint, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    async with coordinating(endpoint) as task:
        leaver = await joined_by_hand(endpoint, join(1))
        await wait_for_log(caplog, "worker 1 joined")
        message = "worker 1 is already here"
        assert message in await failure_with(message, lambda limit_s: enter(endpoint, join(1), timeout_s=limit_s))
        await leaver.close()
        first, second = await asyncio.gather(enter(endpoint, join(1)), enter(endpoint, join(2)))
        assert (await task).briefing.table == first.briefing.table
        await first.close()
        await second.close()


async def wait_for_log(caplog: pytest.LogCaptureFixture, message: str) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while message not in caplog.text:
            await asyncio.sleep(0.01)


async def joined_by_hand(endpoint: Endpoint, own: JoinRequest) -> SecureChannel:
    """The connection of a worker that has sent its join and now says nothing."""
    wire = await SecureChannel.greet(
        *await asyncio.open_connection(endpoint.host, endpoint.port), token=TOKEN, side="worker"
    )
    wire.send(messages.join_to_json(own))
    return wire


@pytest.mark.asyncio
async def test_a_worker_whose_old_connection_is_not_seen_to_end_tries_again(
    endpoint: Endpoint, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    async with coordinating(endpoint) as task:
        old = await joined_by_hand(endpoint, join(1))
        await wait_for_log(caplog, "worker 1 joined")
        again = asyncio.create_task(enter(endpoint, join(1)))
        await wait_for_log(caplog, "worker 1 is already here")
        await old.close()
        first, second = await asyncio.gather(again, enter(endpoint, join(2)))
        assert (await task).briefing.table == first.briefing.table
        await first.close()
        await second.close()


@pytest.mark.asyncio
async def test_missing_workers_are_named_at_the_deadline(endpoint: Endpoint) -> None:
    async def gather_without_worker_1(limit_s: float) -> None:
        async with coordinating(endpoint, timeout_s=limit_s) as task:
            waiting = asyncio.create_task(enter(endpoint, join(2)))
            try:
                await task
            finally:
                waiting.cancel()
                await asyncio.gather(waiting, return_exceptions=True)

    failure = await failure_with("missing: 1$", gather_without_worker_1)
    assert re.search(r"after .* s these workers are missing: 1$", failure)


@pytest.mark.asyncio
async def test_the_name_is_resolved_again_at_every_try(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    targets: list[str] = []

    def resolve(host: str) -> str:
        targets.append(host)
        if host == "worker-0.demo" and targets.count(host) < 3:
            raise socket.gaierror(socket.EAI_NONAME, "not known yet")
        return HOST

    monkeypatch.setattr(member, "resolve_ipv4", resolve)
    named = Endpoint(host="worker-0.demo", port=endpoint.port)
    async with coordinating(endpoint) as task:
        first, second = await asyncio.gather(enter(named, join(1)), enter(endpoint, join(2)))
        await task
        await first.close()
        await second.close()
    assert targets.count("worker-0.demo") == 3


@pytest.mark.asyncio
async def test_a_stale_answer_of_the_name_server_is_not_trusted(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The name leads first to another job, then to an older attempt of this one, then to where it should."""
    caplog.set_level("INFO")
    other = dataclasses.replace(endpoint, host="127.0.0.8")
    older = dataclasses.replace(endpoint, host="127.0.0.9")
    answers = iter([other.host, older.host])
    monkeypatch.setattr(member, "resolve_ipv4", lambda host: next(answers, HOST) if host == "worker-0.demo" else host)
    named = dataclasses.replace(endpoint, host="worker-0.demo")
    async with (
        coordinating(other, token="cd" * 32) as another_job,
        coordinating(older, attempt=1) as older_attempt,
        coordinating(endpoint) as task,
    ):
        first, second = await asyncio.gather(enter(named, join(1)), enter(endpoint, join(2)))
        assert (await task).briefing.table == first.briefing.table
        assert not another_job.done()
        assert not older_attempt.done()
        await first.close()
        await second.close()
    assert "worker 0 refused this worker: wrong secret" in caplog.text
    assert "worker 0 refused this worker: attempt 2 joins attempt 1, early" in caplog.text


@pytest.mark.asyncio
@pytest.mark.parametrize("line", [{"refused": "go away", "final": True}, {"body": "{}", "mac": "00"}])
async def test_who_cannot_prove_the_secret_does_not_end_a_worker(endpoint: Endpoint, line: dict[str, Any]) -> None:
    async def lie(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(messages.greeting(messages.new_nonce()) + messages.encode(line))
        await reader.read(1)
        writer.close()

    async with await asyncio.start_server(lie, endpoint.host, endpoint.port):
        failure = await failure_with(
            "go away|wrong secret", lambda limit_s: enter(endpoint, join(1), timeout_s=limit_s)
        )
    assert re.search(r"within \S+ s; last: .*(go away|wrong secret)", failure)


@pytest.mark.asyncio
async def test_the_order_of_ranks_is_that_of_worker_0(endpoint: Endpoint) -> None:
    async with coordinating(endpoint, order=RankOrder.TOPOLOGY) as task:
        members = await asyncio.gather(
            enter(endpoint, join(1, topology="a,rack-2")), enter(endpoint, join(2, topology="a,rack-1"))
        )
        table = (await task).briefing.table
        for gang_member in members:
            assert gang_member.briefing.table == table
            await gang_member.close()
    assert [worker.index for worker in table.workers] == [0, 2, 1]  # worker 0 has no labels
    assert [worker.ranks for worker in table.workers] == [(0, 1), (2, 3, 4), (5,)]


@pytest.mark.asyncio
@pytest.mark.parametrize("stopped", [0, 1])
async def test_a_stop_while_gathering_reaches_who_is_here(
    endpoint: Endpoint, caplog: pytest.LogCaptureFixture, stopped: int
) -> None:
    caplog.set_level("INFO")
    async with coordinating(endpoint) as task:
        first = asyncio.create_task(enter(endpoint, join(1)))
        await wait_for_log(caplog, "worker 1 joined")
        stopping, other = (task, first) if stopped == 0 else (first, task)
        stopping.cancel()
        with pytest.raises(StoppedError, match=f"worker {stopped} was asked to stop before the gang was complete"):
            await other
        with pytest.raises(asyncio.CancelledError):
            await stopping


@pytest.mark.asyncio
async def test_a_stop_is_reported_to_all_others(endpoint: Endpoint) -> None:
    async with gang(endpoint) as (coordinator, first, second):
        first.broadcast(StopNotice(worker=1))
        assert await next_notice(coordinator) == await next_notice(second) == StopNotice(worker=1)
        coordinator.broadcast(StopNotice(worker=0))
        assert await next_notice(first) == await next_notice(second) == StopNotice(worker=0)


@pytest.mark.asyncio
async def test_progress_reaches_worker_0_only_if_it_is_requested(endpoint: Endpoint) -> None:
    status = GangStatus(2)
    async with coordinating(endpoint, status=status) as task:
        assert status.missing == [1, 2]
        first, second = await asyncio.gather(enter(endpoint, join(1)), enter(endpoint, join(2)))
        assert status.missing == []
        second.report({"iteration": 7})
        first.broadcast(EndNotice(worker=1, code=0))
        second.broadcast(EndNotice(worker=2, code=0))
        coordinator = await task
        assert {(await next_notice(coordinator)).worker, (await next_notice(coordinator)).worker} == {1, 2}
        assert status.progress == {"iteration": 7}
        await first.close()
        await second.close()
    async with gang(endpoint) as (coordinator, first, second):
        first.report({"iteration": 7})
        first.broadcast(StopNotice(worker=1))
        assert await next_notice(coordinator) == StopNotice(worker=1)
        assert coordinator.notices.empty()
        assert await next_notice(second) == StopNotice(worker=1)


def test_a_port_in_use_is_named(endpoint: Endpoint) -> None:
    with (
        address.listening_socket(endpoint, HOST),
        pytest.raises(RendezvousError, match=rf"cannot listen at {HOST}:{endpoint.port}: Address already in use"),
    ):
        address.listening_socket(endpoint, HOST)


@pytest.mark.asyncio
async def test_a_failure_is_reported_to_all_others(endpoint: Endpoint) -> None:
    failure = EndNotice(worker=1, code=ExitCode.DATA, rank=2, message="rank 2 on worker 1 ended with exit code 65")
    async with gang(endpoint) as (coordinator, first, second):
        first.broadcast(failure)
        assert await next_notice(coordinator) == failure
        assert await next_notice(second) == failure
        own = EndNotice(worker=0, code=ExitCode.PEER_LOST)
        coordinator.broadcast(own)
        assert await next_notice(first) == own
        assert await next_notice(second) == own


@pytest.mark.asyncio
async def test_a_disconnect_without_a_farewell_is_a_loss(endpoint: Endpoint) -> None:
    async with gang(endpoint) as (coordinator, first, second):
        await first.close()
        for peer in (coordinator, second):
            notice = await next_notice(peer)
            assert notice == connection_lost_notice(1)


@pytest.mark.asyncio
async def test_the_coordinators_parting_is_a_loss_too(endpoint: Endpoint) -> None:
    async with gang(endpoint) as (coordinator, first, _second):
        await coordinator.close()
        notice = await next_notice(first)
        assert notice == connection_lost_notice(0)
        assert coordinator.notices.empty()


@pytest.mark.asyncio
@pytest.mark.parametrize("stage", ["connected", "answered", "greeted"])
async def test_a_closing_coordinator_disconnects_a_worker_that_has_not_joined(endpoint: Endpoint, stage: str) -> None:
    """A worker that is early for the next attempt must not wait for a table from the coordinator of the last one."""
    async with coordinating(endpoint):
        reader, writer = await asyncio.open_connection(endpoint.host, endpoint.port)
        if stage == "answered":
            await reader.readline()
        if stage == "greeted":
            await SecureChannel.greet(reader, writer, token=TOKEN, side="worker")
    async with asyncio.timeout(DEADLINE_S):
        with contextlib.suppress(ConnectionError):  # reset, if the coordinator has not read the greeting
            await reader.read()
    writer.close()


@pytest.mark.asyncio
async def test_parting_in_order_is_none(endpoint: Endpoint) -> None:
    async with gang(endpoint) as (coordinator, first, second):
        done = EndNotice(worker=1, code=ExitCode.OK)
        first.broadcast(done)
        await first.close()
        assert await next_notice(coordinator) == await next_notice(second) == done
        last = EndNotice(worker=0, code=ExitCode.OK)
        coordinator.broadcast(last)
        await coordinator.close()
        assert await next_notice(second) == last
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await second.notices.get()


@pytest.mark.asyncio
async def test_the_secret_never_travels(endpoint: Endpoint) -> None:
    """Check all that a member sends to a fake worker 0 before it is satisfied."""
    seen = bytearray()
    got_join = asyncio.Event()

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(messages.greeting(messages.new_nonce()))
        seen.extend(await reader.readline())
        seen.extend(await reader.readline())
        got_join.set()
        writer.close()

    server = await asyncio.start_server(listen, endpoint.host, endpoint.port)
    async with server:
        trying = asyncio.create_task(enter(endpoint, join(1)))
        async with asyncio.timeout(DEADLINE_S):
            await got_join.wait()
        trying.cancel()
        await asyncio.gather(trying, return_exceptions=True)
    assert b'\\"index\\":1' in seen
    assert TOKEN.encode() not in seen


@pytest.mark.asyncio
@pytest.mark.parametrize("line", [b"[" * 200_000 + b"\n", b"x" * 2000, b"[" * 1000 + b"\n"])
async def test_a_greeting_that_is_none_is_refused_and_the_gang_still_gathers(endpoint: Endpoint, line: bytes) -> None:
    """Check that nested brackets, which raised RecursionError in an unobserved task, do not leave the connection
    open."""
    async with coordinating(endpoint) as task:
        reader, writer = await asyncio.open_connection(endpoint.host, endpoint.port)
        writer.write(line)
        async with asyncio.timeout(DEADLINE_S):
            with contextlib.suppress(ConnectionError):  # what was sent after the limit is not read any more
                wait_for_log = await reader.read()
                assert b'"refused"' in wait_for_log
        writer.close()
        members = await asyncio.gather(enter(endpoint, join(1)), enter(endpoint, join(2)))
        await task
        for gang_member in members:
            await gang_member.close()


def test_brackets_after_a_greeting_are_no_message() -> None:
    with pytest.raises(MessageError, match="not JSON"):
        messages.decode(b"[" * 200_000 + b"\n")
