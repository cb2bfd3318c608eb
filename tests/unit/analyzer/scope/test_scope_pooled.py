"""Attention of texts whose rows the hub cannot keep: tiles are served all the same, or refused with what fits."""

import dataclasses
import json
import re
from typing import Any

import httpx
import numpy as np
import pytest
import scope_session
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from megatronapp_analyzer.scope.core import ScopeCore
from megatronapp_analyzer.scope.probes.probe_client import ProbeClient
from megatronapp_analyzer.scope.probes.rank0_client import Rank0Client
from megatronapp_analyzer.scope.settings import ScopeSettings
from megatronapp_analyzer.scope.store.memory_budget import MemoryBudget
from megatronapp_analyzer.scope.store.run import ScopeRun
from megatronapp_analyzer.scope.store.tile_pooling import MAX_CHUNKS, PIECE_SHARE, TilePool
from megatronapp_analyzer.scope.views.tiles import TILE, TileRef, tile
from megatronapp_common.frames import Frame, FrameType
from megatronapp_common.scope.protocol import Tensor, build_frame
from megatronapp_common.scope.protocol_requests import ProbeRequest, ProbeSite
from megatronapp_common.web.problems import HttpError

LENGTH, RING_BYTES, HEAD = 1500, 512 << 10, (0, 1, 2)
MOST_TRIES = 200
RECORDING = scope_session.record(tokens=1)


def codes(length: int = LENGTH) -> NDArray[np.uint8]:
    return np.tril(np.random.default_rng(3).integers(0, 256, (length, length), np.uint8))


class LongRank:
    """Rank 0 of a model that has read a long text: it sends each probe's rows at once."""

    def __init__(self) -> None:
        self.core = ScopeCore(ScopeSettings(job="tiny", ring_bytes=RING_BYTES), clock=lambda: 0.0)
        client = Rank0Client("http://rank", "token", transport=httpx.MockTransport(self.answer))
        self.probes = ProbeClient(self.core, client)
        self.codes = codes()
        self.requested: list[range] = []
        header = {**scope_session.run_state(RECORDING, "done").header}
        header["prompts"] = [{"text": "", "ids": [1] * LENGTH, "offsets": []}]
        self.core.ingest.take_frame(0, 0, scope_session.publisher(RECORDING.shape, 0, 1, 1))
        self.core.ingest.take_frame(0, 0, Frame(FrameType.SCOPE_RUN_STATE, header))
        self.run = self.core.runs[scope_session.RUN]

    def answer(self, request: httpx.Request) -> httpx.Response:
        probe_request = ProbeRequest.model_validate(json.loads(request.content))
        (site,), name = probe_request.sites, f"probe-{len(self.requested)}"
        first, end = probe_request.queries or (0, LENGTH)
        self.requested.append(range(first, end))
        heads = list(site.heads or [0])
        tensor_header = {
            "site": site.site,
            "layers": list(site.layers),
            "heads": [heads[0], heads[-1] + 1],
            "replicated": False,
        }
        rows = self.codes[first:end]
        data = rows[:, None, None, :end] if site.code == "u8s" else np.zeros((end - first, 1, 1, 8), "<f4")
        tensor = Tensor(site.site, site.code, np.ascontiguousarray(data), None, tensor_header)
        header = {"rank": 0, "probe": name, "step": 0, "rows": [[0, first, end - first]], "timeUs": 0, "part": 0}
        self.core.ingest.take_frame(0, 0, build_frame(FrameType.SCOPE_PART, header, [tensor]))
        return httpx.Response(200, json={"probe": name})

    async def tile(self, level: int, q: int, k: int) -> NDArray[np.uint8]:
        place = TileRef(level=level, q=q, k=k, length=LENGTH)
        for _ in range(MOST_TRIES):
            found = await self.probes.tile(self.run, HEAD, place, "me")
            if not isinstance(found, str):
                return found
        pytest.fail("the tile is asked for without end")


@pytest.mark.asyncio
async def test_a_tile_of_more_rows_than_the_hub_stores_is_fetched_in_chunks() -> None:
    rank = LongRank()
    whole = dict(enumerate(rank.codes))
    for level, q, k in ((2, 1, 0), (2, 1, 1), (1, 2, 1), (0, 5, 5), (2, 1, 0)):
        before = len(rank.requested)
        found = await rank.tile(level, q, k)
        place = TileRef(level=level, q=q, k=k, length=LENGTH)
        np.testing.assert_array_equal(found, tile(place, whole))
        requests = rank.requested[before:]
        assert len(requests) <= MAX_CHUNKS and len({rows.start for rows in requests}) == len(requests), (
            "no row comes twice"
        )
        assert all(len(rows) * LENGTH <= RING_BYTES // PIECE_SHARE for rows in requests)
    assert not requests, "what was made is kept"
    assert rank.core.runs.budget.used_bytes <= RING_BYTES


@pytest.mark.asyncio
async def test_a_tile_that_would_be_read_for_too_long_is_refused_with_what_fits() -> None:
    rank = LongRank()
    with pytest.raises(HttpError, match="queries, whose rows have") as refusal:
        await rank.tile(3, 0, 0)
    assert (refusal.value.status, refusal.value.code, rank.requested) == (413, "too-large", [])
    assert not rank.run.pooled._makings, "it takes no room"
    fits = re.search(r"level (\d+) fits here", refusal.value.hint)
    assert fits is not None
    level = int(fits.group(1))
    found = await rank.tile(level, LENGTH // (TILE << level), 0)
    assert found.shape[0] == -(-(LENGTH % (TILE << level)) // (1 << level))


@pytest.mark.asyncio
async def test_exact_numbers_that_exceed_memory_are_refused_and_not_fetched_again() -> None:
    rank = LongRank()
    rank.core.runs.budget.limit_bytes = 4 * 8 * LENGTH - 1
    site = ProbeSite(site="q", layers=(1,), heads=(2,))
    await rank.probes.probe(rank.run, 0, site, range(LENGTH), "me")
    with pytest.raises(HttpError, match="for which the hub has no room") as refusal:
        await rank.probes.probe(rank.run, 0, site, range(LENGTH), "me")
    assert (refusal.value.status, len(rank.requested)) == (413, 1)


@given(
    length=st.integers(1, 900),
    level=st.integers(0, 2),
    at=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    lengths=st.lists(st.integers(0, 900), max_size=5),
)
def test_a_tile_built_in_chunks_equals_the_tile_of_the_whole_map(
    length: int, level: int, at: tuple[int, int], lengths: list[int]
) -> None:
    tiles, whole = TilePool(MemoryBudget(1 << 20)), MAP[:length, :length]
    place: Any = None
    for end in sorted(
        {*(known_length for known_length in lengths if known_length < length), length}
    ):  # the text grows, and is asked for
        place = TileRef(level=level, q=at[0], k=at[1], length=end)
        if place.inside:
            made = tiles.making(HEAD, place)
            while not made.whole:
                queries, before = tiles.next_queries(made), made.next
                assert before in queries and set(queries) <= set(place.queries)
                tiles.add(HEAD, [(query, whole[query, : query + 1]) for query in queries])
                assert made.next == min(queries.stop, place.needed.stop)
            np.testing.assert_array_equal(made.tile, tile(place, dict(enumerate(whole))))


MAP = codes(900)


@pytest.mark.asyncio
@pytest.mark.parametrize(("level", "faster"), [(0, 1), (2, 1), (2, 40)])
async def test_tiles_of_a_text_that_grows_with_every_request_are_completed(
    level: int, faster: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank, length, waited = LongRank(), LENGTH // 2, 0
    rank.run.header["state"] = "decoding"
    monkeypatch.setattr(ScopeRun, "length", lambda *_: length)
    rank.run.pooled = TilePool(rank.core.runs.budget, grows=lambda _: length < LENGTH)
    whole = dict(enumerate(rank.codes))
    span = TILE << level
    for _ in range(6):
        began = length
        while True:
            last = (length - 1) // span
            places = [TileRef(level=level, q=last, k=k, length=length) for k in range(last + 1)]
            found = await rank.probes.tiles(rank.run, HEAD, places, "me")
            waited, length = waited + 1, min(LENGTH, length + faster)
            if not isinstance(found, str):
                break
            assert waited < MOST_TRIES, "the tiles are asked for without end"
        for place, answered in zip(places, found, strict=True):
            lengths = range(began, length + 1)
            assert any(np.array_equal(answered, tile(dataclasses.replace(place, length=n), whole)) for n in lengths)
    rows = [row for rows_of_probe in rank.requested for row in rows_of_probe]
    assert len(rows) == len(set(rows)), "no row comes twice"


@pytest.mark.asyncio
async def test_requests_for_the_same_tile_of_a_growing_text_share_a_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    rank, length = LongRank(), 0
    rank.run.header["state"] = "decoding"
    monkeypatch.setattr(ScopeRun, "length", lambda *_: length)
    monkeypatch.setattr(rank.core.ingest, "take_frame", lambda *_: None)  # its rows are still on their way
    for length in range(1030, 1100):
        for level, q in ((0, 4), (2, 1)):
            place = TileRef(level=level, q=q, k=0, length=length)
            assert isinstance(await rank.probes.tile(rank.run, HEAD, place, f"page {length}"), str)
    assert len(rank.requested) == 1, "both tiles show the same queries"


def test_a_shown_tile_waits_for_the_tiles_requested_with_it() -> None:
    tiles = TilePool(MemoryBudget(1 << 20), grows=lambda _: True)

    def request_tile(q: int, length: int) -> Any:
        return tiles.making(HEAD, TileRef(level=0, q=q, k=0, length=length))

    assert not request_tile(0, 300).whole and not request_tile(1, 300).whole
    tiles.add(HEAD, [(query, MAP[query, : query + 1]) for query in range(256, 300)])
    for length in range(301, 310):
        assert not request_tile(0, length).whole and request_tile(1, length).tile.shape == (44, 256)
    tiles.add(HEAD, [(query, MAP[query, : query + 1]) for query in range(256)])
    assert request_tile(0, 310).whole and tiles.next_queries(request_tile(1, 310)) == range(300, 310), (
        "what is new comes, and only that"
    )
    assert request_tile(0, 311).whole and not request_tile(1, 311).whole
    ended = TilePool(MemoryBudget(1 << 20))
    assert ended.making(HEAD, TileRef(level=0, q=1, k=0, length=300)).place.length == 300
    assert ended.making(HEAD, TileRef(level=0, q=1, k=0, length=320)).place.length == 320, "it will not be longer"


def test_a_sample_grows_until_its_last_token_or_the_end_of_the_run() -> None:
    run = ScopeRun("r", MemoryBudget(RING_BYTES))
    last = {"id": 1, "text": "", "offset": None}
    run.tokens = [{}, {4: last | {"finished": None}}, {4: last | {"finished": None}, 5: last | {"finished": "length"}}]
    assert [run.grows(), *map(run.grows, range(3))] == [True, True, True, False]
    run.header["state"] = "cancelled"
    assert not any([run.grows(), *map(run.grows, range(3))])


def test_memory_of_closed_tiles_is_returned_to_the_ring() -> None:
    ring = MemoryBudget(RING_BYTES)
    run = ScopeRun("r", ring)
    for number in range(3 * RING_BYTES // TILE**2):
        run.pooled.making(HEAD, TileRef(level=1, q=number, k=0, length=1 << 30))
    assert 0 < ring.used_bytes <= RING_BYTES and len(ring) == sum(map(len, run.pooled._makings.values()))
    run.close()
    assert (ring.used_bytes, len(ring)) == (0, 0)
