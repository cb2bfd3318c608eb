"""Captured steps of a training: hooks for the step, one copy to the host, one frame to the agent."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from megatronapp_common.frames import Frame, FrameType
from megatronapp_common.scope.layer_statistics import PERTURBATION, REPEATED, SiteLayer, statistics_frame
from megatronapp_trainer.scope.statistics.accumulator import StatisticsAccumulator
from megatronapp_trainer.scope.statistics.parameters import LayerParameters
from megatronapp_trainer.scope.statistics.site_hooks import SiteHooks
from megatronapp_trainer.scope.transfer.copied_job import CopiedJob
from megatronapp_trainer.scope.transfer.device_copy import BufferLayout, DeviceToHostCopier, PackedBuffer, PendingCopy
from megatronapp_trainer.scope.transfer.publisher import DropPolicy, FrameJob


class StatisticsJob(CopiedJob):
    """Statistics of a step on their way to the agent."""

    def __init__(self, header: dict[str, Any], rows: Sequence[SiteLayer], copy: PendingCopy) -> None:
        super().__init__(copy)
        self._header = header
        self._rows = rows

    @property
    def kind(self) -> DropPolicy:
        """Return the policy: it waits for an agent that is slow or has no connection."""
        return DropPolicy.PROMPTS

    def split(self) -> Sequence[FrameJob]:
        """Return this job: a step is whole or dropped."""
        return [self]

    def build(self) -> Sequence[Frame]:
        """Return the frame of the step with all rows."""
        return [statistics_frame(FrameType.TRAINING_STATISTICS, self._header, self._rows, self._copy.data.tobytes())]

    def marks(self) -> Sequence[Frame]:
        """Return a frame without rows, so that the hub knows that the rank was there."""
        return [statistics_frame(FrameType.TRAINING_STATISTICS, {**self._header, "dropped": True}, (), b"")]


class LayerCapture:
    """`ConnectedCapture` of a rank: statistics of its sites and of its weights."""

    def __init__(
        self,
        header: dict[str, Any],
        sink: Callable[[FrameJob], None],
        device: torch.device,
        *,
        sites: SiteHooks | None,
        parameters: LayerParameters | None,
        end: Callable[[], None] = lambda: None,
    ) -> None:
        """Take the parts of a rank.

        Args:
            header: of its frames.
            sink: takes the statistics of a step.
            device: of the model.
            sites: of a rank that runs forward passes.
            parameters: of a rank that runs backward passes.
            end: called by `close`.
        """
        self._header = header
        self._sink = sink
        self._device = device
        self._copier = DeviceToHostCopier(device)
        self._sites = sites
        self._parameters = parameters
        self._end = end
        self._step_header: dict[str, Any] = {}
        self._statistics: StatisticsAccumulator | None = None

    def install(self, step: int, perturbation: str | None, *, is_repeated: bool = False) -> None:
        """Install the hooks of a step.

        `perturbation`: digest of the recipe that is in force in it. `is_repeated`: it has been computed before.
        """
        self._step_header = {**self._header, "step": step}
        if perturbation is not None:
            self._step_header[PERTURBATION] = perturbation
        if is_repeated:
            self._step_header[REPEATED] = True
        rows = [] if self._sites is None else self._sites.rows
        rows += [] if self._parameters is None else self._parameters.rows
        self._statistics = StatisticsAccumulator(rows, self._device)
        if self._sites is not None:
            self._sites.install(self._statistics)

    def remove(self) -> None:
        """Remove the hooks, and count weights and gradients."""
        assert self._statistics is not None
        if self._sites is not None:
            self._sites.remove()
        if self._parameters is not None:
            self._parameters.add_to(self._statistics)

    def send(self, optimizer: Any | None) -> None:  # noqa: ANN401 - MegatronOptimizer
        """Send the statistics of the step, with its updates where `optimizer` has done them."""
        statistics, self._statistics = self._statistics, None
        assert statistics is not None
        if self._parameters is not None and optimizer is not None:
            self._parameters.add_updates(statistics, optimizer)
        self._copier.before_prompts()  # the copies of earlier steps, which are long done
        layout = BufferLayout(found=(), shapes=(), dtypes=())
        copy = self._copier.send_step(
            lambda: PackedBuffer(layout=layout, flat=statistics.packed()), statistics, self._copier.now()
        )
        self._sink(StatisticsJob(self._step_header, statistics.rows, copy))

    def post(self, job: FrameJob) -> None:
        """Send further frames of a step."""
        self._sink(job)

    def close(self) -> None:
        """Send what is left, and end."""
        if self._sites is not None:
            self._sites.remove()
        self._end()
