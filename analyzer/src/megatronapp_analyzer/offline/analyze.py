"""The detector over recorded steps, as a hub runs it while a job trains."""

import dataclasses
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

from megatronapp_analyzer.detect.engine import Detector
from megatronapp_analyzer.errors import ImportTraceError
from megatronapp_analyzer.hub.ingest.ingest import AttemptState, TraceIngest
from megatronapp_analyzer.hub.ingest.ring_metadata import build_layout
from megatronapp_analyzer.hub.state.verdict_reasons import VerdictReasons
from megatronapp_analyzer.hub.state.verdicts import VerdictStore
from megatronapp_analyzer.model import JobLayout, VerdictState
from megatronapp_analyzer.offline.read import read_traces
from megatronapp_analyzer.offline.stored import find_stored, ingest_of, stored_traces


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Analysis:
    """Verdicts of recorded steps."""

    source: str
    ranks: int
    steps: int
    verdicts: Sequence[dict[str, Any]]
    """Newest first, in the form of the contract, without mere suspicions."""
    notes: Sequence[str]

    def document(self) -> dict[str, Any]:
        """Return the analysis as a JSON object."""
        return {
            "source": self.source,
            "ranks": self.ranks,
            "steps": self.steps,
            "verdicts": list(self.verdicts),
            "notes": list(self.notes),
        }


def open_traces(path: pathlib.Path, *, except_for: pathlib.Path | None = None) -> tuple[TraceIngest, Sequence[str]]:
    """Return the steps at a path, those that a hub stored or of another tool, and notes.

    There is at least one step. The file `except_for` is skipped. Raises ImportTraceError.
    """
    stored = find_stored(path)
    notes: Sequence[str] = []
    if stored is None:
        job = read_traces([path], except_for=except_for)
        ingest, notes = ingest_of(job), job.notes
    else:
        ingest = stored_traces(stored)
        notes = _notes(ingest)
    if not ingest.store.full_steps:
        raise ImportTraceError(f"{path} has traces without a whole step; give another file or folder")
    return ingest, notes


def _notes(ingest: TraceIngest) -> Sequence[str]:
    """Return a note if steps that ended are not stored, or are more than fit into memory."""
    ended, read = sum(1 for _ in ingest.store.digests(None, None)), ingest.store.full_steps
    if ended <= read:
        return []
    return [f"read are the spans of the newest {read} steps of {ended}: those before are not stored, or too large"]


def analyze_path(path: pathlib.Path) -> Analysis:
    """Analyse the traces at a path. Raises ImportTraceError."""
    ingest, notes = open_traces(path)
    return analyze(ingest, source=str(path), notes=notes)


def analyze(ingest: TraceIngest, *, source: str, notes: Sequence[str]) -> Analysis:
    """Judge all stored steps in order.

    Raises ImportTraceError if there are none, and if the places of their ranks are not known.
    """
    steps = sorted(ingest.store.select(0, None, newest=0), key=lambda step: step.key)
    verdicts = VerdictStore(None)
    verdicts.explain = VerdictReasons(ingest).explain
    detector: Detector | None = None
    layout: JobLayout | None = None
    for step in steps:
        of_step = _layout(ingest.attempts[step.view.attempt], source)
        if detector is None or of_step != layout:
            if detector is not None:
                verdicts.clear_all(step.view.real_time_s)
            detector, layout = Detector(of_step), of_step
        verdicts.update(detector.observe(step.view))
    if layout is None:
        raise ImportTraceError(f"{source} has no whole step; give another file or folder")
    return Analysis(
        source=source,
        ranks=layout.world,
        steps=len(steps),
        verdicts=[verdict for verdict in verdicts.all() if verdict["state"] != VerdictState.SUSPECT],
        notes=notes,
    )


def _layout(attempt: AttemptState, source: str) -> JobLayout:
    layout = attempt.layout or build_layout(attempt.rings, partial=True)
    if layout is None:
        raise ImportTraceError(
            f"{source}: {len(attempt.rings)} of {attempt.world} ranks are recorded, in an order that does not give the "
            "places of the others; give the traces of all ranks"
        )
    return layout


def text_lines(analysis: Analysis) -> Iterator[str]:
    """Yield the analysis in lines."""
    yield f"{analysis.source}: {analysis.steps} steps of {analysis.ranks} ranks"
    for note in analysis.notes:
        yield f"  note: {note}"
    if not analysis.verdicts:
        yield "nothing is slow, as far as these steps show"
    for verdict in reversed(analysis.verdicts):
        since, until = verdict["since"]["step"], verdict["until"]
        yield ""
        yield verdict["sentence"]
        cost_ms, lost_s = 1000 * verdict["effect"]["secondsPerStep"], verdict["effect"]["secondsLost"]
        period = f"since step {since}" if until is None else f"steps {since} to {until['step']}"
        cost = f"{cost_ms:.1f} ms a step, {lost_s:.3f} s in all"
        reason = f" ({verdict['reason']})" if verdict["reason"] else ""
        yield f"  cause {verdict['cause']}{reason}, {period}, {cost}, confidence {verdict['confidence']:.2f}"
        for text in verdict["evidence"]["text"]:
            yield f"  - {text}"
