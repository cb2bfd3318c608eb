"""Steps that are assembled: stored with their runs, and shown to pages."""

from collections.abc import Iterator

from megatronapp_analyzer.errors import ProtocolError
from megatronapp_analyzer.scope.delivery.viewer_feed import ViewerFeed
from megatronapp_analyzer.scope.ingest.events import ScopeEvents
from megatronapp_analyzer.scope.ingest.rejected_frames import RejectedFrames
from megatronapp_analyzer.scope.parts.merge import PCA, MergedTensor
from megatronapp_analyzer.scope.parts.step_assembler import ClosedStep
from megatronapp_analyzer.scope.store.pca_versions import PcaVersions
from megatronapp_analyzer.scope.store.publishers import UNKNOWN, PublisherRegistry
from megatronapp_analyzer.scope.store.run import ScopeRun
from megatronapp_analyzer.scope.views import encode
from megatronapp_analyzer.scope.views.encode import AttentionRow
from megatronapp_common.frames import Frame


class StepIngest:
    """Turns a closed step into frames of its run."""

    def __init__(
        self,
        feed: ViewerFeed,
        publishers: PublisherRegistry,
        *,
        pca: PcaVersions,
        rejected: RejectedFrames,
        events: ScopeEvents,
    ) -> None:
        self._feed = feed
        self._publishers = publishers
        self._pca = pca
        self._rejected = rejected
        self._events = events

    def take(self, run: ScopeRun, step: ClosedStep) -> None:
        """Store and show a step, or report it as missing if its tokens were lost. Raises ProtocolError."""
        if step.first < step.step:
            reason = "restart" if run.late else "late"
            self._feed.publish_gap(run, "step", (step.first, step.step - 1), reason)
            self._events.tokens_missing(run)
        if step.tokens is None:
            self._feed.publish_gap(run, "step", (step.step, step.step), "late")
            self._events.tokens_missing(run)
            return
        for what, span, ranks, reason in gaps_of(step, captured=run.captured):
            self._feed.publish_gap(run, what, span, reason, ranks)
        self._take_numbers(run, step, step.tokens)

    def _take_numbers(self, run: ScopeRun, step: ClosedStep, tokens: Frame) -> None:
        layers = self._publishers.model["layers"] if self._publishers.model else None
        tables, rows = self._merge(run, step, layers)
        if step.step == 0:
            overviews = encode.overview_frames(step, tables, layers, run.pca_version)
            self._feed.publish_all(run.journal.append(frame) for frame in overviews)
            for sample, layer, head, position, codes in rows:
                run.attention.put((sample, layer, head), [position], codes.reshape(1, -1).copy())
        frame, too_large = encode.step_frame(step, tokens, tables, run.pca_version)
        self._feed.publish(run.add_step(frame))
        if too_large:
            self._feed.publish_gap(run, "step", (step.step, step.step), "large", tensors=too_large)
        if step.step == 0:
            self._events.prefill_shown(run)
        else:
            self._feed.publish_all(run.add_rows(frame) for frame in encode.rows_frames(step.run, step.step, rows))
        if PCA in tables:
            run.pca_rows.update(tables[PCA].rows)
            self._events.coordinates_shown(run)

    def _merge(
        self, run: ScopeRun, step: ClosedStep, layers: int | None
    ) -> tuple[dict[str, MergedTensor], list[AttentionRow]]:
        """Merge what ranks sent. If it does not fit together return nothing: tokens of the step are shown anyway."""
        newest = self._pca.newest
        if run.pca_version != newest and any(tensor.version == newest for tensor in step.tensors):
            self._events.basis_unknown(run)
        usable = [part for part in step.tensors if part.tensor.name != PCA or part.version == run.pca_version]
        try:
            return encode.tables_of(usable, layers), encode.attention_rows(usable)
        except ProtocolError as error:
            self._rejected.add(error)
            self._feed.publish_gap(run, "step", (step.step, step.step), "late")
            return {}, []


def gaps_of(step: ClosedStep, *, captured: bool) -> Iterator[tuple[str, tuple[int, int], list[int], str]]:
    """Yield what is missing of a step, for GAPs. `captured`: ranks were asked for more than tokens."""
    span = (step.step, step.step)
    if step.dropped:
        yield "ranks", span, list(step.dropped), "slow"
    if captured and (late := set(step.missing) - set(step.dropped)):
        yield "ranks", span, sorted(rank for rank in late if rank != UNKNOWN), "late"
