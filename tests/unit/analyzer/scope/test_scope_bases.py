"""Fits of PCA that meet each other, and rows that are hard to bring."""

import asyncio
import functools
import json
from collections.abc import Callable
from typing import Any

import httpx
import numpy as np
import pytest
import scope_rank_zero
import scope_session

from megatronapp_analyzer.scope.probes import pca_service
from megatronapp_analyzer.scope.probes.rank0_client import Rank0Client
from megatronapp_analyzer.scope.service import ScopeService
from megatronapp_analyzer.scope.settings import ScopeSettings
from megatronapp_analyzer.scope.store.run import ScopeRun
from megatronapp_common import frames
from megatronapp_common.frames import Frame, FrameType
from megatronapp_common.scope.protocol import unpack

pytestmark = pytest.mark.asyncio
RUN, LAYERS = scope_session.RUN, range(4)
FIRST = pca_service.FitTarget(layers=LAYERS, refit=False, tokens=8)


@functools.cache
def recording() -> scope_session.Recording:
    return scope_session.record(tokens=6)


def journal_frames(run: ScopeRun) -> list[Frame]:
    found = [frames.decode(entry.whole) for entry in run.journal.after(0) if entry.whole]
    return [frame for frame in found if frame.type == FrameType.SCOPE_PCA]


def run_with_states(scope: ScopeService, name: str, sample: int) -> ScopeRun:
    """A run of which hidden states are held: those of a sample of the recording."""
    state = scope_session.run_state(recording(), "done")
    run = scope.core.runs.set_state({**state.header, "run": name}).run
    found = np.ascontiguousarray(recording().sites[sample]["residual"], "<f4")
    for layer in LAYERS:
        run.values.put(("residual", 0, layer, None), range(len(found)), found[:, layer])
    return run


async def test_concurrent_fits_are_published_with_their_own_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = iter([0, 40])
    """Turns of the loop that pass before a thread has done its work: many for coordinates of the first fit."""

    async def run_interleaved(work: Callable[..., Any], *arguments: Any) -> Any:
        for _ in range(next(waits, 0)):
            await asyncio.sleep(0)
        return work(*arguments)

    monkeypatch.setattr(asyncio, "to_thread", run_interleaved)
    scope = ScopeService(ScopeSettings(job="tiny"))
    runs = [run_with_states(scope, f"run{sample}", sample) for sample in range(2)]
    await asyncio.gather(*(scope.pca.refit(run, LAYERS, "me") for run in runs))
    pictures = [journal_frames(run)[-1] for run in runs]
    assert [picture.header["version"] for picture in pictures] == [1, 2]
    for sample, picture in enumerate(pictures):
        (points,) = unpack(picture)
        np.testing.assert_allclose(points.data.mean(axis=0), 0, atol=1e-4, err_msg=f"{sample}: not its own axes")
    (second,) = unpack(pictures[1])
    states = recording().sites[1]["residual"]
    for layer in LAYERS:
        np.testing.assert_allclose(scope.pca.bases[layer].project(states[:, layer]), second.data[:, layer], atol=1e-3)


class Model:
    """Rank 0 with a real client. `refusals`: answers to probes, or to those of one text, before it delivers any."""

    def __init__(self, scope: ScopeService, refusals: tuple[int, ...] = (), *, silent: bool = False) -> None:
        self.rank = scope_rank_zero.RankZero(recording(), "token")
        self.refusals = list(refusals)
        self.refused_text = list[int]()
        self.probes: list[dict[str, Any]] = []
        self._scope = scope
        if not silent:
            self.rank.publish = self._publish
        scope.probe_client.client = Rank0Client("http://model", "token", transport=httpx.MockTransport(self._answer))

    def _publish(self, frame: Frame) -> None:
        asyncio.get_running_loop().call_soon(self._scope.core.ingest.take_frame, 0, 0, frame)

    def _answer(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path.removeprefix("/scope/v1/")
        text = json.loads(request.content)["ids"][0] if path == "probes" else None
        if text is not None and text[: len(self.refused_text)] == self.refused_text and self.refusals:
            return httpx.Response(self.refusals.pop(0), json={"code": "busy", "message": "", "hint": ""})
        found = self.rank.answer(request.method, path, request.content)
        self.probes = [body for _, kind, body in self.rank.requests if kind == "probes"]
        return httpx.Response(found.status_code, content=bytes(found.body))


def seen(scope: ScopeService, until: str) -> ScopeRun:
    """Return a run that the core has received, without coordinates, up to a state."""
    for rank, frame in scope_session.rank_frames(recording(), with_pca=False):
        scope.core.ingest.take_frame(0, rank, frame)
        if frame.header.get("state") == until:
            break
    return scope.core.runs[RUN]


async def wait_until(condition: Callable[[], bool]) -> None:
    """Let the loop run until then."""
    async with asyncio.timeout(120):
        while not condition():
            await asyncio.sleep(0)


async def test_a_refit_is_another_probe_than_the_first_fit_that_is_under_way() -> None:
    scope = ScopeService(ScopeSettings(job="tiny"))
    model = Model(scope, silent=True)
    async with scope.running():
        run = seen(scope, "done")
        await wait_until(lambda: len(model.probes) == 1)
        again = await scope.pca.refit(run, LAYERS, "me")
        assert [len(probe["ids"]) for probe in model.probes] == [1, 2], "all samples, not those of the first fit"
        assert await scope.pca.refit(run, LAYERS, "you") == again


async def test_a_run_that_ends_as_its_first_rows_arrive_is_fitted_once() -> None:
    scope = ScopeService(ScopeSettings(job="tiny"))
    model = Model(scope, silent=True)
    arrived: list[Frame] = []
    model.rank.publish = arrived.append
    async with scope.running():
        run = seen(scope, "decoding")
        await wait_until(lambda: len(scope.core.probes) == 1)
        for frame in [scope_session.run_state(recording(), "done"), *arrived]:  # in one turn of the loop
            scope.core.ingest.take_frame(0, 0, frame)
        await wait_until(lambda: scope.pca.given_version == 1)
        assert [probe["queries"] for probe in model.probes].count(None) == 1
        assert journal_frames(run)


async def test_concurrent_first_fits_share_a_basis_that_shows_both_runs() -> None:
    scope = ScopeService(ScopeSettings(job="tiny"))
    runs = [run_with_states(scope, f"run{sample}", sample) for sample in range(2)]
    rows = [(0, place) for place in range(8)]
    states = {layer: recording().sites[0]["residual"][:8, layer] for layer in LAYERS}
    await asyncio.gather(*(scope.pca._fit(run, states, rows, FIRST) for run in runs))
    assert [[frame.header["version"] for frame in journal_frames(run)] for run in runs] == [[1], [1]]
    assert scope.pca.version == 1


def shown_rows(run: ScopeRun) -> list[list[int]]:
    pictures = journal_frames(run)
    return list(pictures[-1].header["rows"]) if pictures else []


def every() -> list[list[int]]:
    """Return sample and place of all rows of the recording."""
    return [[sample, place] for sample in range(2) for place in range(len(recording().sites[sample]["residual"]))]


async def test_rows_that_the_model_first_refuses_are_fetched_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pca_service, "RETRY_S", 0)
    scope = ScopeService(ScopeSettings(job="tiny"))
    model = Model(scope, refusals=(429, 503))
    async with scope.running():
        run = seen(scope, "done")
        await wait_until(lambda: len(journal_frames(run)) > 0)
        model.refusals = [503, 429, 429]
        await wait_until(lambda: shown_rows(run) == every())
        assert not model.refusals
        await wait_until(lambda: (RUN, 1, True) in scope.pca._completed)
        probed = len(model.probes)
        scope.pca.complete(run)
        await wait_until(lambda: not scope.pca._completing)
        assert len(model.probes) == probed, "what is there is not asked for again"


@pytest.mark.parametrize(("status", "again"), [(404, False), (503, True)])
async def test_a_sample_that_is_refused_keeps_no_other_from_coming(
    status: int, again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pca_service, "RETRY_S", 0)
    monkeypatch.setattr(pca_service, "TRIES", 3)
    scope = ScopeService(ScopeSettings(job="tiny"))
    run, shown = seen(scope, "done"), [(0, place) for place in range(8)]
    model = Model(scope)
    states = {layer: recording().sites[0]["residual"][:8, layer] for layer in LAYERS}
    async with scope.running():
        model.refused_text, model.refusals = recording().prompts[0], [status] * 3
        await scope.pca._fit(run, states, shown, FIRST)
        assert scope.pca._completing
        await wait_until(lambda: not scope.pca._completing)
        second = [row for row in every() if row[0] == 1]
        assert shown_rows(run) == [list(row) for row in shown] + second
        assert ((RUN, 1, True) in scope.pca._completed) != again, "what may be granted later is asked for again"
        model.refusals = []
        scope.pca.complete(run)
        await wait_until(lambda: not scope.pca._completing)
        prompt = len(recording().prompts[0])
        received = [row for row in every() if row[0] == 0 and row[1] >= prompt]
        assert shown_rows(run) == [list(row) for row in shown] + received * again + second
