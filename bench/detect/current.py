"""The analyzer's detector under the protocol of the benchmark; no other module here imports the analyzer."""

from collections.abc import Sequence

from detect.hangs import ProgressReport
from detect.layout import Grid
from detect.protocol import NamedSubject, StepTrace, Verdict
from megatronapp_analyzer.detect.engine import Detector
from megatronapp_analyzer.model import (
    Communicator,
    CurrentSpan,
    JobLayout,
    RankLiveness,
    StepRecords,
    SubjectType,
    VerdictState,
)
from megatronapp_analyzer.model import Verdict as Finding


class CurrentDetector:
    """Today's detector; what it has named stays in the answer until it is cleared."""

    def __init__(self, grid: Grid) -> None:
        layout = JobLayout.grid(
            tp=grid.tp,
            dp=grid.dp,
            pp=grid.pp,
            vpp=grid.vpp,
            ranks_per_worker=grid.ranks_per_worker,
            ranks_per_node=grid.ranks_per_node,
        )
        self._comms = {
            rank: {slot: Communicator(kind, members) for slot, (kind, members) in table.items()}
            for rank, table in grid.comms.items()
        }
        self._detector = Detector(layout)
        self._live: dict[str, Finding] = {}

    def step(self, trace: StepTrace) -> Sequence[Verdict]:
        """Judge a step and return all verdicts that are not over."""
        view = StepRecords(
            attempt=trace.attempt,
            step=trace.step,
            records=trace.records,
            comms=self._comms,
            boot_ids=dict(enumerate(trace.boot_ids)),
            real_time_s=trace.real_time_s,
            lost=trace.lost,
        )
        for finding in self._detector.observe(view):
            self._live.pop(finding.id, None)
            if finding.state in (VerdictState.CONFIRMED, VerdictState.RECOVERING):
                self._live[finding.id] = finding
        return [_verdict(finding) for finding in self._live.values()]

    def progress(self, report: ProgressReport) -> Sequence[Verdict]:
        """Judge which ranks hang; return all verdicts that are not over."""
        now_ns = round(report.real_time_s * 1e9)
        ranks = [
            RankLiveness(
                rank=rank.rank,
                alive=True,
                closed=False,
                heartbeat_ns=now_ns - round(rank.silent_s * 1e9),
                now_ns=now_ns,
                open_span=CurrentSpan(kind=int(rank.span), step=report.step, microbatch=0, start_ns=now_ns),
                process_state="T" if rank.stopped else "S",
                attempt=0,
            )
            for rank in report.ranks
        ]
        for finding in self._detector.observe_liveness(now_ns, ranks):
            self._live.pop(finding.id, None)
            if finding.state is VerdictState.CONFIRMED:
                self._live[finding.id] = finding
        return [_verdict(finding) for finding in self._live.values()]


def _verdict(finding: Finding) -> Verdict:
    is_link = finding.subject.type is SubjectType.LINK
    return Verdict(
        subject=NamedSubject(finding.subject.ranks, is_link=is_link),
        cause=str(finding.cause),
        cost_s=finding.seconds_per_step,
        confidence=finding.confidence,
    )
