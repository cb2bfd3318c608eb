"""Comparisons that the hub stores: followed until they end, bounded, and marked when rank 0 has lost them."""

import asyncio
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from megatronapp_analyzer.scope.probes import branch_store
from megatronapp_analyzer.scope.probes.branch_store import MAX_STORED, BranchStore
from megatronapp_analyzer.scope.store.audit_log import AuditLog
from megatronapp_common.frames import Frame, FrameType
from megatronapp_common.web.problems import HttpError

pytestmark = pytest.mark.asyncio


class Rank0:
    """Fake client of rank 0: comparisons have the state `state`, and are unknown if it is None."""

    def __init__(self) -> None:
        self.state: str | None = "done"
        self.started = 0

    async def start_branches(self, kind: str, body: Mapping[str, Any]) -> dict[str, Any]:
        assert (kind, body) == ("comparisons", {"prompt": "a"})
        self.started += 1
        return {"comparison": f"{self.started:012x}"}

    async def branches(self, kind: str, name: str) -> Frame:
        if self.state is None:
            raise HttpError(404, "no-such-comparison", f"there is no {name} of {kind}", "")
        return Frame(FrameType.SCOPE_ANALYSIS, {"state": self.state, "comparison": name, "rows": []}, b"")


def opened(monkeypatch: pytest.MonkeyPatch) -> tuple[Rank0, BranchStore]:
    monkeypatch.setattr(branch_store, "POLL_S", 0.0)
    rank = Rank0()
    client: Any = SimpleNamespace(serving=rank, actions=AuditLog())
    return rank, BranchStore("comparisons", client)


async def test_the_newest_that_have_ended_are_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    _, store = opened(monkeypatch)
    names = [await store.start({"prompt": "a"}, "jane") for _ in range(MAX_STORED + 3)]
    assert [frame.header["comparison"] for frame in store.newest_first()] == names[: -MAX_STORED - 1 : -1]
    with pytest.raises(HttpError, match="there is no comparison"):
        store.get(names[0])
    await store.close()


async def test_a_comparison_that_rank_0_has_lost_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    rank, store = opened(monkeypatch)
    rank.state = "running"
    name = await store.start({"prompt": "a"}, "jane")
    rank.state = None
    async with asyncio.timeout(20):
        while store.get(name).header["state"] == "running":
            await asyncio.sleep(0)
    assert store.get(name).header["error"]["code"] == "engine-lost"
    await store.close()
