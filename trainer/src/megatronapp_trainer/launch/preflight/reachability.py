"""Check that every worker reaches every other at its address: each listens at a port and answers with its identity."""

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator

from megatronapp_trainer.launch.rendezvous.briefing import Briefing
from megatronapp_trainer.launch.rendezvous.rank_table import WorkerEntry

AT_ONCE = 64
CONNECT_S = 5.0
PAUSE_S = 0.5
LONGEST_ANSWER = 256


def answer(uid: str, attempt: int, index: int) -> bytes:
    """Return the line that a worker answers to every connection; it is not secret."""
    return f"worker {index} of attempt {attempt} of {uid}\n".encode()


@contextlib.asynccontextmanager
async def answer_probes(address: str, line: bytes) -> AsyncIterator[int]:
    """Answer every connection with `line` inside the context; yields the port."""

    async def send_line(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            writer.write(line)
            await writer.drain()
            writer.close()
            await writer.wait_closed()

    server = await asyncio.start_server(send_line, address, 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


async def find_unreached(briefing: Briefing, *, uid: str, own: int, timeout_s: float) -> list[str]:
    """Return the workers that cannot be reached within `timeout_s` seconds, one phrase each, with their nodes."""
    deadline = time.monotonic() + timeout_s
    slots = asyncio.Semaphore(AT_ONCE)

    async def try_worker(worker: WorkerEntry) -> str | None:
        port = briefing.probe_ports.get(worker.index, 0)
        expected = answer(uid, briefing.table.attempt, worker.index)
        reason = await _try_until(worker.address, port, expected, slots=slots, deadline=deadline)
        where = f"worker {worker.index} on node {worker.node} at {worker.address}:{port}"
        return None if reason is None else f"{where}: {reason}"

    others = [
        worker for worker in briefing.table.workers if worker.index != own and briefing.probe_ports.get(worker.index)
    ]
    found = await asyncio.gather(*map(try_worker, others))
    return [reason for reason in found if reason is not None]


async def _try_until(
    address: str, port: int, expected: bytes, *, slots: asyncio.Semaphore, deadline: float
) -> str | None:
    """Return why the worker cannot be reached, or None if it was."""
    while True:
        async with slots:
            reason = await _try_once(address, port, expected)
        if reason is None or time.monotonic() + PAUSE_S >= deadline:
            return reason
        await asyncio.sleep(PAUSE_S)


async def _try_once(address: str, port: int, expected: bytes) -> str | None:
    try:
        async with asyncio.timeout(CONNECT_S):
            reader, writer = await asyncio.open_connection(address, port, limit=LONGEST_ANSWER)
            try:
                answered = await reader.readline()
            finally:
                writer.close()
    except TimeoutError:
        return f"no answer within {CONNECT_S:g} s"
    except OSError as error:
        return str(error) if error.errno is None else os.strerror(error.errno)  # asyncio rewords strerror
    except ValueError:
        return f"another program answers there, with more than {LONGEST_ANSWER} bytes"
    if answered != expected:
        return f"another program answers there: {answered[:100].decode(errors='replace').strip()!r}"
    return None
