"""HTTP of the analyses of MegaScope (docs/scope-protocol.md, section 8)."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import numpy as np
from fastapi import APIRouter, Depends, Query, Response
from pydantic import BaseModel

from megatronapp_analyzer.scope import schemas_analysis
from megatronapp_analyzer.scope.routes import COMING, PROBLEMS, RunId, ScopeOf, bounded, coming, run_of
from megatronapp_analyzer.scope.service import ScopeService
from megatronapp_analyzer.scope.store.run import ScopeRun
from megatronapp_analyzer.scope.views import attribution_answers, lens_answer
from megatronapp_common.errors import FrameError
from megatronapp_common.frames import Frame
from megatronapp_common.scope.analysis_requests import (
    MAX_CELLS,
    MAX_LENS_TOKENS,
    MAX_NEURONS,
    MAX_TOP,
    NeuronOrder,
)
from megatronapp_common.web.problems import HttpError

ANALYSIS_WAIT_S = 1.0
DEFAULT_POSITIONS = 64
"""Positions that are read where none are named: the newest ones."""
CSV = {"text/csv": {"schema": {"type": "string"}}}
LENS = COMING | {200: {"model": schemas_analysis.Lens, "content": CSV}}
ATTRIBUTION = COMING | {200: {"model": schemas_analysis.Attribution, "content": CSV}}
HEADS = COMING | {200: {"model": schemas_analysis.HeadScores, "content": CSV}}
SpanText = Annotated[str | None, Query(pattern=r"^[0-9]{1,6}(-[0-9]{1,6})?$")]
Sample = Annotated[int, Query(ge=0, lt=1 << 20)]
Position = Annotated[int | None, Query(ge=0, lt=1 << 20)]
TokenId = Annotated[int | None, Query(ge=0, lt=1 << 32)]
TextFormat = Annotated[lens_answer.LensFormat, Query(alias="format")]
MAX_RANDOM = 4096
"""Most tokens of a random sequence, which is read twice."""

router = APIRouter(prefix="/api/v1/scope", responses=PROBLEMS, dependencies=[Depends(bounded)])


@router.get("/runs/{run}/lens", operation_id="getLens", response_class=Response, responses=LENS)
async def lens(
    *,
    scope: ScopeOf,
    run: RunId,
    sample: Sample = 0,
    positions: SpanText = None,
    layers: SpanText = None,
    top: Annotated[int, Query(ge=1, le=MAX_TOP)] = 5,
    token: TokenId = None,
    form: TextFormat = "json",
) -> Any:  # noqa: ANN401
    """Logit lens: what each layer's residual predicts, through the final norm and the unembedding.

    `positions` and `layers` as `first-last`: by default the newest 64 positions and all layers. `token`: a token whose
    rank and log-probability are reported in each cell.
    """
    known = scope.whole(run_of(scope, run))
    scope.check_sample(known, sample)
    read = known.length(sample)
    first, end = _span("positions", positions, max(0, read - DEFAULT_POSITIONS), read)
    bottom, over = _span("layers", layers, 0, int(_model_of(scope)["layers"]))
    _check_size((end - first) * (over - bottom), top)
    request = {
        "kind": "lens",
        "rows": [first, end],
        "layers": list(range(bottom, over)),
        "top": top,
        "token": token,
    }
    ids = known.ids(sample)[: end + 1]
    frame = await scope.analyses.of(known, sample, request, ids, ANALYSIS_WAIT_S)
    return await _answer(frame, form, lens_answer.lens_json, lens_answer.lens_csv, schemas_analysis.Lens)


@router.get("/runs/{run}/attribution", operation_id="getAttribution", response_class=Response, responses=ATTRIBUTION)
async def attribution(
    *,
    scope: ScopeOf,
    run: RunId,
    sample: Sample = 0,
    position: Position = None,
    token: TokenId = None,
    against: TokenId = None,
    neurons: Annotated[int, Query(ge=0, le=MAX_NEURONS)] = 10,
    order: NeuronOrder = "contribution",
    form: TextFormat = "json",
) -> Any:  # noqa: ANN401
    """Direct logit attribution: what each head, MLP and bias adds to the logit of the token after a position.

    By default of the newest position that was read, and of the token that follows it in the text. `against`: a token
    whose logit is subtracted. `neurons`: the strongest neurons of each layer, by contribution or activation.
    """
    known = _unperturbed(scope.whole(run_of(scope, run)))
    scope.check_sample(known, sample)
    read, ids = known.length(sample), known.ids(sample)
    row = read - 1 if position is None else position
    if row >= read:
        raise HttpError(404, "outside", f"position {row} was not read", f"{read} tokens were; stay within them.")
    if token is None and row + 1 >= len(ids):
        message = f"token: no token follows position {row}"
        raise HttpError(422, "invalid-request", message, "Name the token whose logit is attributed.")
    request = {
        "kind": "attribution",
        "row": row,
        "token": ids[row + 1] if token is None else token,
        "against": against,
        "neurons": neurons,
        "order": order,
    }
    frame = await scope.analyses.of(known, sample, request, ids[: row + 1], ANALYSIS_WAIT_S)
    schema = schemas_analysis.Attribution
    return await _answer(frame, form, attribution_answers.attribution_json, attribution_answers.attribution_csv, schema)


@router.get("/runs/{run}/heads", operation_id="getHeadScores", response_class=Response, responses=HEADS)
async def head_scores(
    *,
    scope: ScopeOf,
    run: RunId,
    sample: Sample = 0,
    random: Annotated[int | None, Query(ge=2, le=MAX_RANDOM)] = None,
    seed: Annotated[int, Query(ge=0, lt=1 << 53)] = 0,
    form: TextFormat = "json",
) -> Any:  # noqa: ANN401
    """Scores of all heads over the text of a sample, by which previous-token, induction and sink heads are found.

    `random`: instead of the text, over this number of random tokens, read twice, drawn with `seed`.
    """
    known = _unperturbed(scope.whole(run_of(scope, run)))
    scope.check_sample(known, sample)
    request: dict[str, Any] = {"kind": "heads"}
    ids: Sequence[int] = known.ids(sample)[: known.length(sample)]
    if random is not None:
        request |= {"random": random, "seed": seed}
        ids = random_text(_model_of(scope)["vocabulary"], random, seed)
    if len(ids) < 2:
        raise HttpError(404, "outside", f"{len(ids)} tokens have no scores of heads", "Two tokens have some.")
    frame = await scope.analyses.of(known, sample, request, ids, ANALYSIS_WAIT_S)
    return await _answer(
        frame, form, attribution_answers.heads_json, attribution_answers.heads_csv, schemas_analysis.HeadScores
    )


def _unperturbed(run: ScopeRun) -> ScopeRun:
    """Return a run without a perturbation. Raises HttpError 409 otherwise."""
    if run.header.get("perturbation") is not None:
        message = "this run is perturbed, and attributions and scores of heads are of the model as it is"
        raise HttpError(409, "perturbed", message, "Generate the text without a perturbation.")
    return run


def random_text(vocabulary: int, length: int, seed: int) -> list[int]:
    """Draw tokens uniformly and repeat them once: the text on which induction shows (Olsson et al. 2022)."""
    tokens: list[int] = np.random.default_rng(seed).integers(0, vocabulary, length).tolist()
    return tokens + tokens


async def _answer(
    frame: Frame | None,
    form: lens_answer.LensFormat,
    as_json: Callable[[Frame], Mapping[str, Any]],
    as_csv: Callable[[Frame], bytes],
    schema: type[BaseModel],
) -> Response:
    """Return a result in the requested form, or that it is still being computed. Raises HttpError."""
    if frame is None:
        return coming("analysis")

    def render() -> bytes:
        if form == "csv":
            return as_csv(frame)
        return schema.model_validate(as_json(frame)).model_dump_json(by_alias=True).encode()

    try:
        data = await asyncio.to_thread(render)
    except (FrameError, KeyError, TypeError) as error:
        message = f"the model sent no analysis that can be shown: {error}"
        raise HttpError(503, "model-failed", message, "See rank 0's log.") from error
    media = "text/csv; charset=utf-8" if form == "csv" else "application/json"
    return Response(data, headers={"Cache-Control": "no-store"}, media_type=media)


def _model_of(scope: ScopeService) -> Mapping[str, Any]:
    model = scope.core.publishers.model
    if model is None:
        raise HttpError(503, "restarting", "the ranks have not connected yet", "Try again in a moment.")
    return model


def _span(name: str, text: str | None, first: int, count: int) -> tuple[int, int]:
    """Return first and end of `first-last`; by default from `first` on. Raises HttpError for what does not exist."""
    if text is None:
        return first, count
    low, _, high = text.partition("-")
    start, last = int(low), int(high or low)
    if start > last:
        raise HttpError(422, "invalid-request", f"{name}: {start} is after {last}", "Write the smaller one first.")
    if last >= count:
        raise HttpError(404, "outside", f"{name}: there is no {last}", f"There are {count}, from 0; stay within them.")
    return start, last + 1


def _check_size(cells: int, top: int) -> None:
    if cells > MAX_CELLS or cells * top > MAX_LENS_TOKENS:
        raise HttpError(
            413,
            "too-large",
            f"{cells} cells of {top} tokens are more than one answer has",
            f"At most {MAX_CELLS} cells and {MAX_LENS_TOKENS} tokens; name fewer positions, layers or tokens.",
        )
