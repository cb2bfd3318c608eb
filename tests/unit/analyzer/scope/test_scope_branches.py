"""Comparisons that the hub stores: followed until they end, bounded, and marked when rank 0 has lost them."""

import asyncio
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from megatronapp_analyzer.scope.probes import branch_store
from megatronapp_analyzer.scope.probes.branch_store import MAX_STORED, BranchStore
from megatronapp_analyzer.scope.probes.rank0_client import START_TIMEOUT_S, Rank0Client
from megatronapp_analyzer.scope.store.audit_log import AuditLog
from megatronapp_common.frames import Frame, FrameType
from megatronapp_common.web.problems import HttpError

pytestmark = pytest.mark.asyncio


class Rank0:
    """Fake client of rank 0: comparisons have the state `state`, and are unknown if it is None."""

    def __init__(self) -> None:
        self.state: str | None = "done"
        self.failure: HttpError | None = None
        """Answer to all requests for a comparison."""
        self.started = 0
        self.cancelled: list[str] = []

    async def start_branches(self, kind: str, body: Mapping[str, Any]) -> dict[str, Any]:
        assert (kind, body) == ("comparisons", {"prompt": "a"})
        self.started += 1
        return {"comparison": f"{self.started:012x}"}

    async def list_branches(self, kind: str) -> list[str]:
        assert kind == "comparisons"
        return [f"{number:012x}" for number in range(self.started, max(0, self.started - MAX_STORED), -1)]

    async def cancel_branches(self, kind: str, name: str) -> None:
        assert kind == "comparisons"
        self.cancelled.append(name)

    async def branches(self, kind: str, name: str) -> Frame:
        if self.failure is not None:
            raise self.failure
        if self.state is None:
            raise HttpError(404, "no-such-comparison", f"there is no {name} of {kind}", "")
        header = {"state": self.state, "comparison": name, "startedAt": name, "rows": []}
        return Frame(FrameType.SCOPE_ANALYSIS, header, b"")


def opened(monkeypatch: pytest.MonkeyPatch) -> tuple[Rank0, BranchStore]:
    monkeypatch.setattr(branch_store, "POLL_S", 0.0)
    rank = Rank0()
    return rank, store_of(rank)


def store_of(rank: Rank0) -> BranchStore:
    client: Any = SimpleNamespace(client=rank, serving=rank, actions=AuditLog())
    return BranchStore("comparisons", client)


def names_of(frames: list[Frame]) -> list[str]:
    return [frame.header["comparison"] for frame in frames]


async def test_the_newest_that_have_ended_are_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    rank, store = opened(monkeypatch)
    names = [await store.start({"prompt": "a"}, "jane") for _ in range(MAX_STORED + 3)]
    assert names_of(await store.newest_first()) == names[: -MAX_STORED - 1 : -1]
    rank.state = None
    with pytest.raises(HttpError, match="there is no comparison"):
        await store.get(names[0])
    await store.close()


async def test_a_hub_that_was_restarted_knows_those_of_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    rank, store = opened(monkeypatch)
    names = [await store.start({"prompt": "a"}, "jane") for _ in range(MAX_STORED + 1)]
    await store.close()
    restarted = store_of(rank)
    assert names_of(await restarted.newest_first()) == names[:0:-1]
    rank.state = "running"  # one more is started whose name the hub does not get
    await rank.start_branches("comparisons", {"prompt": "a"})
    late = f"{rank.started:012x}"
    assert (await restarted.get(late)).header["state"] == "running"
    await restarted.cancel(late, "jane")
    assert rank.cancelled == [late]
    rank.state = "cancelled"
    await until_state(restarted, late, "cancelled")
    assert names_of(await restarted.newest_first())[0] == late
    await restarted.close()


async def test_a_comparison_that_rank_0_has_lost_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    rank, store = opened(monkeypatch)
    rank.state = "running"
    name = await store.start({"prompt": "a"}, "jane")
    rank.state = None
    await until_state(store, name, "failed")
    assert (await store.get(name)).header["error"]["code"] == "engine-lost"
    await store.close()


async def test_a_rank_0_that_does_not_answer_is_no_missing_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    rank, store = opened(monkeypatch)
    rank.failure = HttpError(503, "model-failed", "rank 0 does not answer", "")
    with pytest.raises(HttpError, match="rank 0 does not answer"):
        await store.get("0" * 12)
    rank.failure, rank.state = None, None
    with pytest.raises(HttpError, match="there is no comparison"):
        await store.get("0" * 12)


async def test_a_comparison_that_rank_0_computes_all_the_same_is_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    rank, store = opened(monkeypatch)
    monkeypatch.setattr(branch_store, "LOST_S", 0.0)
    monkeypatch.setattr(branch_store, "REFRESH_S", 0.0)
    rank.state = "running"
    name = await store.start({"prompt": "a"}, "jane")
    rank.failure = HttpError(503, "model-failed", "rank 0 does not answer", "")
    await until_state(store, name, "failed")
    assert (await store.get(name)).header["error"]["code"] == "engine-lost"
    await store.cancel(name, "jane")
    assert rank.cancelled == [name]
    rank.failure = None
    assert [frame.header["state"] for frame in await store.newest_first()] == ["running"]
    rank.state = "cancelled"
    await until_state(store, name, "cancelled")
    await store.close()


async def until_state(store: BranchStore, name: str, state: str) -> None:
    """Wait until the hub knows that a comparison has this state."""
    async with asyncio.timeout(120):
        while (await store.get(name)).header["state"] != state:
            await asyncio.sleep(0)


async def test_rank_0_has_more_time_to_check_recipes_than_for_other_answers() -> None:
    limits = []

    def answer(request: httpx.Request) -> httpx.Response:
        limits.append(request.extensions["timeout"]["read"])
        return httpx.Response(201, json={"sweep": "0" * 12})

    client = Rank0Client("http://rank0", "token", transport=httpx.MockTransport(answer))
    assert await client.start_branches("sweeps", {}) == {"sweep": "0" * 12}
    assert limits == [START_TIMEOUT_S]
    await client.close()
