"""States of runs as rank 0 reports them; the end of a run waits for its last steps."""

from megatronapp_analyzer.scope.delivery.viewer_feed import ViewerFeed
from megatronapp_analyzer.scope.ingest.events import ScopeEvents
from megatronapp_analyzer.scope.ingest.rejected_frames import RejectedFrames
from megatronapp_analyzer.scope.parts.step_assembler import ScopeStepAssembler
from megatronapp_analyzer.scope.parts.wire_models import RunHeader, read
from megatronapp_analyzer.scope.store.run import lost_run
from megatronapp_analyzer.scope.store.run_store import RunStore
from megatronapp_common.frames import Frame
from megatronapp_common.scope.protocol import ENDED_STATES


class RunStateIngest:
    """Takes RUN_STATE frames. Agents send each newest one again when they reconnect."""

    def __init__(
        self,
        runs: RunStore,
        feed: ViewerFeed,
        *,
        assembler: ScopeStepAssembler,
        rejected: RejectedFrames,
        events: ScopeEvents,
    ) -> None:
        self._runs = runs
        self._feed = feed
        self._assembler = assembler
        self._rejected = rejected
        self._events = events
        self._ends: dict[str, Frame] = {}
        """Final states of runs whose last steps are still being assembled."""

    def take(self, frame: Frame) -> None:
        """Change the state of a run; an end waits until the last steps have been shown. Raises ProtocolError."""
        header = read(RunHeader, "RUN_STATE", frame.header)
        if self._is_known(header):
            return
        ended = header.state in ENDED_STATES
        late = header.run not in self._runs and header.state not in {"queued", "prefill"}
        if ended:
            self._assembler.end(header.run)
        else:
            self._assembler.reopen(header.run)
            self._ends.pop(header.run, None)
        if ended and self._assembler.waits(header.run):
            self._ends[header.run] = frame
            return
        run, entry, removed = self._runs.set_state(frame.header)
        for name in removed:
            self._assembler.forget(name)
            self._ends.pop(name, None)
        self._feed.publish(entry)
        run.late |= late or (ended and (header.steps or 0) > run.steps)
        if run.late:
            self._events.tokens_missing(run)
        if ended:
            self._events.coordinates_shown(run)

    def _is_known(self, header: RunHeader) -> bool:
        """Return whether nothing is new: the run has this state, or has ended and was removed."""
        run = self._runs.get(header.run)
        if run is None:
            return header.state in ENDED_STATES and self._runs.was_removed(header.run)
        known = run.is_current_state(header)
        if known and run.late:
            self._events.tokens_missing(run)
        return known

    def take_ends(self) -> None:
        """End runs whose last steps have been shown."""
        for run in [run for run in self._ends if not self._assembler.waits(run)]:
            with self._rejected.counted():
                self.take(self._ends.pop(run))

    def fail_open(self) -> None:
        """Fail all runs whose end is not known: rank 0 was lost and will not report it."""
        for run in [run for run in self._runs.values() if not run.ended and run.id not in self._ends]:
            with self._rejected.counted():
                self.take(lost_run(run.header))
