"""Checks of a launcher before its ranks start: rules on made-up machines, reach over real sockets."""

import asyncio
import pathlib
import resource
from collections.abc import Iterator
from typing import Any

import pytest
from ports import reserved_ports
from refusals import first_refusal

from megatronapp_common.names import ExitCode, RankOrder
from megatronapp_trainer.launch.config.interface import WorkerAddress
from megatronapp_trainer.launch.config.requirements import PreflightRequirements
from megatronapp_trainer.launch.preflight import machine, reachability, run
from megatronapp_trainer.launch.ranks.outcome import STOPPED, LauncherOutcome
from megatronapp_trainer.launch.rendezvous.briefing import Briefing
from megatronapp_trainer.launch.rendezvous.gang_connection import SingleWorkerGang
from megatronapp_trainer.launch.rendezvous.messages import EndNotice, JoinRequest, Notices, StopNotice

PLACE = WorkerAddress(address="127.0.0.2", listen_address="127.0.0.2")
DEADLINE_S = 120.0


def text(faults: Iterator[str]) -> str:
    return "; ".join(faults)


def test_gpus_that_are_missing_are_counted() -> None:
    assert "7 of 8 GPUs answer" in text(machine.gpu_faults(8, 7))
    assert text(machine.gpu_faults(8, 8)) == text(machine.gpu_faults(0, 2)) == ""


def test_shared_memory_size_is_checked(tmp_path: pathlib.Path) -> None:
    assert text(machine.shm_faults(1, tmp_path)) == ""
    assert "MiB, but 1152921504606 MiB are needed; raise spec.shm.sizeLimit" in text(
        machine.shm_faults(1152921504606 * machine.MIB, tmp_path)
    )
    assert "cannot be inspected: No such file" in text(machine.shm_faults(1, tmp_path / "none"))


@pytest.mark.parametrize(
    ("limit", "capabilities", "fine"),
    [
        (resource.RLIM_INFINITY, "0000000000000000", True),
        (65536, "0000000000004000", True),
        (65536, "000001ffffffffff", True),
        (65536, "00000000a80425fb", False),
        (1 << 60, "0000000000000000", True),
    ],
)
def test_memory_can_be_locked_by_limit_or_by_capability(limit: int, capabilities: str, fine: bool) -> None:
    status = f"Name:\tpython\nCapPrm:\t0000000000004000\nCapEff:\t{capabilities}\n"
    found = text(machine.memlock_faults(limit, status))
    assert (found == "") is fine
    assert fine or "memlock is limited to 64 KiB, and IPC_LOCK is not effective" in found


def adapters(folder: pathlib.Path, states: dict[str, str]) -> pathlib.Path:
    for name, state in states.items():
        adapter, _, port = name.partition(":")
        path = folder / adapter / "ports" / port / "state"
        path.parent.mkdir(parents=True)
        path.write_text(f"{state}\n")
    return folder


UP, DOWN = "4: ACTIVE", "1: DOWN"


@pytest.mark.parametrize(
    ("states", "hca", "message"),
    [
        ({"mlx5_0:1": UP, "mlx5_1:1": DOWN}, "", ""),
        ({"mlx5_0:1": DOWN, "mlx5_1:1": DOWN}, "", "not active: mlx5_0:1 is 1: DOWN, mlx5_1:1 is 1: DOWN"),
        ({"mlx5_0:1": UP, "mlx5_1:1": DOWN}, "mlx5", "not active: mlx5_1:1 is 1: DOWN"),
        ({"mlx5_0:1": UP, "mlx5_1:1": DOWN}, "mlx5_0", ""),
        ({"mlx5_1:1": UP, "mlx5_10:1": DOWN}, "=mlx5_1", ""),
        ({"mlx5_1:1": UP, "mlx5_10:1": DOWN}, "mlx5_1", "not active: mlx5_10:1"),
        ({"mlx5_0:1": UP, "mlx5_0:2": DOWN}, "mlx5_0:1", ""),
        ({"mlx5_0:1": UP, "mlx5_1:1": DOWN}, "^mlx5_1", ""),
        ({"mlx5_0:1": UP, "mlx5_1:1": DOWN}, "^=mlx5_0", "not active: mlx5_1:1"),
        ({"mlx5_0:1": UP}, "irdma", "no port of InfiniBand or RoCE matches irdma; ports here: mlx5_0:1"),
        ({}, "", "no port of InfiniBand or RoCE was found; ports here: none"),
    ],
)
def test_links_are_up_where_they_are_needed(
    tmp_path: pathlib.Path, states: dict[str, str], hca: str, message: str
) -> None:
    found = text(machine.link_faults(hca, adapters(tmp_path, states)))
    assert message in found
    assert bool(found) is bool(message)


def test_an_interface_that_is_not_up_is_named(tmp_path: pathlib.Path) -> None:
    assert (
        text(machine.find_faults(PreflightRequirements(), shm=tmp_path, interface="none9"))
        == "the interface none9 is down"
    )
    assert text(machine.find_faults(PreflightRequirements(gpus=0, shm_bytes=1), shm=tmp_path, interface=None)) == ""


def briefing(ports: dict[int, int]) -> Briefing:
    joins = [
        JoinRequest(
            uid="u",
            attempt=2,
            index=index,
            address=f"127.0.0.{2 + index}",
            node=f"node-{index}",
            num_ranks=1,
            port=1,
            probe_port=port,
        )
        for index, port in ports.items()
    ]
    return Briefing.of(joins, RankOrder.INDEX, report=False)


async def run_preflight(found: Briefing, tmp_path: pathlib.Path, **changes: Any) -> LauncherOutcome | None:
    requirements = PreflightRequirements(**{"timeout_s": 0.1, **changes})
    return await run.run_preflight(requirements, found, uid="u", index=0, place=PLACE, shm=tmp_path)


async def failed_preflight(found: Briefing, tmp_path: pathlib.Path, last: str) -> LauncherOutcome:
    """Return a failure whose last reason is this, which takes longer where no answer arrives within a tenth."""
    outcome = None
    for timeout_s in (0.1, 4.0, DEADLINE_S):
        outcome = await run_preflight(found, tmp_path, timeout_s=timeout_s)
        if outcome is not None and last in outcome.message:
            break
    assert outcome is not None
    return outcome


@pytest.mark.asyncio
async def test_who_answers_as_the_right_worker_is_reached(tmp_path: pathlib.Path) -> None:
    async with (
        reachability.answer_probes("127.0.0.3", reachability.answer("u", 2, 1)) as right,
        reachability.answer_probes("127.0.0.4", reachability.answer("u", 1, 2)) as older,
    ):
        assert await run_preflight(briefing({0: 5, 1: right, 2: 0}), tmp_path, timeout_s=DEADLINE_S) is None
        stale = await failed_preflight(briefing({0: 5, 1: right, 2: older}), tmp_path, "another program")
    assert (stale.code, stale.reason) == (ExitCode.RENDEZVOUS, "PreflightFailed")
    assert stale.message == (
        "worker 0 on node node-0 does not reach worker 2 on node node-2 "
        f"at 127.0.0.4:{older}: another program answers there: 'worker 2 of attempt 1 of u'"
    )


@pytest.mark.asyncio
async def test_who_does_not_answer_is_named_with_its_node(tmp_path: pathlib.Path) -> None:
    with reserved_ports(1, "127.0.0.3") as (port,):
        found = await failed_preflight(briefing({0: 5, 1: port}), tmp_path, "Connection refused")
    assert found.message.startswith(
        f"worker 0 on node node-0 does not reach worker 1 on node node-1 at 127.0.0.3:{port}"
    )
    assert found.message.endswith(": Connection refused")


@pytest.mark.asyncio
async def test_a_worker_that_begins_to_answer_late_is_reached(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def send_greeting(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(reachability.answer("u", 2, 1))
        writer.close()

    refused = first_refusal(monkeypatch)
    with reserved_ports(1, "127.0.0.3") as (port,):
        preflight = asyncio.create_task(run_preflight(briefing({0: 5, 1: port}), tmp_path, timeout_s=DEADLINE_S))
        await refused.wait()
        async with await asyncio.start_server(send_greeting, "127.0.0.3", port):
            assert await preflight is None


@pytest.mark.asyncio
async def test_a_fault_of_the_host_precedes_network_faults(tmp_path: pathlib.Path) -> None:
    found = await run_preflight(briefing({0: 5, 1: 9}), tmp_path, shm_bytes=1 << 62)
    assert found is not None
    assert (found.code, found.reason) == (ExitCode.OWN_FAILURE, "PreflightFailed")
    assert found.message.startswith("worker 0 on node node-0: ")


FAILED = EndNotice(worker=1, code=ExitCode.OWN_FAILURE, message="worker 1 on node node-1: 7 of 8 GPUs answer")


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("notices", "outcome"),
    [
        ([FAILED], LauncherOutcome(code=ExitCode.PEER_LOST, reason="PeerLost", message=FAILED.message)),
        (
            [EndNotice(worker=1, code=75), FAILED],
            LauncherOutcome(code=ExitCode.PEER_LOST, reason="PeerLost", message=FAILED.message),
        ),
        ([StopNotice(worker=1)], STOPPED),
    ],
)
async def test_a_notice_of_another_worker_ends_the_preflight(notices: list[Notices], outcome: LauncherOutcome) -> None:
    gang = SingleWorkerGang(briefing({0: 0}))
    never = asyncio.create_task(asyncio.Event().wait())
    for notice in notices:
        gang.notices.put_nowait(notice)
    async with asyncio.timeout(DEADLINE_S):
        assert await run.until_notice(gang, never) == outcome  # type: ignore[arg-type]
    await asyncio.gather(never, return_exceptions=True)
    assert never.cancelled()


@pytest.mark.asyncio
async def test_notices_received_during_preflight_are_stored() -> None:
    gang = SingleWorkerGang(briefing({0: 0}))
    done = EndNotice(worker=1, code=0)
    gang.notices.put_nowait(done)

    async def fine() -> LauncherOutcome | None:
        while not gang.notices.empty():
            await asyncio.sleep(0)
        return None

    assert await run.until_notice(gang, asyncio.create_task(fine())) is None
    assert gang.notices.get_nowait() == done
