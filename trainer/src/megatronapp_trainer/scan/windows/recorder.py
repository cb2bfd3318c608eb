"""Spans within passes, at the level of each step."""

import logging

from megatronapp_common.trace import RecordKind
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
    ) -> None:
        """Take the parts that this rank can record.

        Args:
            plan: chooses the level of each step.
            collectives: None on a rank without tensor parallelism.
            layers: None where passes are not those of whole modules (MegaFBD).
            file: gets the steps in windows.
        """
        self.plan = plan
        self._collectives = collectives
        self._layers = layers
        self._file = file
        self._level = TraceLevel.PHASE
        if collectives is not None:
            collectives.install()

    def step_begin(self, step: int) -> None:
        """Install what the level of a step needs, and remove what it does not."""
        level = self.plan.level(step)
        if self._file is not None:
            self._file.step_begin(step, in_window=level > TraceLevel.PHASE)
        if level == self._level:
            return
        if level is TraceLevel.LAYER and self._layers is None:
            log.warning("step %d: spans of layers are not recorded with MegaFBD; collectives are", step)
        self._set_level(level)

    def pass_begin(self, kind: RecordKind, chunk: int, microbatch: int) -> None:
        """Record the parts of a pass from now on."""
        opened = OpenPass(kind, chunk, microbatch)
        if self._collectives is not None:
            self._collectives.pass_begin(opened)
        if self._layers is not None:
            self._layers.pass_begin(opened)

    def pass_end(self) -> None:
        """End the parts of the pass."""
        if self._layers is not None:
            self._layers.pass_end()
        if self._collectives is not None:
            self._collectives.pass_end()

    def close(self) -> None:
        """Remove all hooks and replaced functions."""
        self._set_level(TraceLevel.PHASE)
        if self._collectives is not None:
            self._collectives.remove()
        if self._file is not None:
            self._file.close()

    def _set_level(self, level: TraceLevel) -> None:
        if self._collectives is not None:
            self._collectives.records_all = level >= TraceLevel.COLLECTIVE
        if self._layers is not None and level is TraceLevel.LAYER and not self._layers.is_installed:
            self._layers.install()
        if self._layers is not None and level is not TraceLevel.LAYER:
            self._layers.remove()
        self._level = level
