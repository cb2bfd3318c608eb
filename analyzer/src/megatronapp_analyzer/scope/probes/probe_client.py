"""Requests to the model: runs, changes of captures, and probes for numbers that the hub does not have."""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatronapp_analyzer.errors import ProtocolError
from megatronapp_analyzer.scope.core import ScopeCore
from megatronapp_analyzer.scope.parts.merge import MergedTensor, ShardTensor
from megatronapp_analyzer.scope.parts.probe_tracker import (
    MAX_OF_CALLER,
    MAX_PROBES,
    RETRY_S,
    no_memory,
    ranks_disconnected,
)
from megatronapp_analyzer.scope.probes.rank0_client import Rank0Client
from megatronapp_analyzer.scope.store.audit_log import AuditLog
from megatronapp_analyzer.scope.store.perturbed_texts import perturbed_texts
from megatronapp_analyzer.scope.store.run import ScopeRun, value_site
from megatronapp_analyzer.scope.store.tile_pooling import HeadKey
from megatronapp_analyzer.scope.views import encode
from megatronapp_analyzer.scope.views.export_values import HEADED
from megatronapp_analyzer.scope.views.tiles import TileRef, missing, tile
from megatronapp_common.scope.protocol_requests import CaptureChange, ProbeRequest, ProbeSite, RunRequest
from megatronapp_common.web.problems import HttpError

RETRY_MS = 200
KNOWN_S = 2.0
"""Seconds in which a new run arrives from rank 0 through its agent; the answer to the request takes another way."""
Keep = Callable[[ScopeRun, int, ProbeSite, Sequence[ShardTensor]], None]
"""Stores or uses the rows of a site that a probe fetched."""


class ProbeClient:
    """Client of rank 0 for the routes. `client` None: no model serves here."""

    def __init__(self, core: ScopeCore, client: Rank0Client | None) -> None:
        self.core = core
        self.client = client
        self.actions = AuditLog()
        self._asking: dict[object, tuple[str, asyncio.Task[str]]] = {}
        """Probes that rank 0 has not answered yet, with their callers."""

    @property
    def serving(self) -> Rank0Client:
        """Return the client of rank 0. Raises HttpError 409 without a model."""
        if self.client is None:
            raise HttpError(
                409, "no-model", "nothing generates here", "Start a job with mode: serve, or `megatronapp serve`."
            )
        return self.client

    async def start(self, request: RunRequest, who: str) -> dict[str, Any]:
        """Queue a run, and wait until it is known here. `who`: the name for the audit log."""
        self._check_heads(request.capture.pinned)
        answer = await self.serving.start(request)
        count = len(request.prompts)
        self.actions.note(who, f"started run {str(answer.get('run'))[:64]} of {count} prompt{'s' * (count != 1)}")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(KNOWN_S):
                await self.core.runs.wait_for(str(answer.get("run")))
        return answer

    async def cancel(self, run: str, who: str) -> None:
        """Cancel a run for a caller."""
        await self.serving.cancel(run)
        self.actions.note(who, f"cancelled run {run}")

    async def change(self, run: str, change: CaptureChange, who: str) -> None:
        """Change what is captured."""
        self._check_heads(change.capture.pinned)
        await self.serving.change(run, change)
        self.actions.note(who, f"changed what is captured of run {run}")

    def _check_heads(self, heads: Sequence[Any]) -> None:
        model = self.core.publishers.model
        for place, pinned in enumerate(heads):
            if model is not None and (pinned.layer >= model["layers"] or pinned.head >= model["heads"]):
                raise HttpError(
                    422,
                    "invalid-request",
                    f"capture.pinned.{place}: there is no layer {pinned.layer}, head {pinned.head}",
                    f"The model has {model['layers']} layers of {model['heads']} heads.",
                )

    async def tile(self, run: ScopeRun, head: HeadKey, place: TileRef, caller: str) -> NDArray[np.uint8] | str:
        """Return a tile of a head's map, or the id of the probe that fetches more of it. Raises HttpError."""
        sample, layer, index = head
        site = ProbeSite(site="attention", layers=(layer,), heads=(index,), code="u8s")
        rows = run.attention.get(head)
        absent = missing(place, rows)
        if absent is None:
            return tile(place, rows)
        if run.pooled.fit(place):
            return await self.probe(run, sample, site, absent, caller)
        run.pooled.check(place)
        made = run.pooled.making(head, place)
        made.add(rows)
        if made.whole:
            return made.tile
        return await self.probe(run, sample, site, run.pooled.next_queries(made), caller, keep=pool)

    async def tiles(
        self, run: ScopeRun, head: HeadKey, places: Sequence[TileRef], caller: str
    ) -> list[NDArray[np.uint8]] | str:
        """Return tiles of a head's map, or the id of a probe that fetches more of them. Raises HttpError.

        Missing rows are requested together. Other tasks run between any two tiles.
        """
        known = run.attention.get(head)
        absent = [place for place in places if missing(place, known) is not None]
        brought = await asyncio.gather(*(self.tile(run, head, place, caller) for place in absent))
        if coming := [tile for tile in brought if isinstance(tile, str)]:
            return coming[0]
        made: list[NDArray[np.uint8]] = []
        for place in places:
            tile = await self.tile(run, head, place, caller)
            if isinstance(tile, str):
                return tile
            made.append(tile)
            await asyncio.sleep(0)
        return made

    async def probe(
        self, run: ScopeRun, sample: int, site: ProbeSite, queries: range, caller: str, *, keep: Keep | None = None
    ) -> str:
        """Request rows of one site, once until they arrive. Return the probe's id. Raises HttpError."""
        ids = tuple(run.ids(sample)[: run.length(sample)])
        wanted = ProbeRequest(
            ids=(ids,),
            sites=(site,),
            queries=(queries.start, queries.stop),
            stride=queries.step,
            perturbation=perturbed_texts(run, [sample]),
        )
        put = keep or keep_rows
        key = (run.id, sample, site, queries, put)

        def done(pieces: Sequence[ShardTensor]) -> None:
            if self.core.runs.holds(run):
                put(run, sample, site, check(pieces, wanted))

        return await self.request(key, wanted, done, caller)

    async def request(
        self, key: object, wanted: ProbeRequest, done: Callable[[Sequence[ShardTensor]], None], caller: str
    ) -> str:
        """Return the probe that fetches this; a request for what is pending joins it. Raises HttpError."""
        book = self.core.probes
        book.settle(self.core.publishers.expected(), self.core.clock())
        if (asked := book.find_pending(key)) is not None:
            return asked
        if (failure := book.take_failure(key)) is not None:
            raise failure
        if key not in self._asking:
            self._check_capacity(wanted, caller)
            task = asyncio.ensure_future(self._send(key, wanted, done, caller))
            self._asking[key] = caller, task
            task.add_done_callback(lambda _: self._asking.pop(key))
        return await asyncio.shield(self._asking[key][1])

    def _check_capacity(self, wanted: ProbeRequest, caller: str) -> None:
        if self.client is None:
            raise HttpError(
                404,
                "not-recorded",
                f"{wanted.sites[0].site} of these rows was not recorded",
                "Only a model that serves can compute them.",
            )
        asking = [client for client, _ in self._asking.values()]
        of_caller = self.core.probes.count(caller) + asking.count(caller)
        if of_caller >= MAX_OF_CALLER or len(self.core.probes) + len(asking) >= MAX_PROBES:
            whose = "you wait" if of_caller >= MAX_OF_CALLER else "pages wait"
            text = f"{whose} for as many probes as the model takes at a time"
            raise HttpError(429, "too-many-probes", text, "Try again once some are answered.", retry_s=RETRY_S)

    async def _send(
        self, key: object, wanted: ProbeRequest, done: Callable[[Sequence[ShardTensor]], None], caller: str
    ) -> str:
        clears = self.core.probes.clears
        probe = await self.serving.probe(wanted)
        if self.core.probes.clears != clears:
            raise ranks_disconnected()
        self.core.probes.expect(probe, key, done, self.core.clock(), caller=caller)
        self.core.probes.settle(self.core.publishers.expected(), self.core.clock())
        return probe


def check(pieces: Sequence[ShardTensor], asked: ProbeRequest) -> list[ShardTensor]:
    """Return the tensors of a probe for one site. Raises ProtocolError if rows, layers or heads are missing."""
    (site,) = asked.sites
    found = [piece for piece in pieces if piece.tensor.name == site.site and _rotary_of(piece) == site.rotary]
    rows = {row for piece in found for row in piece.rows}
    needed = {
        (sample, place)
        for sample, ids in enumerate(asked.ids)
        for place in range(*(asked.queries or (0, len(ids))), asked.stride)
    }
    layers = {layer for piece in found for layer in piece.layers or ()}
    heads = {head for piece in found if piece.span for head in range(*piece.span)}
    if not needed <= rows or not layers >= set(site.layers) or (heads and not heads >= set(site.heads or ())):
        raise ProtocolError("bad-part", f"a probe of {site.site} brought {len(rows & needed)} of {len(needed)} rows")
    return found


def _rotary_of(piece: ShardTensor) -> str:
    return str(piece.tensor.extra.get("rotary") or "after")


def pool(run: ScopeRun, sample: int, site: ProbeSite, wanted: Sequence[ShardTensor]) -> None:
    """Hand rows of attention to the tiles that wait for them; they are not stored."""
    del site
    for (layer, head), rows in _by_head(wanted).items():
        run.pooled.add((sample, layer, head), rows)


def _by_head(wanted: Sequence[ShardTensor]) -> dict[tuple[int, int], list[tuple[int, NDArray[np.uint8]]]]:
    found: dict[tuple[int, int], list[tuple[int, NDArray[np.uint8]]]] = {}
    for _, layer, head, position, codes in encode.attention_rows(wanted):
        found.setdefault((layer, head), []).append((position, codes))
    return found


def keep_rows(run: ScopeRun, sample: int, site: ProbeSite, wanted: Sequence[ShardTensor]) -> None:
    """Store what a probe fetched. Raises HttpError 413 if it is more than the memory budget allows."""
    if site.code == "u8s":
        _keep_attention(run, sample, wanted)
        return
    table = encode.tables_of(wanted, None, apart=frozenset())[site.site]
    positions = [position for _, position in table.rows]
    for layer, head, rows in _slices(site.site, table):
        key = value_site(site.site, site.rotary), sample, layer, head
        run.values.put(key, positions, rows)
        if not all(position in run.values.get(key) for position in positions):
            raise no_memory(rows.nbytes)


def _keep_attention(run: ScopeRun, sample: int, wanted: Sequence[ShardTensor]) -> None:
    for (layer, head), rows in _by_head(wanted).items():
        for position, codes in rows:
            run.attention.put((sample, layer, head), [position], codes.reshape(1, -1).copy())


def _slices(site: str, table: MergedTensor) -> list[tuple[int | None, int | None, Any]]:
    """Return the rows of every layer and head, each as [rows, width]."""
    count, data = len(table.rows), table.data.astype("<f4")
    if table.layers is None:
        return [(None, None, data.reshape(count, -1))]
    if site not in HEADED:
        return [(layer, None, np.ascontiguousarray(data[:, place])) for place, layer in enumerate(table.layers)]
    heads = [head for first, end in table.spans for head in range(first, end)] or list(range(data.shape[2]))
    return [
        (layer, head, np.ascontiguousarray(data[:, place, index]))
        for place, layer in enumerate(table.layers)
        for index, head in enumerate(heads)
    ]
