"""PCA bases: fitted on the first prompt, used for all runs of the model, and fitted again on request.

A basis has a version, which counts fits. Ranks project what they read on the newest one; rows that were read before are
projected here, from a probe that reads the whole text again, so that a picture has one version only.
"""

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatronapp_analyzer.scope.parts.merge import Row, ShardTensor
from megatronapp_analyzer.scope.parts.probe_tracker import RETRY_S
from megatronapp_analyzer.scope.probes import pca
from megatronapp_analyzer.scope.probes.pca_points import PcaPoints, coordinates_of, frame_of_points, stride_of
from megatronapp_analyzer.scope.probes.probe_client import ProbeClient, check
from megatronapp_analyzer.scope.store.perturbed_texts import perturbed_texts
from megatronapp_analyzer.scope.store.run import ScopeRun
from megatronapp_analyzer.scope.views import encode
from megatronapp_common.frames import Frame, FrameType
from megatronapp_common.scope.protocol import COMPONENTS, Tensor, build_frame
from megatronapp_common.scope.protocol_requests import ProbeRequest, ProbeSite
from megatronapp_common.web.problems import HttpError

LOG = logging.getLogger(__name__)
SITE = "residual"
ENOUGH_ROWS = COMPONENTS + 1
"""With fewer rows the first fit waits for the end of the run."""
FIT_ROWS = 256
"""Rows that a basis is fitted on, with a stride over longer texts."""
TRIES = 60
"""Attempts to send a basis to ranks whose server has not started, or to get rows that they refuse, a second apart."""
REFUSED = frozenset({429, 503})
"""HTTP statuses of requests that may succeed later."""
OURS = "the hub"
"""Caller of the hub's own probes."""
Completion = tuple[str, int, bool]
"""Run, version, and whether the run has ended."""
States = Mapping[int, NDArray[np.floating]]
"""Hidden states [rows, hidden] by layer."""


@dataclasses.dataclass(frozen=True, slots=True)
class FitTarget:
    """Layers to fit, and the reason. `tokens`: number of tokens of the texts whose rows are used."""

    layers: Sequence[int]
    refit: bool
    tokens: int


class PcaService:
    """The basis of each layer, and its version."""

    def __init__(self, probe_client: ProbeClient) -> None:
        self._probe_client = probe_client
        self._core = probe_client.core
        self._tasks: set[asyncio.Task[Any]] = set()
        self._giving: asyncio.Task[Any] | None = None
        self.given_version = 0
        """Version of the basis that rank 0 has accepted last: runs that begin from then on are projected on it. Pages
        get a basis before the ranks do."""
        self._fitting = asyncio.Lock()
        """Fits run one after another: each is rotated onto the one before, and published with its own version."""
        self._fits: set[asyncio.Task[None]] = set()
        """Fits of rows that have arrived, from that moment on."""
        self._completed: set[Completion] = set()
        self._completing: set[Completion] = set()
        self.bases: dict[int, pca.PcaBasis] = {}
        self.fitted = "first prompt"

    @property
    def version(self) -> int:
        """Return the version of the newest basis; 0 before the first."""
        return self._core.pca.newest

    async def close(self) -> None:
        """Cancel all tasks that are running."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _start(self, work: Any) -> asyncio.Task[Any]:  # noqa: ANN401
        task: asyncio.Task[Any] = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            LOG.warning("PCA: %s", error)

    # ---- fits

    def after_prefill(self, run: ScopeRun) -> None:
        """Fit the first basis on the first prompt that captures PCA."""
        if run.length(0) >= ENOUGH_ROWS:
            self._first_fit(run, range(1))
        elif sum(map(run.length, range(len(run.tokens)))) >= ENOUGH_ROWS:
            self._first_fit(run, range(len(run.tokens)))

    def _first_fit(self, run: ScopeRun, samples: range) -> None:
        model = self._core.publishers.model
        if wants(run) and model is not None and self._probe_client.client is not None and not self.bases and run.whole:
            self._start(self._fit_first(run, range(model["layers"]), samples))

    async def _fit_first(self, run: ScopeRun, layers: range, samples: range) -> None:
        """Request the first fit until it succeeds: no page does."""
        over = asyncio.Event()

        async def ask() -> None:
            await self.request_fit(run, layers, refit=False, caller=OURS, samples=samples, over=over)

        await _until(over, ask, lambda: not self.bases and not self._fits and self._core.runs.holds(run))

    async def refit(self, run: ScopeRun, layers: Sequence[int], caller: str) -> str | None:
        """Fit layers again. Return None if done, or the probe that fetches the rows. Raises HttpError."""
        if self._probe_client.client is not None:
            samples = range(len(run.tokens))
            return await self.request_fit(run, layers, refit=True, caller=caller, samples=samples)
        rows, states = _stored_states(run, layers)
        if len(rows) < 2:
            raise HttpError(404, "not-recorded", "hidden states of this run were not recorded", "Take a live model.")
        await self._fit(run, states, rows, FitTarget(layers=layers, refit=True, tokens=len(rows)))
        return None

    async def request_fit(
        self,
        run: ScopeRun,
        layers: Sequence[int],
        *,
        refit: bool,
        caller: str,
        samples: range,
        over: asyncio.Event | None = None,
    ) -> str:
        """Have the model read these samples again, and fit on its answer. Return the probe; `over` is set with its
        answer.

        Layers that are not fitted are read, too: all coordinates of a version arrive together.
        """
        wanted = _probe_of(self._core.publishers.model, run, samples, sorted({*layers, *self.bases}))

        def done(pieces: Sequence[ShardTensor]) -> None:
            rows, states = _states(check(pieces, wanted))
            if over is not None:
                over.set()
            if len(rows) > 1:
                fit = FitTarget(layers=layers, refit=refit, tokens=sum(map(len, wanted.ids)))
                task = self._start(self._fit(run, states, rows, fit))
                self._fits.add(task)
                task.add_done_callback(self._fits.discard)

        what = ("refit", samples) if refit else ("first fit",)
        return await self._probe_client.request((run.id, *what, tuple(layers)), wanted, done, caller)

    async def _fit(self, run: ScopeRun, states: States, rows: Sequence[Row], fit: FitTarget) -> None:
        async with self._fitting:
            fits = fit.refit or not self.bases
            if fits:
                await self._fit_next(run, states, rows, fit)
            elif run.pca_version != self.version and self._core.runs.holds(run):
                self.introduce(run)
        if run.ended or not fits:
            self.complete(run)

    async def _fit_next(self, run: ScopeRun, states: States, rows: Sequence[Row], fit: FitTarget) -> None:
        """Fit, and publish the new basis together with its coordinates."""
        wanted = {layer: states[layer] for layer in fit.layers}
        found = await asyncio.to_thread(_fit_all, wanted, dict(self.bases), (run.id, fit.tokens))
        bases = self.bases | found
        points = await asyncio.to_thread(coordinates_of, states, rows, bases)
        self.bases, self.fitted = bases, "refit" if fit.refit else "first prompt"
        self._core.pca.advance()
        if self._core.runs.holds(run):
            self._publish_points(run, points)
        self.give()

    def _publish_points(self, run: ScopeRun, points: PcaPoints) -> None:
        """Publish SCOPE_PCA of a run, with the coordinates of all known rows."""
        layers = sorted(self.bases)
        said = {
            "run": run.id,
            "version": self.version,
            "layers": layers,
            "explained": [self.bases[layer].explained.tolist() for layer in layers],
            "fitted": self.fitted,
            "sources": [dict(zip(("run", "tokens"), self.bases[layer].source, strict=True)) for layer in layers],
        }
        if run.pca_version != self.version:
            run.pca_version, run.pca_rows = self.version, set()
        self._core.feed.publish_frame(run, frame_of_points(said, points))

    # ---- ranks

    def give(self) -> None:
        """Send the newest basis to the ranks: they may have started since."""
        model = self._core.publishers.model
        if self.bases and model is not None and not _fits(self.bases, model):
            self.bases = {}
        if not self.bases or self._probe_client.client is None:
            return
        if self._giving is not None:
            self._giving.cancel()
        self._giving = self._start(self._give())

    async def _give(self) -> None:
        for tries in range(TRIES):
            version = self.version
            try:
                await self._probe_client.serving.basis(basis_frame(version, self.bases))
            except HttpError as error:
                if error.status != 503 or tries == TRIES - 1:
                    raise
                await asyncio.sleep(RETRY_S)
            else:
                self.given_version = version
                return

    # ---- runs

    def introduce(self, run: ScopeRun) -> None:
        """Publish the newest basis without points to a run whose rows the ranks project on it already."""
        if self.bases:
            self._publish_points(run, PcaPoints.empty(len(self.bases)))

    def complete(self, run: ScopeRun) -> None:
        """Fetch coordinates of rows read before the ranks had the basis: once it is fitted, and at the end."""
        if run.ended and not self.bases:
            self._first_fit(run, range(len(run.tokens)))
        at = (run.id, run.pca_version, run.ended)
        if not wants(run) or not self._shows(run, run.pca_version) or not run.whole:
            return
        if at not in self._completed | self._completing and self._probe_client.client is not None:
            self._completing.add(at)
            self._start(self._bring(run, at))

    def _shows(self, run: ScopeRun, version: int) -> bool:
        """Return whether a run is shown in this version, and it is the newest."""
        return bool(self.bases) and version == self.version == run.pca_version and self._core.runs.holds(run)

    async def _bring(self, run: ScopeRun, at: Completion) -> None:
        """Fetch all missing rows; done once each has arrived, or was refused finally."""
        missing = _missing(run, known_rows(run))
        try:
            works = [self._bring_sample(run, sample, places) for sample, places in missing.items()]
            ends = await asyncio.gather(*works, return_exceptions=True)
        finally:
            self._completing.discard(at)
        for error in (end for end in ends if isinstance(end, BaseException)):
            LOG.warning("PCA of run %s: %s", run.id, error)
        if False not in ends:
            self._completed = {place for place in self._completed if place[0] in self._core.runs} | {at}

    async def _bring_sample(self, run: ScopeRun, sample: int, places: range) -> bool:
        """Fetch coordinates of a span of rows; return whether they arrived. Raises HttpError if they are refused
        finally."""
        version, over = self.version, asyncio.Event()
        whole = _probe_of(self._core.publishers.model, run, [sample], sorted(self.bases))
        wanted = whole.model_copy(update={"queries": (places.start, places.stop)})

        def done(pieces: Sequence[ShardTensor]) -> None:
            rows, states = _states(check(pieces, wanted))
            over.set()
            if self._shows(run, version):
                fresh = coordinates_of(states, [(sample, place) for _, place in rows], self.bases)
                self._publish_points(run, PcaPoints.of_frame(run.journal.pca).with_more(fresh))

        async def ask() -> None:
            await self._probe_client.request((run.id, "pca rows", sample, version, places), wanted, done, OURS)

        await _until(over, ask, lambda: self._shows(run, version))
        return over.is_set()


async def _until(over: asyncio.Event, ask: Callable[[], Awaitable[None]], still: Callable[[], bool]) -> None:
    """Request a probe, and again if it fails, until it is over. Raises HttpError if it is refused finally."""
    refused = 0
    while not over.is_set() and refused < TRIES and still():
        try:
            await ask()
        except HttpError as error:
            if error.status not in REFUSED:
                raise
            refused += 1
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(over.wait(), RETRY_S)


def _probe_of(
    model: Mapping[str, Any] | None, run: ScopeRun, samples: Sequence[int], layers: Sequence[int]
) -> ProbeRequest:
    texts = tuple(tuple(run.ids(sample)[: run.length(sample)]) for sample in samples)
    stride = stride_of(sum(map(len, texts)), len(layers), model["hidden"] if model else 1)
    return ProbeRequest(
        ids=texts,
        sites=(ProbeSite(site=SITE, layers=tuple(layers)),),
        stride=stride,
        perturbation=perturbed_texts(run, samples),
    )


def wants(run: ScopeRun) -> bool:
    """Return whether a run captures coordinates."""
    capture = run.header.get("capture") or {}
    return capture.get("preset") != "off" and bool((capture.get("states") or {}).get("pca", True))


def known_rows(run: ScopeRun) -> set[Row]:
    """Return rows of a run that have coordinates in the basis that it is shown in."""
    return set(PcaPoints.of_frame(run.journal.pca).rows) | run.pca_rows


def _missing(run: ScopeRun, known: set[Row]) -> dict[int, range]:
    """Return for each sample the span of rows that were read and have no coordinates.

    Of a long prompt only some rows are shown; if any of them is known, the prompt is not fetched.
    """
    found: dict[int, range] = {}
    for sample in range(len(run.tokens)):
        end = len(run.prompt_ids(sample))
        first = end if any((sample, place) in known for place in range(end)) else 0
        places = [place for place in range(first, run.length(sample)) if (sample, place) not in known]
        if places:
            found[sample] = range(places[0], places[-1] + 1)
    return found


def _stored_states(run: ScopeRun, layers: Sequence[int]) -> tuple[list[Row], States]:
    """Return stored hidden states, of rows that have them in all these layers."""
    rows: list[Row] = []
    parts: dict[int, list[NDArray[Any]]] = {layer: [] for layer in layers}
    for sample in range(len(run.tokens)):
        held = {layer: run.values.get((SITE, sample, layer, None)) for layer in layers}
        places = sorted(set.intersection(*(set(found) for found in held.values())))
        rows += [(sample, place) for place in places]
        for layer, found in held.items():
            parts[layer] += [found[place] for place in places]
    return rows, {layer: np.array(found) for layer, found in parts.items()}


def _fits(bases: Mapping[int, pca.PcaBasis], model: Mapping[str, Any]) -> bool:
    """Return whether a basis has the sizes of the model."""
    return max(bases) < model["layers"] and all(basis.mean.size == model["hidden"] for basis in bases.values())


def _states(pieces: Sequence[ShardTensor]) -> tuple[list[Row], States]:
    """Return the hidden states of a probe, by layer."""
    table = encode.tables_of(pieces, None)[SITE]
    layers = table.layers or ()
    return list(table.rows), {layer: table.data[:, place] for place, layer in enumerate(layers)}


def _fit_all(states: States, old: Mapping[int, pca.PcaBasis], source: tuple[str, int]) -> dict[int, pca.PcaBasis]:
    """Fit each layer on at most FIT_ROWS rows."""
    found = {}
    for layer, rows in states.items():
        every = -(-len(rows) // FIT_ROWS)
        found[layer] = dataclasses.replace(pca.fit(rows[::every], onto=old.get(layer)), source=source)
    return found


def basis_frame(version: int, bases: Mapping[int, pca.PcaBasis]) -> Frame:
    """Build a SCOPE_BASIS frame for rank 0."""
    layers = sorted(bases)
    mean = np.stack([bases[layer].mean for layer in layers]).astype("<f4")
    axes = np.stack([bases[layer].axes for layer in layers]).astype("<f4")
    tensors = [Tensor("mean", "f32", mean), Tensor("basis", "f32", axes)]
    return build_frame(FrameType.SCOPE_BASIS, {"version": version, "layers": layers}, tensors)
