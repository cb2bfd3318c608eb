"""Reports of agents on the ranks of the newest attempt, and the states that follow from them."""

import time

from megatronapp_analyzer.hub.ingest.ingest import TraceIngest
from megatronapp_analyzer.hub.judge.judging import LivenessReport
from megatronapp_analyzer.hub.state import ranks
from megatronapp_analyzer.hub.state.progress import ForwardBackward, PipelinePlan, Progress
from megatronapp_analyzer.hub.state.verdicts import VerdictStore


class RankMonitor:
    """Newest statuses of ranks and the newest progress document. `ended`: the job has, with all its ranks."""

    def __init__(self, ingest: TraceIngest, verdicts: VerdictStore, *, ended: bool, progress: Progress | None) -> None:
        self._ingest = ingest
        self._verdicts = verdicts
        self._ended = ended
        self.statuses: dict[int, ranks.RankStatus] = {}
        self.progress = progress

    def reset(self) -> None:
        """Forget the ranks of an older attempt."""
        self.statuses, self.progress = {}, None

    def update(self, status: ranks.AgentStatus) -> None:
        """Add the report of one agent. Raises pydantic's ValidationError, after the statuses, for a wrong progress."""
        self.statuses |= {entry.liveness.rank: entry for entry in status.ranks}
        if status.progress is not None:
            self.progress = Progress.model_validate(status.progress)

    def states(self) -> dict[int, ranks.RankState]:
        """Return the state of every rank of the newest attempt."""
        newest = self._ingest.newest
        if self._ended:
            return dict.fromkeys(sorted(newest.rings if newest else ()), ranks.RankState.ENDED)
        hung, now_ns = self._verdicts.hung_ranks(), time.monotonic_ns()
        quiet = self._job_state() in ranks.PAUSES or self._ingest.newest_step() is None
        usual = None if quiet else self._ingest.usual_step_s()
        return {
            rank: ranks.rank_state(self.statuses.get(rank), now_ns=now_ns, usual_step_s=usual, hung=hung)
            for rank in sorted(newest.rings if newest else ())
        }

    def plans(self) -> list[PipelinePlan]:
        """Return the plans of MegaDPP that the newest attempt has published, oldest first."""
        newest = self._ingest.newest
        if self.progress is None or newest is None or self.progress.attempt != newest.attempt:
            return []
        return sorted(self.progress.plans, key=lambda plan: plan.from_step)

    def forward_backward(self) -> ForwardBackward | None:
        """Return the state of MegaFBD that the newest attempt has published."""
        newest = self._ingest.newest
        if self.progress is None or newest is None or self.progress.attempt != newest.attempt:
            return None
        return self.progress.forward_backward

    def live(self) -> set[int]:
        """Return the ranks that have not ended."""
        return {rank for rank, state in self.states().items() if state != ranks.RankState.ENDED}

    def liveness(self) -> LivenessReport | None:
        """Return what the detector judges between steps; None before the layout is known."""
        newest = self._ingest.newest
        if newest is None or newest.layout is None:
            return None
        fresh = ranks.in_pause(ranks.fresh(self.statuses, time.monotonic_ns()), self._job_state())
        return LivenessReport(layout=newest.layout, now_ns=time.time_ns(), ranks=fresh)

    def _job_state(self) -> str | None:
        return self.progress.state if self.progress else None
