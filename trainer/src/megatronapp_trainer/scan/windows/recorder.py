"""Spans within passes, at the level of each step."""

import logging
import time
from collections.abc import Callable

from megatronapp_common.trace import RecordKind
from megatronapp_trainer.scan.windows.budget import WindowBudget
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
        file: RankFile | None = None,
        budget: WindowBudget | None = None,
        now_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """Take the parts that this rank can record.

        Args:
            plan: chooses the level of each step.
            collectives: None on a rank without tensor parallelism.
            layers: None where passes are not those of whole modules (MegaFBD).
            file: gets the steps in windows of the flags.
            budget: limits the windows of the flags.
            now_ns: clock of the budget.
        """
        self.plan = plan
        self.collectives = collectives
        """None on a rank without tensor parallelism."""
        self._layers = layers
        self._file = file
        self._budget = budget
        self._now_ns = now_ns
        self._began_ns: int | None = None
        self._recorded = 0
        self._level = TraceLevel.PHASE
        if collectives is not None:
            collectives.install()

    def step_begin(self, step: int) -> None:
        """Install what the level of a step needs, and remove what it does not."""
        self._count_step()
        level = self.plan.level(step, self._budget)
        if self.collectives is not None:  # without the budget, which differs between the ranks of a group
            self.collectives.observes_all = self.plan.level(step) >= TraceLevel.COLLECTIVE
        if self._file is not None:
            self._file.step_begin(step, in_window=self.plan.is_periodic(step))
        if level == self._level:
            return
        if level is TraceLevel.LAYER and self._layers is None:
            log.warning("step %d: spans of layers are not recorded with MegaFBD; collectives are", step)
        self._set_level(level)

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

    def _count_step(self) -> None:
        """Count the step that has ended in the budget."""
        parts = (self.collectives, self._layers)
        now_ns, recorded = self._now_ns(), sum(part.recorded for part in parts if part is not None)
        if self._budget is not None and self._began_ns is not None:
            self._budget.step_done(now_ns - self._began_ns, recorded - self._recorded)
        self._began_ns, self._recorded = now_ns, recorded

    def _set_level(self, level: TraceLevel) -> None:
        if self.collectives is not None:
            self.collectives.records_all = level >= TraceLevel.COLLECTIVE
        if self._layers is not None and level is TraceLevel.LAYER and not self._layers.is_installed:
            self._layers.install()
        if self._layers is not None and level is not TraceLevel.LAYER:
            self._layers.remove()
        self._level = level
