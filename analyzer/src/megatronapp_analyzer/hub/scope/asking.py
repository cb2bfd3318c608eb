"""What the desk asks of the model: runs, changes, and probes for numbers that it does not hold."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from megatronapp_analyzer.hub.problems import ApiError
from megatronapp_analyzer.hub.scope import encode
from megatronapp_analyzer.hub.scope.actions import ActionLog
from megatronapp_analyzer.hub.scope.desk import ScopeDesk
from megatronapp_analyzer.hub.scope.exact import HEADED
from megatronapp_analyzer.hub.scope.merge import Piece, Table
from megatronapp_analyzer.hub.scope.run import Run
from megatronapp_analyzer.hub.scope.serving import ServeClient
from megatronapp_common.scope.protocol_requests import CaptureChange, Probe, ProbeSite, RunRequest

RETRY_MS = 200


class Asker:
    """Between routes and rank 0. `client` None: no model serves here."""

    def __init__(self, desk: ScopeDesk, client: ServeClient | None) -> None:
        self.desk = desk
        self.client = client
        self.actions = ActionLog()

    @property
    def serving(self) -> ServeClient:
        """The model. Raises ApiError 409 without one."""
        if self.client is None:
            raise ApiError(
                409, "no-model", "nothing generates here", "Start a job with mode: serve, or `megatronapp serve`."
            )
        return self.client

    async def start(self, request: RunRequest, who: str) -> dict[str, Any]:
        """Queue a run. `who` asks."""
        self._check_heads(request.capture.pinned)
        answer = await self.serving.start(request)
        self.actions.note(who, f"started run {str(answer.get('run'))[:64]} of {len(request.prompts)} prompts")
        return answer

    async def cancel(self, run: str, who: str) -> None:
        """End a run."""
        await self.serving.cancel(run)
        self.actions.note(who, f"cancelled run {run}")

    async def change(self, run: str, change: CaptureChange, who: str) -> None:
        """Change what is captured."""
        self._check_heads(change.capture.pinned)
        await self.serving.change(run, change)
        self.actions.note(who, f"changed what is captured of run {run}")

    def _check_heads(self, heads: Sequence[Any]) -> None:
        model = self.desk.publishers.model
        for place, one in enumerate(heads):
            if model is not None and (one.layer >= model["layers"] or one.head >= model["heads"]):
                raise ApiError(
                    422,
                    "invalid-request",
                    f"capture.pinned.{place}: there is no layer {one.layer}, head {one.head}",
                    f"The model has {model['layers']} layers of {model['heads']} heads.",
                )

    async def probe(self, run: Run, sample: int, site: ProbeSite, queries: range) -> str:
        """Ask for rows of one site, once as long as they have not come. Returns the probe's id."""
        key = (run.id, sample, site, queries)
        if (asked := self.desk.probes.asked(key)) is not None:
            return asked
        if self.client is None:
            raise ApiError(
                404, "not-recorded", f"{site.site} of these rows was not recorded", "Only a serving model can tell."
            )
        ids = tuple(run.ids(sample)[: run.length(sample)])
        wanted = Probe(ids=(ids,), sites=(site,), queries=(queries.start, queries.stop))
        probe = await self.serving.probe(wanted)
        self.desk.probes.expect(probe, key, lambda pieces: keep(run, sample, site, pieces, self.desk))
        self.desk.probes.settle(self.desk.publishers.expected())
        return probe


def keep(run: Run, sample: int, site: ProbeSite, pieces: Sequence[Piece], desk: ScopeDesk) -> None:
    """Put what a probe found where it is looked for."""
    wanted = [piece for piece in pieces if piece.tensor.name == site.site]
    if not wanted or desk.runs.get(run.id) is not run:
        return
    if site.code == "u8s":
        for _, row_layer, row_head, position, codes in encode.attention_rows(wanted):
            run.attention.put((sample, row_layer, row_head), [position], codes.reshape(1, -1).copy())
        return
    table = encode.tables_of(wanted, None, apart=frozenset())[site.site]
    positions = [position for _, position in table.rows]
    for layer, head, rows in _slices(site.site, table):
        run.values.put((site.site, sample, layer, head), positions, rows)


def _slices(site: str, table: Table) -> list[tuple[int | None, int | None, Any]]:
    """The rows of every layer and head, each as [rows, width]."""
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
