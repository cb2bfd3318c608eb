"""Request broker and runs of a server over a real engine of one process, step by step."""

import asyncio
import dataclasses
import pathlib
import socket
import tempfile
from collections.abc import Callable
from typing import Any

import pytest
from generating_ranks import VARIANTS, config_of, groups_of, model_of, open_engine, prompts

from megatronapp_common.frames import decode, frame_length
from megatronapp_common.scope.perturbation.recipe import Recipe
from megatronapp_common.scope.protocol import ENDED_STATES, SOCKET
from megatronapp_common.scope.protocol_requests import RunRequest
from megatronapp_trainer.inference.engine import Engine
from megatronapp_trainer.inference.errors import QueueFullError
from megatronapp_trainer.inference.events import FinishedEvent
from megatronapp_trainer.inference.request import GenerationRequest
from megatronapp_trainer.scope.assemble import open_scope
from megatronapp_trainer.serve.request_broker import MOST_PROBED, RequestBroker, RequestHandle
from megatronapp_trainer.serve.scope import detached_runs
from megatronapp_trainer.serve.served_model import ServedModel
from megatronapp_trainer.serve.statistics import ServerStatistics

pytestmark = pytest.mark.torch

PROMPT = prompts((5,))[0]
MOST_OPEN = 6


def with_broker(check: str) -> None:
    """Run one of the checks below."""
    with groups_of("") as (layout, device):
        config = config_of(VARIANTS["rotary-grouped"])
        gang, _ = open_engine(model_of(config, layout, device), config, layout, device)
        broker = RequestBroker(most_open=MOST_OPEN, statistics=ServerStatistics())
        broker.open(Engine(gang, most_waiting=MOST_OPEN + MOST_PROBED))
        asyncio.run(globals()[check](broker))


def publisher_limits() -> object:
    """Return the limits of a run that rank 0 sends to its agent."""
    with groups_of("") as (layout, device), tempfile.TemporaryDirectory() as folder:
        config = config_of(VARIANTS["rotary-grouped"])
        gang, _ = open_engine(model_of(config, layout, device), config, layout, device)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"{folder}/{SOCKET}")
            listener.listen()
            scope = open_scope(gang, pathlib.Path(folder), attempt=0, limits={"prompts": 2, "tokens": 40})
            with listener.accept()[0] as peer, peer.makefile("rb") as stream:
                head = stream.read(16)
                hello = decode(head + stream.read(frame_length(head) - 16))
        scope.close()
    return hello.header["limits"]


def request_of(name: str, count: int = 4) -> GenerationRequest:
    return GenerationRequest(id=name, prompt=PROMPT, max_new_tokens=count, temperature=0, ignore_end=True)


def probe(name: str, count: int) -> list[GenerationRequest]:
    return [
        GenerationRequest(id=f"{name}-{place}", prompt=PROMPT, max_new_tokens=0, is_background=True)
        for place in range(count)
    ]


async def ended(broker: RequestBroker, ticket: RequestHandle) -> None:
    left = len(ticket.ids)
    while left:
        broker.step(0)
        while (item := await ticket.get(0.01)) is not None:
            left -= isinstance(item, FinishedEvent)


async def probes_apart(broker: RequestBroker) -> None:
    probed = broker.submit(probe("p", MOST_PROBED))
    with pytest.raises(QueueFullError, match=f"{MOST_PROBED} prompts of probes are open, and at most {MOST_PROBED}"):
        broker.submit(probe("q", 1))
    tickets = [broker.submit([request_of(f"a{place}")]) for place in range(MOST_OPEN)]
    assert [handle.position for handle in tickets] == list(range(MOST_OPEN)), "no probe is before them"
    with pytest.raises(QueueFullError, match=f"{MOST_OPEN} prompts are open"):
        broker.submit([request_of("b")])
    assert broker.statistics.refused == 1
    for ticket in (*tickets, probed):
        await ended(broker, ticket)
    await ended(broker, broker.submit(probe("q", 1)))


async def digests_outside_of_the_lock(broker: RequestBroker) -> None:
    locked = []

    class WatchedRecipe(Recipe):
        def canonical(self) -> str:
            locked.append(broker._lock.locked())
            return super().canonical()

    action = {"type": "gaussian", "coefficient": 0.1}
    noise = WatchedRecipe.model_validate({"perturbations": [{"kind": "system", "action": action}]})
    ticket = broker.submit([dataclasses.replace(request_of("a"), perturbation=noise)])
    await ended(broker, ticket)
    assert locked == [False]


async def running_runs_stay_listed(broker: RequestBroker) -> None:
    detached_runs.MAX_RUNS = 2
    model = ServedModel(name="tiny", created=0, capacity=64, vocab_size=96, most_prompts=1, most_open=1, most_tokens=40)
    known = detached_runs.RunStore(broker)

    def start(name: str) -> detached_runs.RunRecord:
        return known.start(name, RunRequest(prompts=("a",)), 0, model, [request_of(f"{name}-0", 30)])

    start("first")
    second = start("second")
    known.cancel("second")
    while second.state not in ENDED_STATES:
        broker.step(0)
        await asyncio.sleep(0)
    start("third")
    start("fourth")
    assert [record.run for record in known.newest_first()] == ["fourth", "third", "first"]
    broker.close(QueueFullError("the test is over"))
    while known.get("fourth").state not in ENDED_STATES:
        await asyncio.sleep(0)


def test_probes_have_separate_places_and_wait_after_all_others(run_ranks: Callable[..., list[Any]]) -> None:
    run_ranks(1, with_broker, "probes_apart")


def test_digests_of_recipes_are_computed_outside_of_the_lock(run_ranks: Callable[..., list[Any]]) -> None:
    run_ranks(1, with_broker, "digests_outside_of_the_lock")


def test_a_running_run_is_not_evicted_by_newer_runs(run_ranks: Callable[..., list[Any]]) -> None:
    run_ranks(1, with_broker, "running_runs_stay_listed")


def test_rank_0_publishes_the_limits_of_a_run(run_ranks: Callable[..., list[Any]]) -> None:
    assert run_ranks(1, publisher_limits) == [{"prompts": 2, "tokens": 40}]
