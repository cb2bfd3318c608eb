"""Findings as verdicts: confidence, evidence as text, sentence."""

import math

from megatronapp_analyzer.detect.causes.compute_cause import PassParts, typical_parts
from megatronapp_analyzer.detect.findings.lifecycle import FindingTrack
from megatronapp_analyzer.detect.findings.sentences import sentence
from megatronapp_analyzer.detect.findings.span_reasons import reason_lines, reason_of
from megatronapp_analyzer.detect.kernel_launch_delays import LEAST_RATIO
from megatronapp_analyzer.detect.statistics.persistence import confidence
from megatronapp_analyzer.graph.waits import Waits
from megatronapp_analyzer.model import LINK_CAUSES, Cause, JobLayout, Reason, SubjectType, Verdict

PEERS_ONLY_CAP = 0.95
"""Confidence of a finding that rests on peers alone."""
MEASURED_CAP = 0.99
"""Confidence of any finding: wrong ones are rarer in the benchmark (docs/benchmarks.md), but not proved to be."""
UNDETERMINED_CAP = 0.6
"""Confidence of a finding whose cause is left open."""
SHOWN_WAITERS = 4
_LAUNCHES = "time between spans and in late launches per microbatch"
_OFF_CPU = "time per microbatch in which its process was stopped, collected garbage or waited for a processor"
_WHAT = {
    Cause.COMPUTE: "compute per microbatch, without run-queue delay",
    Cause.HOST: "time between spans per microbatch, without run-queue delay",
    Cause.DATA: "wait for data per microbatch, without run-queue delay",
    Cause.DATA_IMBALANCE: "compute per microbatch for its tokens",
    Cause.REGRESSION: "compute of all ranks per microbatch, without run-queue delay",
    Cause.LINK: "delivery per message, after both sides were ready and without run-queue delay",
    Cause.NODE_LINK: "delivery per message, after both sides were ready and without run-queue delay",
    Cause.UNDETERMINED: "compute per microbatch, without run-queue delay",
}
_GROUP = "gradient reduction and parameter gathering per step, after the last rank had begun"
LEAST_GROWTH = 0.05
"""Least growth of a part, in logarithms, that the evidence mentions."""


def evidence_text(track: FindingTrack, waits: Waits) -> tuple[str, ...]:
    """Describe the evidence for the finding."""
    candidate = track.candidate
    basis = "own healthy history" if candidate.by_history else "ranks that do the same work"
    if candidate.cause is Cause.UNDETERMINED:
        basis = "the other stages"
    late = track.late_ratio > LEAST_RATIO
    what = _LAUNCHES if late else _OFF_CPU if track.not_running else _WHAT[candidate.cause]
    if candidate.subject.type is SubjectType.GROUP:
        what, basis = _GROUP, basis if candidate.by_history else "groups that do the same work"
    lines = [
        f"{what}: {track.occurrence_s * 1e3:.1f} ms more than expected from {basis}",
        f"over its limit in {track.hits} of {track.steps_seen} steps since it was suspected",
    ]
    if late:
        grown = f"its device spans were {track.late_ratio:.1f} times as long"
        lines.append(f"{grown}: kernels were launched late; the cost includes it")
    lines += reason_lines(track)
    lines += candidate.details
    lines += _part_lines(typical_parts(track.parts), track.ratio)
    if candidate.cause in LINK_CAUSES:
        return tuple(lines)
    imposed = list(waits.imposed_by(candidate.subject.ranks).items())[:SHOWN_WAITERS]
    if imposed:
        told = ", ".join(f"rank {rank} {seconds:.3f} s" for rank, seconds in imposed)
        lines.append(f"in the last of these steps others waited for it: {told}")
    return tuple(lines)


def _part_lines(parts: PassParts, ratio: float) -> list[str]:
    """Describe which parts of the work have grown with slow passes, or have not."""
    passes = f"its passes {ratio:.2f} times"
    lines = []
    if not math.isnan(parts.optimizer):
        times = math.exp(parts.optimizer)
        lines.append(f"its optimizer, which waits for memory alone, took {times:.2f} times as long as usual, {passes}")
    if not math.isnan(parts.layers):
        times = math.exp(parts.layers)
        lines.append(f"in steps with details its norms, which wait for memory, grew {times:.2f} times as much as MLPs")
    if parts.transfers > LEAST_GROWTH:
        times = math.exp(parts.transfers)
        lines.append(f"collectives inside its passes took {times:.2f} times as long to transfer as usual, {passes}")
    return lines


def verdict_of(track: FindingTrack, layout: JobLayout, columns: int) -> Verdict:
    """Build the verdict for a track."""
    candidate, reason = track.candidate, reason_of(track)
    sure = min(confidence(track.hits, track.steps_seen - track.steps_paused, columns), MEASURED_CAP)
    if candidate.cause is Cause.UNDETERMINED:
        sure = min(sure, UNDETERMINED_CAP)
    elif not candidate.by_history:
        sure = min(sure, PEERS_ONLY_CAP)
    return Verdict(
        id=track.id,
        subject=track.subject,
        cause=track.cause,
        state=track.state,
        seconds_per_step=track.seconds_per_step,
        seconds_lost=track.seconds_lost,
        slowdown=track.ratio,
        confidence=sure,
        evidence_steps=tuple(track.evidence),
        evidence_text=track.text,
        since=track.since,
        until=track.until,
        reason=reason,
        sentence=sentence(
            track.subject,
            track.cause,
            track.state,
            layout,
            launches_late=track.launches_late,
            not_running=track.not_running,
            collects_garbage=reason is Reason.GARBAGE_COLLECTION,
            sends=candidate.sends,
            receives=candidate.receives,
            ratio=track.ratio,
            excess_s=track.occurrence_s,
            lost_s=track.seconds_per_step,
            since=track.since.step,
        ),
    )
