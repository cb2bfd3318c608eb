"""The axes of PCA: fitted on the first prompt, kept, and fitted anew on request, turned onto the old ones."""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatronapp_analyzer.hub.problems import ApiError
from megatronapp_analyzer.hub.scope import pca
from megatronapp_analyzer.hub.scope.asking import Asker, keep
from megatronapp_analyzer.hub.scope.encode import HEADER_ROOM
from megatronapp_analyzer.hub.scope.merge import Piece
from megatronapp_analyzer.hub.scope.run import Run
from megatronapp_common.frames import Frame, FrameType
from megatronapp_common.scope.protocol import COMPONENTS, MAX_MESSAGE_BYTES, Tensor, frame_of
from megatronapp_common.scope.protocol_requests import Probe, ProbeSite

LOG = logging.getLogger(__name__)
SITE = "residual"
FIT_ROWS = 256
"""That a basis is fitted on: every so many of a longer text."""
Rows = Mapping[int, NDArray[np.floating]]
"""Hidden states [rows, hidden] by layer."""


class BasisDesk:
    """The basis of each layer, and its version, which counts fits."""

    def __init__(self, asker: Asker) -> None:
        self._asker = asker
        self._desk = asker.desk
        self._desk.on_prefill = self._after_prefill
        self._tasks: set[asyncio.Task[Any]] = set()
        self.bases: dict[int, pca.Basis] = {}
        self.version = 0

    async def close(self) -> None:
        """End what goes on."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _start(self, work: Any) -> None:  # noqa: ANN401
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            LOG.warning("PCA: %s", error)

    def _after_prefill(self, run: Run) -> None:
        """The first prompt that asks for PCA gives the axes; later runs are told of them."""
        capture, model = run.header.get("capture") or {}, self._desk.publishers.model
        wanted = capture.get("preset") != "off" and (capture.get("states") or {}).get("pca", True)
        if wanted and model is not None and self._asker.client is not None:
            if self.bases:
                rows = {layer: np.empty((0, len(basis.mean))) for layer, basis in self.bases.items()}
                self._desk.publish_frame(run, self._frame(run, rows, (), refit=False))
            else:
                self._start(self.ask(run, range(model["layers"]), refit=False))

    async def refit(self, run: Run, layers: Sequence[int]) -> str | None:
        """New axes of these layers. None: fitted; else the probe that brings the rows. Raises ApiError."""
        held = {layer: run.values.get((SITE, 0, layer, None)) for layer in layers}
        if all(held.values()):
            positions = sorted(set.intersection(*(set(rows) for rows in held.values())))
            if len(positions) > 1:
                chosen = positions[:: -(-len(positions) // FIT_ROWS)]
                rows = {layer: np.stack([found[place] for place in chosen]) for layer, found in held.items()}
                await self._fit(run, rows, chosen, refit=True)
                return None
        if self._asker.client is None:
            raise ApiError(404, "not-recorded", "hidden states of this run were not recorded", "Take a live model.")
        return await self.ask(run, layers, refit=True)

    async def ask(self, run: Run, layers: Sequence[int], *, refit: bool) -> str:
        """Have the model read the first prompt again, and fit on what it tells."""
        length = run.length(0)
        stride = -(-length // FIT_ROWS)
        site = ProbeSite(site=SITE, layers=tuple(layers))
        wanted = Probe(ids=(tuple(run.ids(0)[:length]),), sites=(site,), stride=stride)
        probe = await self._asker.serving.probe(wanted)

        def done(pieces: Sequence[Piece]) -> None:
            keep(run, 0, site, pieces, self._desk)
            positions = sorted({place for piece in pieces for _, place in piece.rows})
            held = {layer: run.values.get((SITE, 0, layer, None)) for layer in layers}
            if len(positions) > 1 and all(place in rows for rows in held.values() for place in positions):
                rows = {layer: np.stack([found[place] for place in positions]) for layer, found in held.items()}
                self._start(self._fit(run, rows, positions, refit=refit))

        self._desk.probes.expect(probe, (run.id, "pca", tuple(layers)), done)
        self._desk.probes.settle(self._desk.publishers.expected())
        return probe

    async def _fit(self, run: Run, rows: Rows, positions: Sequence[int], *, refit: bool) -> None:
        old = dict(self.bases)
        fitted = await asyncio.to_thread(_fit_all, rows, old)
        self.bases |= fitted
        self.version += 1
        self._desk.publish_frame(run, self._frame(run, rows, positions, refit=refit))
        if self._asker.client is not None:
            await self._asker.client.basis(basis_frame(self.version, self.bases))

    def _frame(self, run: Run, rows: Rows, positions: Sequence[int], *, refit: bool) -> Frame:
        room = (MAX_MESSAGE_BYTES - 2 * HEADER_ROOM) // (4 * COMPONENTS * len(rows) + 16)
        every = max(1, -(-len(positions) // room))
        points = np.stack([self.bases[layer].project(found)[::every] for layer, found in rows.items()], axis=1)
        header = {
            "run": run.id,
            "version": self.version,
            "layers": list(rows),
            "explained": [self.bases[layer].explained.tolist() for layer in rows],
            "fitted": "refit" if refit else "first prompt",
            "rows": [[0, place] for place in positions[::every]],
        }
        return frame_of(FrameType.SCOPE_PCA, header, [Tensor("pca", "f32", points.astype("<f4"))])


def _fit_all(rows: Rows, old: Mapping[int, pca.Basis]) -> dict[int, pca.Basis]:
    return {layer: pca.fit(found, onto=old.get(layer)) for layer, found in rows.items()}


def basis_frame(version: int, bases: Mapping[int, pca.Basis]) -> Frame:
    """SCOPE_BASIS for rank 0."""
    layers = sorted(bases)
    mean = np.stack([bases[layer].mean for layer in layers]).astype("<f4")
    axes = np.stack([bases[layer].axes for layer in layers]).astype("<f4")
    tensors = [Tensor("mean", "f32", mean), Tensor("basis", "f32", axes)]
    return frame_of(FrameType.SCOPE_BASIS, {"version": version, "layers": layers}, tensors)
