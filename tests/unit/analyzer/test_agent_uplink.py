"""The agent's connection to the hub, without a hub."""

import asyncio
import os
import pathlib
import subprocess
import sys

import pytest
from websockets.datastructures import Headers
from websockets.exceptions import InvalidMessage, InvalidStatus
from websockets.http11 import Response

from megatronapp_analyzer.agent.buffer import SendBuffer
from megatronapp_analyzer.agent.rings import RingLibrary
from megatronapp_analyzer.agent.service import Agent
from megatronapp_analyzer.agent.settings import AgentSettings
from megatronapp_analyzer.agent.uplink import REFUSED_FAILURES, Uplink
from megatronapp_analyzer.errors import ProtocolError
from megatronapp_common.names import Env
from megatronapp_common.web.tokens import new_secret

SETTLED_S = 120.0


@pytest.fixture
def settings(tmp_path: pathlib.Path) -> AgentSettings:
    return AgentSettings(
        job="demo",
        uid="u",
        attempt=0,
        worker=0,
        node="node-0",
        address="127.0.0.2",
        shm_dir=tmp_path,
        shm_prefix="p",
        hub_url="http://127.0.0.1:9",
        token="t",
    )


class FakeHubConnection:
    """A connection that keeps what is sent."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []

    async def send(self, data: bytes) -> None:
        self.sent.append(data)


@pytest.mark.asyncio
async def test_only_one_frame_per_ring_is_buffered_while_the_hub_is_unreachable(settings: AgentSettings) -> None:
    uplink = Uplink(
        settings,
        SendBuffer(limit_bytes=1000, resend_bytes=1000),
        ring_frames=list,
        status=dict,
        on_command=lambda page: None,
    )
    for number in range(1000):
        uplink.send_first("ring 0", f"0: {number}".encode())
        uplink.send_first("ring 1", f"1: {number}".encode())
    wire = FakeHubConnection()
    sender = asyncio.create_task(uplink._send_all(wire))  # type: ignore[arg-type]
    async with asyncio.timeout(SETTLED_S):
        await uplink.flushed()
    sender.cancel()
    await asyncio.gather(sender, return_exceptions=True)
    assert wire.sent == [b"0: 999", b"1: 999"]


def answer(status: int) -> InvalidStatus:
    """Return the error of a handshake that was answered so."""
    return InvalidStatus(Response(status, "", Headers()))


@pytest.mark.parametrize(
    ("met", "expected"),
    [
        ([InvalidMessage("did not receive a valid HTTP response"), OSError("refused")], [1, 2]),
        ([answer(500), answer(503), OSError("refused")], [1, 2, 3]),
        ([answer(403), OSError("refused"), answer(401)], [REFUSED_FAILURES, 1, REFUSED_FAILURES]),
        ([ProtocolError("no-job", "another job's"), OSError("refused")], [REFUSED_FAILURES, 1]),
    ],
    ids=["ends while it greets", "fails", "refuses the token", "refuses the agent"],
)
@pytest.mark.asyncio
async def test_an_unreachable_hub_is_retried_soon(
    settings: AgentSettings, monkeypatch: pytest.MonkeyPatch, met: list[Exception], expected: list[int]
) -> None:
    uplink = Uplink(
        settings,
        SendBuffer(limit_bytes=1000, resend_bytes=1000),
        ring_frames=list,
        status=dict,
        on_command=lambda page: None,
    )
    waits: list[int] = []

    async def connect() -> None:
        raise next(errors)

    def wait_s(failures: int, settings: AgentSettings, jitter: float) -> float:
        waits.append(failures)
        return 0.0

    errors = iter([*met, asyncio.CancelledError()])
    monkeypatch.setattr(uplink, "_connect_once", connect)
    monkeypatch.setattr("megatronapp_analyzer.agent.uplink.backoff_s", wait_s)
    with pytest.raises(asyncio.CancelledError):
        await uplink.run()
    assert waits == expected


@pytest.mark.asyncio
async def test_an_agent_whose_uplink_fails_ends_with_its_error(
    settings: AgentSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(self: Uplink) -> None:
        raise RuntimeError("unexpected")

    def no_ring(path: str) -> None:
        raise ValueError(path)

    monkeypatch.setattr(Uplink, "run", fail)
    library = RingLibrary(open=no_ring, error=ValueError)  # type: ignore[arg-type]
    agent = Agent(settings, library, monotonic_ns=lambda: 0)
    async with asyncio.timeout(SETTLED_S):
        with pytest.raises(RuntimeError, match="unexpected"):
            await agent.run()


@pytest.mark.parametrize(("before", "after"), [(0, 15), (9, 9)], ids=["none set", "SIGKILL of the backend"])
def test_a_parent_death_signal_that_is_set_stays(before: int, after: int) -> None:
    script = (
        "import ctypes, os\n"
        "from megatronapp_analyzer.process import die_with_parent\n"
        "libc, found = ctypes.CDLL(None), ctypes.c_int()\n"
        f"libc.prctl(1, {before}, 0, 0, 0)\n"
        "die_with_parent(os.getppid())\n"
        "libc.prctl(2, ctypes.byref(found), 0, 0, 0)\n"
        "print(found.value)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert int(done.stdout) == after


SIGNALLED_AT_ITS_START = """
import os, runpy, signal, sys

class SignalAtAnImport:
    def find_spec(self, name, *_):
        if name == "megatronapp_analyzer.agent.settings":
            os.kill(os.getpid(), signal.SIGTERM)

sys.meta_path.insert(0, SignalAtAnImport())
runpy.run_module("megatronapp_analyzer.agent", run_name="__main__", alter_sys=True)
"""


def test_a_signal_that_arrives_while_an_agent_starts_ends_it_in_order(tmp_path: pathlib.Path) -> None:
    """The first process of a container would not get it, and wait for rings until it is killed."""
    (tmp_path / "secret").write_text(new_secret())
    environment: dict[str, str] = {
        Env.SECRET_FILE: str(tmp_path / "secret"),
        Env.JOB: "demo",
        Env.JOB_UID: "u",
        Env.ATTEMPT: "0",
        Env.WORKER_INDEX: "0",
        Env.SHM_DIR: str(tmp_path),
        Env.SHM_PREFIX: "p",
    }
    command = [sys.executable, "-c", SIGNALLED_AT_ITS_START]
    done = subprocess.run(command, env=os.environ | environment, timeout=SETTLED_S, check=False)
    assert done.returncode == 0
