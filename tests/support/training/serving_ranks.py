"""A server's rank 0 within a test's process: its application over a real engine, asked without a socket."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import httpx

from megatronapp_trainer.inference.engine import Engine
from megatronapp_trainer.inference.gc_freeze import freeze_gc
from megatronapp_trainer.inference.worker_group import WorkerGroup
from megatronapp_trainer.serve.app import create_app
from megatronapp_trainer.serve.rank_main import describe, with_sources
from megatronapp_trainer.serve.request_broker import RequestBroker
from megatronapp_trainer.serve.settings import ServeCommand
from megatronapp_trainer.serve.statistics import ServerStatistics

MOST_OPEN = 8


@contextlib.asynccontextmanager
async def served(gang: WorkerGroup, command: ServeCommand, config: Any) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the API in front of this gang; at the end the other ranks return."""
    model = with_sources(describe(command, config), gang)
    gang.runner.perturbation.encode = model.ids_of
    engine = Engine(
        gang,
        decode=model.decode,
        decode_plain=model.decode_plain,
        end_tokens=model.end_tokens,
        most_waiting=MOST_OPEN,
    )
    freeze_gc()
    broker = RequestBroker(most_open=MOST_OPEN, statistics=ServerStatistics())
    app = create_app(broker, secret=None)
    broker.open(engine)
    app.state.model = model
    over = False

    def generate() -> None:
        while not over:
            broker.step(0.01)

    work = asyncio.create_task(asyncio.to_thread(generate))
    try:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=180) as client:
            yield client
    finally:
        over = True
        await work
        engine.close()
