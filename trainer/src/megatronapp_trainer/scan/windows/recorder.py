"""Spans within passes, at the level of each step."""

import logging
import time
from collections.abc import Callable, Sequence

from megatronapp_common.trace import RecordKind
from megatronapp_trainer.scan.windows.agreement import LevelAgreement
from megatronapp_trainer.scan.windows.budget import TracingCost, WindowBudget
from megatronapp_trainer.scan.windows.layer_spans import LayerSpans
from megatronapp_trainer.scan.windows.open_pass import OpenPass
from megatronapp_trainer.scan.windows.plan import TraceLevel, WindowPlan
from megatronapp_trainer.scan.windows.rank_file import RankFile
from megatronapp_trainer.scan.windows.tensor_collectives import TensorCollectives

log = logging.getLogger(__name__)


class WindowRecorder:
    """Records parts of passes of a rank while its windows are on."""

    def __init__(
        self,
        plan: WindowPlan,
        *,
        collectives: TensorCollectives | None,
        layers: LayerSpans | None,
        agreement: LevelAgreement | None = None,
        file: RankFile | None = None,
        budget: WindowBudget | None = None,
        cost: TracingCost | None = None,
        now_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """Take the parts that this rank can record.

        Args:
            plan: chooses the level of each step.
            collectives: None on a rank without tensor parallelism.
            layers: None where passes are not those of whole modules (MegaFBD).
            agreement: gives the windows of the control page; None where no pass is replayed (MegaFBD): each rank then
                records those that it knows.
            file: gets the steps in windows of the flags.
            budget: limits the windows of the flags, unless there is a file, and those of the control page.
            cost: watches what all records cost.
            now_ns: clock of the budget.
        """
        self.plan = plan
        self.collectives = collectives
        """None on a rank without tensor parallelism."""
        self._layers = layers
        self._agreement = agreement
        self._file = file
        self._budget = budget
        self._cost = cost
        self._now_ns = now_ns
        self._began_ns: int | None = None
        self._recorded = 0
        self._level = TraceLevel.PHASE
        self._step = 0
        self._is_covered = self._is_covered_anywhere = False
        self._follows_others = False
        if collectives is not None:
            collectives.install()

    def step_begin(self, step: int) -> None:
        """Install what the level of a step needs, and remove what it does not."""
        self._count_step(step)
        self._step = step
        commanded = self._commanded_level(step)
        self._stop_costly(step)
        level = max(commanded, self._possible(self.plan.periodic_level(step, self._limit_of_flags(step))))
        periodic = self._possible(self.plan.periodic_level(step))
        covers = max(commanded, periodic) > TraceLevel.PHASE  # without the budget, which differs between ranks
        self._is_covered = covers if self.collectives is not None else level > TraceLevel.PHASE
        self._is_covered_anywhere = covers or (self._agreement is not None and self._agreement.is_anywhere(step))
        if self._file is not None:
            self._file.step_begin(step, in_window=self.plan.is_periodic(step))
        if level == self._level:
            return
        if level is TraceLevel.LAYER and self._layers is None:
            log.warning("step %d: spans of layers are not recorded with MegaFBD; collectives are", step)
        self._set_level(level)

    def is_covered(self, *, anywhere: bool) -> bool:
        """Return True if a window covers the step on this rank's tensor group, or with `anywhere` on some group."""
        return self._is_covered_anywhere if anywhere else self._is_covered

    def announcement(self) -> Sequence[float]:
        """Return what this rank announces in this step about the next one, to add up over all ranks."""
        if self._agreement is None:
            return ()
        return self._agreement.announcement(self._requested_level(self._step + 1))

    def agreed(self, sums: Sequence[float]) -> None:
        """Take the sums of what all ranks announced in this step."""
        if self._agreement is not None:
            self._agreement.take(self._step + 1, sums)

    def pass_begin(self, kind: RecordKind, chunk: int, microbatch: int) -> None:
        """Record the parts of a pass from now on."""
        opened = OpenPass(kind, chunk, microbatch)
        if self.collectives is not None:
            self.collectives.pass_begin(opened)
        if self._layers is not None:
            self._layers.pass_begin(opened)

    def pass_end(self) -> None:
        """End the parts of the pass."""
        if self._layers is not None:
            self._layers.pass_end()
        if self.collectives is not None:
            self.collectives.pass_end()

    def close(self) -> None:
        """Remove all hooks and replaced functions."""
        self._set_level(TraceLevel.PHASE)
        if self.collectives is not None:
            self.collectives.remove()
        if self._file is not None:
            self._file.close()

    def _commanded_level(self, step: int) -> TraceLevel:
        """Return the level of windows of the control page in a step, and log if it is not that of this rank's page."""
        known = self._requested_level(step)
        if self._agreement is None:
            return known
        agreed = self._agreement.level(step)
        if agreed < known:
            continues = self._requested_level(step + 1) > TraceLevel.PHASE
            log.warning(
                "step %d: its window was known too late for the tensor group to agree on it; %s",
                step,
                "the group records it from the next step on" if continues else "this step is not recorded in detail",
            )
        if agreed > known and not self._follows_others and not self.plan.has_stopped(step):
            log.info("step %d: recorded in a window that only other ranks of the tensor group know", step)
        self._follows_others = agreed > known
        return agreed

    def _requested_level(self, step: int) -> TraceLevel:
        """Return the level that this rank's page requests for a step."""
        return self._possible(self.plan.commanded_level(step))

    def _possible(self, level: TraceLevel) -> TraceLevel:
        """Return the level, but PHASE in place of COLLECTIVE on a rank that has no collectives in its passes."""
        return TraceLevel.PHASE if level is TraceLevel.COLLECTIVE and self.collectives is None else level

    def _stop_costly(self, step: int) -> None:
        """End the ordered windows after a step, once they have cost too much."""
        if self._budget is None or self._budget.allows_ordered() or not self.plan.stop(step + 1):
            return
        log.warning(
            "step %d: the ordered window stopped before this step: tracing used %.2g %% of the last step in a window, "
            "and --trace-budget %.2g is spent; order fewer steps at a time, or --granularity base",
            step + 1,
            100 * self._budget.used_in_window,
            100 * self._budget.limit,
        )

    def _limit_of_flags(self, step: int) -> WindowBudget | None:
        """Return the budget of the windows of the flags; none with files, which have the same steps on all ranks."""
        if self._file is None:
            return self._budget
        if self._budget is not None:
            self._budget.watch_files(step)
        return None

    def _count_step(self, step: int) -> None:
        """Count the step that has ended before `step` in the budget."""
        parts = (self.collectives, self._layers)
        now_ns, recorded = self._now_ns(), sum(part.recorded for part in parts if part is not None)
        if self._began_ns is not None:
            if self._budget is not None:
                in_window = self._level > TraceLevel.PHASE
                self._budget.step_done(now_ns - self._began_ns, recorded - self._recorded, in_window=in_window)
            if self._cost is not None:
                self._cost.step_done(step, now_ns - self._began_ns)
        self._began_ns, self._recorded = now_ns, recorded

    def _set_level(self, level: TraceLevel) -> None:
        if self.collectives is not None:
            self.collectives.records_all = level >= TraceLevel.COLLECTIVE
        if self._layers is not None and level is TraceLevel.LAYER and not self._layers.is_installed:
            self._layers.install()
        if self._layers is not None and level is not TraceLevel.LAYER:
            self._layers.remove()
        self._level = level
