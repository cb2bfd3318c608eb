"""Run as rank 0 stores it: when it has ended, and what it reported of its tokens."""

import asyncio
import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest

from megatronapp_common.scope.protocol_requests import RunRequest
from megatronapp_trainer.inference.errors import EngineLostError
from megatronapp_trainer.inference.events import FinishedEvent, FinishReason, TokenEvent
from megatronapp_trainer.inference.request import GenerationRequest
from megatronapp_trainer.serve.request_broker import QueueEvent, RequestHandle
from megatronapp_trainer.serve.scope.detached_runs import RunRecord
from megatronapp_trainer.serve.served_model import new_seed

pytestmark = [pytest.mark.asyncio, pytest.mark.torch]


@dataclasses.dataclass
class RecordingHub:
    states: list[tuple[str, int]] = dataclasses.field(default_factory=list)

    def __call__(self, header: Mapping[str, Any]) -> None:
        self.states.append((header["state"], header["steps"]))


def opened(hub: RecordingHub, *prompts: str) -> RunRecord:
    ids = [f"r-{sample}" for sample in range(len(prompts))]
    ticket = RequestHandle(
        [GenerationRequest(id=request_id, prompt=(1,), max_new_tokens=9) for request_id in ids], lambda _: None
    )
    return RunRecord(
        run="r", body=RunRequest(prompts=prompts), seed=0, ticket=ticket, started_at="", prompts=[], announce=hub
    )


def token(sample: int, index: int, text: str = "x") -> TokenEvent:
    return TokenEvent(
        request_id=f"r-{sample}", index=index, token=index + 5, logprob=0, candidates=(), text=text, logits=None
    )


def end(sample: int, reason: FinishReason, text: str = "", error: EngineLostError | None = None) -> FinishedEvent:
    return FinishedEvent(
        request_id=f"r-{sample}", reason=reason, text=text, prompt_tokens=1, generated_tokens=0, error=error
    )


async def followed(record: RunRecord, *batches: list[TokenEvent | FinishedEvent | QueueEvent]) -> None:
    for batch in batches:
        record.ticket.put(batch)
    async with asyncio.timeout(120):
        await record.follow()


async def test_a_run_cancelled_in_its_prefill_reports_no_step() -> None:
    record = opened(hub := RecordingHub(), "a", "b")
    await followed(record, [QueueEvent(None)], [end(0, "cancelled")], [end(1, "cancelled")])
    assert hub.states == [("prefill", 0), ("cancelled", 0)]
    assert record.detail().samples[0].model_dump() == {"ids": [], "texts": [], "offsets": [], "finished": []}


async def test_a_run_has_ended_when_its_last_prompt_has() -> None:
    record = opened(hub := RecordingHub(), "a", "b")
    await followed(
        record,
        [QueueEvent(None), token(0, 0), token(1, 0)],
        [end(0, "cancelled"), token(1, 1), token(1, 2)],
        [end(1, "cancelled", "tail")],
    )
    assert hub.states == [("prefill", 0), ("decoding", 1), ("cancelled", 3)]
    assert record.shown().texts == ["x", "xxxtail"]
    assert record.detail().samples[1].texts == ["x", "x", "x"]


async def test_reported_tokens_can_be_read_again() -> None:
    record = opened(hub := RecordingHub(), "whale \U0001f40b")
    await followed(record, [token(0, 0, ""), token(0, 1, "\U0001f40b"), token(0, 2, "")], [end(0, "length", "!")])
    detail = record.detail()
    assert hub.states == [("decoding", 1), ("done", 3)]
    assert detail.header["state"] == "done"
    assert detail.samples[0].model_dump() == {
        "ids": [5, 6, 7],
        "texts": ["", "\U0001f40b", "!"],
        "offsets": [None, (8, 10), (10, 11)],
        "finished": [None, None, "length"],
    }


async def test_a_lost_engine_fails_the_run() -> None:
    record = opened(hub := RecordingHub(), "a", "b")
    lost = EngineLostError("a rank was lost")
    await followed(record, [end(0, "error", error=lost), end(1, "error", error=lost)])
    assert [state for state, _ in hub.states] == ["failed"]
    assert record.error is not None and "a rank was lost" in record.error["message"]


async def test_a_drawn_seed_can_be_requested_again() -> None:
    seeds = [new_seed(None) for _ in range(64)]
    assert len(set(seeds)) > 1
    for seed in seeds:
        again = RunRequest.model_validate({"prompts": ["a"], "sampling": {"seed": seed}})
        assert int(float(seed)) == again.sampling.seed == new_seed(seed)
