"""HTTP and WebSocket of MegaScope (docs/scope-protocol.md, sections 7 and 8)."""

import asyncio
import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, cast

import numpy as np
from fastapi import APIRouter, Depends, Header, Path, Query, Response, WebSocket, status
from numpy.typing import NDArray
from pydantic import StringConstraints
from starlette.requests import HTTPConnection
from starlette.responses import JSONResponse

from megatronapp_analyzer.errors import ProtocolError
from megatronapp_analyzer.scope import schemas
from megatronapp_analyzer.scope.delivery import page_socket, session_download, session_file
from megatronapp_analyzer.scope.delivery.limits import caller_of
from megatronapp_analyzer.scope.probes.probe_client import RETRY_MS
from megatronapp_analyzer.scope.probes.variance import variance_of
from megatronapp_analyzer.scope.service import ScopeService
from megatronapp_analyzer.scope.store.audit_log import who_of
from megatronapp_analyzer.scope.store.run import ScopeRun, value_site
from megatronapp_analyzer.scope.views import export_values
from megatronapp_analyzer.scope.views.candidates import candidates_of
from megatronapp_analyzer.scope.views.server_counts import read_counts
from megatronapp_analyzer.scope.views.tiles import MAX_LEVEL, MAX_TILES, TileRef, body, etag
from megatronapp_common.names import CloseCode
from megatronapp_common.scope.protocol import SUBPROTOCOL
from megatronapp_common.scope.protocol_requests import CaptureChange, ProbeSite, Rotary, RunRequest
from megatronapp_common.web.models import Problem
from megatronapp_common.web.problems import HttpError
from megatronapp_common.web.roles import direct, role_of
from megatronapp_common.web.tokens import TokenRole

Answers = dict[int | str, dict[str, Any]]
PROBLEMS: Answers = {401: {"model": Problem}, 422: {"model": Problem}, 429: {"model": Problem}}
NOT_FOUND: Answers = {404: {"model": Problem}}
PROBLEM: dict[str, Any] = {"model": Problem}
COMING: Answers = {**NOT_FOUND, 202: {"model": schemas.AnswerPending}, 409: PROBLEM, 413: PROBLEM, 503: PROBLEM}
CONTROLS: Answers = {403: PROBLEM, 404: PROBLEM, 409: PROBLEM, 429: PROBLEM, 503: PROBLEM}
BODY: Answers = {**CONTROLS, 400: PROBLEM, 408: PROBLEM, 413: PROBLEM}
TILE: Answers = COMING | {200: {"content": {"application/octet-stream": {}}}, 304: {"description": "not modified"}}
VALUES: Answers = {**COMING}
VALUES[200] = {
    "model": schemas.Values,
    "content": {"text/csv": {"schema": {"type": "string"}}, "application/octet-stream": {}},
}
SESSION: Answers = NOT_FOUND | {200: {"content": {"application/octet-stream": {}}}}
IMMUTABLE = "private, max-age=31536000, immutable"
SCORES_WAIT_S = 1.0
RETRY_HINT = "Take one that GET /api/v1/scope/runs lists."


def service_of(connection: HTTPConnection) -> ScopeService:
    """MegaScope of the hub that serves this connection."""
    return cast(ScopeService, connection.app.state.scope)


async def bounded(connection: HTTPConnection) -> None:
    """Refuse a caller with too many requests. Sockets have limits of their own."""
    if connection.scope["type"] == "http":
        service_of(connection).count_request(caller_of(connection))


router = APIRouter(prefix="/api/v1/scope", responses=PROBLEMS, dependencies=[Depends(bounded)])


async def controller(connection: HTTPConnection) -> None:
    """Refuse a caller that may only look."""
    if role_of(connection) != TokenRole.CONTROLLER:
        raise HttpError(
            403, "needs-controller", "a viewer may only look", "Open the address of `megatronapp ui JOB` as its owner."
        )


ScopeOf = Annotated[ScopeService, Depends(direct(service_of))]
CONTROLLER = [Depends(controller)]
Who = Annotated[str, Depends(direct(who_of))]
Caller = Annotated[str, Depends(direct(caller_of))]
RunId = Annotated[str, Path(max_length=64)]
Index = Annotated[int, Path(ge=0, lt=1 << 20)]
Level = Annotated[int, Path(ge=0, le=MAX_LEVEL)]
TileName = Annotated[str, StringConstraints(pattern=r"^[0-9]{1,6},[0-9]{1,6}$")]
TileNames = Annotated[list[TileName], Query(min_length=1, max_length=MAX_TILES)]
IfNoneMatch = Annotated[str | None, Header()]
IndexQuery = Annotated[int | None, Query(ge=0, lt=1 << 20)]


def run_of(scope: "ScopeService", run: str) -> ScopeRun:
    """A run that is known. Raises HttpError 404."""
    known = scope.core.runs.get(run)
    if known is None:
        raise HttpError(404, "no-such-run", f"there is no run {run!r}", RETRY_HINT)
    return known


def coming(probe: str) -> JSONResponse:
    """Answer that numbers are being computed, and when to ask again."""
    said = schemas.AnswerPending(probe=probe, retry_ms=RETRY_MS).model_dump(by_alias=True)
    return JSONResponse(said, 202, headers={"Cache-Control": "no-store"})


@router.get("", operation_id="getScope")
async def hello(scope: ScopeOf, role: Annotated[TokenRole, Depends(direct(role_of))]) -> schemas.Hello:
    """The model, its limits, and the runs that are known."""
    return schemas.Hello.model_validate(scope.core.feed.hello(role.value))


@router.get("/served", operation_id="getServed", responses={409: PROBLEM, 503: PROBLEM})
async def served(scope: ScopeOf) -> schemas.ServerStatus:
    """Queue and latencies of the server, read from rank 0."""
    serving = scope.probe_client.serving
    counts = read_counts(await serving.metrics())
    return schemas.ServerStatus.model_validate({**dataclasses.asdict(counts), "address": f"{serving.url}/v1"})


@router.get("/runs", operation_id="listRuns")
async def runs(scope: ScopeOf) -> list[schemas.RunSummary]:
    """List all runs, newest first."""
    return [schemas.RunSummary.model_validate(summary) for summary in scope.core.runs.summaries()]


@router.post(
    "/runs",
    operation_id="startRun",
    status_code=status.HTTP_201_CREATED,
    responses=BODY,
    dependencies=CONTROLLER,
)
async def start(scope: ScopeOf, request: RunRequest, who: Who) -> schemas.RunAccepted:
    """Generate from some prompts; the answer has the place in the queue."""
    answer = await scope.probe_client.start(request, who)
    return schemas.RunAccepted(run=str(answer.get("run")), position=answer.get("position"))


@router.get("/runs/{run}", operation_id="getRun", responses=NOT_FOUND)
async def run_detail(scope: ScopeOf, run: RunId, *, candidates: bool = False) -> schemas.RunDetail:
    """Return the state of a run, and its tokens; `candidates`: also other likely tokens, as far as they are stored."""
    found = run_of(scope, run)
    known = found.detail()
    if candidates:
        others = await asyncio.to_thread(candidates_of, found.journal.steps())
        for sample, line in enumerate(known["generated"]):
            for token in line:
                token["candidates"] = others.get((sample, token["position"]))
    return schemas.RunDetail.model_validate({name: known.get(name) for name in schemas.DETAIL_NAMES if name in known})


@router.delete(
    "/runs/{run}",
    operation_id="cancelRun",
    status_code=status.HTTP_204_NO_CONTENT,
    responses=CONTROLS,
    dependencies=CONTROLLER,
)
async def cancel(scope: ScopeOf, run: RunId, who: Who) -> None:
    """Cancel a run that waits or generates."""
    await scope.probe_client.cancel(run_of(scope, run).id, who)


@router.patch(
    "/runs/{run}",
    operation_id="changeCapture",
    status_code=status.HTTP_204_NO_CONTENT,
    responses=BODY,
    dependencies=CONTROLLER,
)
async def change(scope: ScopeOf, run: RunId, request: CaptureChange, who: Who) -> None:
    """Change the capture from the next step on."""
    await scope.probe_client.change(run_of(scope, run).id, request, who)


@router.get(
    "/runs/{run}/attention/{sample}/{layer}/{head}/{level}/{q}/{k}",
    operation_id="getTile",
    response_class=Response,
    responses=TILE,
)
async def attention_tile(
    *,
    scope: ScopeOf,
    caller: Caller,
    run: RunId,
    sample: Index,
    layer: Index,
    head: Index,
    level: Level,
    q: Index,
    k: Index,
    if_none_match: IfNoneMatch = None,
) -> Response:
    """Return a tile of 256 x 256 probabilities (code u8s); `X-Tile-Shape` has its rows and columns."""
    known = scope.whole(run_of(scope, run))
    place = _tile_place(scope, known, (sample, layer, head), (level, q, k))
    found = await scope.probe_client.tile(known, (sample, layer, head), place, caller)
    if isinstance(found, str):
        return coming(found)
    data = found.tobytes()
    shape = {"X-Tile-Shape": f"{found.shape[0]},{found.shape[1]}"}
    tag = etag(data + bytes(str(found.shape), "ascii"))
    return _tagged(data, tag, if_none_match, finished=place.full or known.final, headers=shape)


@router.get(
    "/runs/{run}/attention/{sample}/{layer}/{head}/{level}",
    operation_id="getTiles",
    response_class=Response,
    responses=TILE,
)
async def attention_tiles(
    *,
    scope: ScopeOf,
    caller: Caller,
    run: RunId,
    sample: Index,
    layer: Index,
    head: Index,
    level: Level,
    tile: TileNames,
    if_none_match: IfNoneMatch = None,
) -> Response:
    """Return tiles of a head at a level (`tile=q,k`, each), in a frame SCOPE_TILES. The limit of requests applies to
    each tile."""
    names = list(dict.fromkeys(tile))
    scope.count_request(caller, len(names) - 1)
    known = scope.whole(run_of(scope, run))
    where = sample, layer, head
    pairs = (map(int, name.split(",")) for name in names)
    places = [_tile_place(scope, known, where, (level, q, k)) for q, k in pairs]
    found = await scope.probe_client.tiles(known, where, places, caller)
    if isinstance(found, str):
        return coming(found)
    said = {"run": known.id, "sample": sample, "layer": layer, "head": head, "level": level}
    data = body(said, zip(names, found, strict=True))
    finished = known.final or all(place.full for place in places)
    return _tagged(data, etag(data), if_none_match, finished=finished)


def _tagged(
    data: bytes, tag: str, known: str | None, *, finished: bool, headers: Mapping[str, str] | None = None
) -> Response:
    """Bytes, or that they are as they were. `finished`: they stay as they are."""
    said = {"ETag": tag, "Cache-Control": IMMUTABLE if finished else "private, no-cache", **(headers or {})}
    if known == tag:
        return Response(status_code=304, headers=said)
    return Response(data, headers=said, media_type="application/octet-stream")


def _tile_place(
    scope: "ScopeService", run: ScopeRun, where: tuple[int, int, int], which: tuple[int, int, int]
) -> TileRef:
    sample, layer, head = where
    scope.check_head(run, sample, layer, head)
    level, q, k = which
    place = TileRef(level=level, q=q, k=k, length=run.length(sample))
    if not place.inside:
        raise HttpError(
            404, "outside", f"level {level} has no tile {q}, {k}", f"{place.length} tokens were read; stay within them."
        )
    return place


@router.get("/runs/{run}/values/{site}", operation_id="getValues", response_class=Response, responses=VALUES)
async def values(
    *,
    scope: ScopeOf,
    caller: Caller,
    run: RunId,
    site: Annotated[str, Path(max_length=64)],
    sample: Annotated[int, Query(ge=0, lt=1 << 20)] = 0,
    layer: IndexQuery = None,
    head: IndexQuery = None,
    position: IndexQuery = None,
    rotary: Rotary = "after",
    form: Annotated[export_values.Format, Query(alias="format")] = "json",
) -> Response:
    """Return exact numbers of a site at one or all positions. `rotary`: `q` and `k` after or before their rotation."""
    known = scope.whole(run_of(scope, run))
    scope.check_site(known, site, (sample, layer, head))
    turn = scope.rotation_of(site, rotary)
    wanted = _positions(known, sample, position)
    rows = known.values.get((value_site(site, turn), sample, layer, head))
    absent = [place for place in wanted if place not in rows]
    if absent:
        heads = None if head is None else (head,)
        asked = ProbeSite(site=site, layers=() if layer is None else (layer,), heads=heads, rotary=turn)
        return coming(await scope.probe_client.probe(known, sample, asked, range(absent[0], absent[-1] + 1), caller))
    block = export_values.block(site, (sample, layer, head), rows, wanted)
    if form != "npy" and block.values.size > export_values.MAX_TEXT_NUMBERS:
        raise HttpError(
            413, "too-large", f"{block.values.size} numbers are too many as text", "Take format=npy, or one position."
        )
    data = await asyncio.to_thread(export_values.render, block, form)
    return Response(data, headers={"Cache-Control": "no-store"}, media_type=export_values.MEDIA[form])


def _positions(run: ScopeRun, sample: int, position: int | None) -> list[int]:
    length = run.length(sample)
    if position is None:
        return list(range(length))
    if position >= length:
        raise HttpError(404, "outside", f"position {position} was not read", f"{length} tokens were; stay within them.")
    return [position]


@router.post(
    "/runs/{run}/pca",
    operation_id="refitPca",
    response_model=schemas.PcaFitted,
    responses={**BODY, 202: {"model": schemas.AnswerPending}},
    dependencies=CONTROLLER,
)
async def refit(
    scope: ScopeOf,
    run: RunId,
    request: schemas.PcaRequest,
    who: Who,
    caller: Caller,
) -> Any:  # noqa: ANN401
    """Fit new axes, rotated onto the old ones. They are sent as SCOPE_PCA."""
    known = scope.whole(run_of(scope, run))
    probe = await scope.pca.refit(known, scope.check_layers(request.layers), caller)
    scope.probe_client.actions.note(who, f"asked for new axes of PCA from run {known.id}")
    return schemas.PcaFitted(version=scope.pca.version) if probe is None else coming(probe)


@router.get("/runs/{run}/pca/variance", operation_id="getVariance", response_model=schemas.Variance, responses=COMING)
async def total_variance(
    scope: ScopeOf, run: RunId, caller: Caller, layer: Annotated[int, Query(ge=0, lt=1 << 20)]
) -> Any:  # noqa: ANN401
    """Total variance of the hidden states after a layer, over all tokens of the run."""
    known = scope.whole(run_of(scope, run))
    scope.check_layers([layer])
    found = await variance_of(scope.probe_client, known, layer, caller)
    if isinstance(found, str):
        return coming(found)
    return schemas.Variance(layer=layer, rows=found.rows, variance=found.variance)


@router.get("/runs/{run}/scores", operation_id="getScores", response_model=schemas.Scores, responses=COMING)
async def prompt_scores(scope: ScopeOf, run: RunId, sample: Annotated[int, Query(ge=0, lt=1 << 20)] = 0) -> Any:  # noqa: ANN401
    """Surprise and entropy at each token of a prompt. Pages get them with candidates, as SCOPE_OVERVIEW."""
    known = run_of(scope, run)
    scope.check_sample(known, sample)
    found = await scope.scores.of(known, sample, SCORES_WAIT_S)
    if found is None:
        return coming("scores")
    columns = {name: _numbers(getattr(found, name)) for name in ("surprise", "entropy")}
    return schemas.Scores(sample=sample, positions=list(range(1, len(found.surprise) + 1)), **columns)


def _numbers(values: NDArray[np.float32]) -> list[float | None]:
    """JSON has neither NaN nor infinity."""
    return [float(value) if np.isfinite(value) else None for value in values]


@router.get("/runs/{run}/session", operation_id="getSession", response_class=Response, responses=SESSION)
async def session(scope: ScopeOf, run: RunId, caller: Caller) -> Response:
    """The recorded session: what `megatronapp scope replay` plays. A reader that is too slow is ended."""
    known = run_of(scope, run)
    headers = {"Content-Disposition": f'attachment; filename="{known.id}.scope"', "Cache-Control": "no-store"}
    with scope.sessions.acquire({caller: session_download.MAX_OF_CALLER}) as place:
        pieces = session_file.RunSnapshot(scope.core.feed, known).frames()
        return session_download.SessionResponse(pieces, place.pop_all(), headers)


@router.websocket("")
async def page(socket: WebSocket, scope: ScopeOf) -> None:
    """One page, as long as it listens."""
    if SUBPROTOCOL not in socket.scope["subprotocols"]:
        await socket.close(CloseCode.POLICY, reason=f"subprotocol {SUBPROTOCOL}")
        return
    await socket.accept(subprotocol=SUBPROTOCOL)
    try:
        slot = scope.pages.acquire()
    except ProtocolError as error:
        await page_socket.refuse(socket, CloseCode.BUSY, error)
        return
    with slot:
        await page_socket.serve(socket, scope.core.feed, role_of(socket).value)
