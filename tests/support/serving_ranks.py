"""A server's rank 0 within a test's process: its application over a real engine, asked without a socket."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import httpx

from megatronapp_trainer.generate.engine import Engine
from megatronapp_trainer.generate.gang import Gang
from megatronapp_trainer.generate.settle import settle
from megatronapp_trainer.serve.desk import Desk
from megatronapp_trainer.serve.program import describe
from megatronapp_trainer.serve.settings import Command
from megatronapp_trainer.serve.tally import Tally
from megatronapp_trainer.serve.web import create_app

MOST_OPEN = 8


@contextlib.asynccontextmanager
async def served(gang: Gang, command: Command, config: Any) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the API in front of this gang; at the end the other ranks return."""
    model = describe(command, config)
    engine = Engine(
        gang,
        decode=model.decode,
        decode_plain=model.decode_plain,
        end_tokens=model.end_tokens,
        most_waiting=MOST_OPEN,
    )
    settle()
    desk = Desk(most_open=MOST_OPEN, tally=Tally())
    app = create_app(desk, secret=None)
    desk.open(engine)
    app.state.model = model
    over = False

    def generate() -> None:
        while not over:
            desk.step(0.01)

    work = asyncio.create_task(asyncio.to_thread(generate))
    try:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=60) as client:
            yield client
    finally:
        over = True
        await work
        engine.close()
