"""Axes of PCA through a real hub: fitted, kept over lives of the model, fitted again, and shown in one version
alone."""

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import scope_rank_zero
import scope_session
import websocket_clients
from websockets.typing import Subprotocol

from megatronapp_analyzer.scope.probes import pca
from megatronapp_analyzer.scope.probes.rank0_client import Rank0Client
from megatronapp_common import frames
from megatronapp_common.frames import Frame, FrameType
from megatronapp_common.scope.protocol import SUBPROTOCOL, unpack
from megatronapp_common.web.tokens import TokenRole, derive_token

pytestmark = pytest.mark.asyncio
RUN, LATER = scope_session.RUN, "ba9876543210"
PCA_PATH = f"/api/v1/scope/runs/{RUN}/pca"


@functools.cache
def recording() -> scope_session.Recording:
    return scope_session.record(tokens=6)


@contextlib.asynccontextmanager
async def shown(hub: Any, fake_job: Any, until: Any) -> AsyncIterator[tuple[scope_rank_zero.RankZero, Any]]:
    """Rank 0, and the agent of a hub that has seen the run; ranks do not project yet."""
    token = derive_token(hub.secret, TokenRole.SERVE)

    async def probe_requested() -> bool:
        return any(path == "probes" for _, path, _ in rank.requests)

    with scope_rank_zero.serve(scope_rank_zero.RankZero(recording(), token)) as rank:
        hub.hub.scope.probe_client.client = Rank0Client(rank.url, token)
        async with hub.agent(fake_job(), 0) as agent:
            await agent.hello()
            rank.publish = scope_rank_zero.sender(agent.connection)
            for _, frame in scope_session.rank_frames(recording(), with_pca=False):
                await agent.connection.send(frames.encode(frame))
                if frame.header.get("state") == "decoding":
                    await until(probe_requested)  # so that the first fit finds no more than the prompt
            yield rank, agent


@contextlib.asynccontextmanager
async def page(hub: Any) -> AsyncIterator[Any]:
    url = f"ws://127.0.0.1:{hub.port}/api/v1/scope"
    async with websocket_clients.connect(
        url, additional_headers=hub.bearer, subprotocols=[Subprotocol(SUBPROTOCOL)], max_queue=None
    ) as connection:
        yield connection


def bases(rank: scope_rank_zero.RankZero) -> list[tuple[int, dict[str, Any]]]:
    """Version and tensors of every basis that rank 0 got."""
    found = [body for _, path, body in rank.requests if path == "basis"]
    return [(body.header["version"], {tensor.name: tensor.data for tensor in unpack(body)}) for body in found]


def journal_frames(hub: Any, run: str = RUN) -> list[Frame]:
    entries = hub.server.call(lambda: hub.hub.scope.core.runs[run].journal.after(0))
    return [frames.decode(entry.whole) for entry in entries if entry.whole]


def newest(hub: Any, run: str = RUN) -> Frame:
    return [frame for frame in journal_frames(hub, run) if frame.type == FrameType.SCOPE_PCA][-1]


def states(rows: list[list[int]]) -> Any:
    return np.stack([recording().sites[sample]["residual"][place] for sample, place in rows])


async def given(hub: Any, rank: scope_rank_zero.RankZero, until: Any, count: int, rows: int) -> None:
    """Wait until rank 0 has received this number of bases, and the picture of the last has this number of rows."""

    async def basis_received() -> bool:
        if len(bases(rank)) < count or not any(frame.type == FrameType.SCOPE_PCA for frame in journal_frames(hub)):
            return False
        picture = newest(hub).header
        return (picture["version"], len(picture["rows"])) == (count, rows)

    await until(basis_received)


def every() -> list[list[int]]:
    return [[sample, place] for sample in range(2) for place in range(len(recording().sites[sample]["residual"]))]


async def test_a_refit_reads_the_whole_text_and_moves_all_points(hub: Any, fake_job: Any, until: Any) -> None:
    async with shown(hub, fake_job, until) as (rank, _):
        prompt = len(recording().prompts[0])
        await given(hub, rank, until, 1, len(recording().sites[0]["residual"]) + len(recording().sites[1]["residual"]))
        (version, first), picture = bases(rank)[0], newest(hub)
        fitted = states([[0, place] for place in range(prompt)])
        np.testing.assert_allclose(first["mean"], fitted.mean(axis=0), rtol=1e-4, atol=1e-5)
        assert (version, picture.header["version"], picture.header["fitted"]) == (1, 1, "first prompt")
        assert picture.header["sources"] == [{"run": RUN, "tokens": prompt}] * 4
        async with hub.client() as client:
            client.headers["Authorization"] = f"Bearer {derive_token(hub.secret, TokenRole.CONTROLLER)}"
            answer = await client.post(PCA_PATH, json={"layers": [0, 1, 2, 3], "refit": True})
        assert answer.status_code == 202
        await given(hub, rank, until, 2, len(every()))
        version, second = bases(rank)[1]
        picture = newest(hub)
        assert (version, picture.header["version"], picture.header["fitted"]) == (2, 2, "refit")
        assert picture.header["sources"] == [{"run": RUN, "tokens": len(every())}] * 4
        assert picture.header["rows"] == every()
        whole = states(every())
        np.testing.assert_allclose(second["mean"], whole.mean(axis=0), rtol=1e-4, atol=1e-5)
        assert np.abs(second["mean"] - first["mean"]).max() > 0.01, "else nobody could tell that other rows were taken"
        (points,) = unpack(picture)
        expected = np.einsum("nlh,lch->nlc", whole - second["mean"], second["basis"])
        np.testing.assert_allclose(points.data, expected, rtol=1e-3, atol=1e-4)
        for layer in range(4):
            old = pca.fit(fitted[:, layer])
            turned = pca.fit(whole[:, layer], onto=old).axes
            np.testing.assert_allclose(second["basis"][layer], turned, atol=1e-4)
        assert sum(frame.type == FrameType.SCOPE_PCA for frame in journal_frames(hub)) == 1, (
            "older pictures take no room"
        )


async def test_new_ranks_get_the_basis_again_and_later_runs_are_shown_in_it(
    hub: Any, fake_job: Any, until: Any
) -> None:
    async with shown(hub, fake_job, until) as (rank, _), page(hub) as seen:
        await given(hub, rank, until, 1, len(every()))
        async with hub.agent(fake_job(attempt=1), 0) as agent:
            await agent.hello()
            rank.publish = scope_rank_zero.sender(agent.connection)
            for _, frame in scope_session.rank_frames(recording(), with_pca=True):
                header = {**frame.header} | ({"run": LATER} if "run" in frame.header else {})
                header |= {"attempt": 1} if "coordinates" in header else {}
                await agent.connection.send(frames.encode(Frame(frame.type, header, frame.body)))

            async def ended() -> bool:
                run = hub.hub.scope.core.runs.get(LATER)
                return len(bases(rank)) == 2 and run is not None and run.ended

            await until(ended)
            assert [version for version, _ in bases(rank)] == [1, 1]
            np.testing.assert_array_equal(bases(rank)[0][1]["basis"], bases(rank)[1][1]["basis"])
            steps = [frame for frame in journal_frames(hub, LATER) if frame.type == FrameType.SCOPE_STEP]
            assert [frame.header.get("pcaVersion") for frame in steps] == [None] + [1] * (recording().steps - 1)
            fits = [body for _, path, body in rank.requests if path == "probes" and body["queries"] is None]
            assert len(fits) == 1, "later runs need no fit of their own"
            got: list[Frame] = []
            while not (got and got[-1].header.get("pcaVersion")):
                got.append(frames.decode(await asyncio.wait_for(seen.recv(), websocket_clients.DEADLINE_S)))
            assert got[-1].header["run"] == LATER
            assert any(frame.type == FrameType.SCOPE_PCA and frame.header["run"] == LATER for frame in got[:-1])
