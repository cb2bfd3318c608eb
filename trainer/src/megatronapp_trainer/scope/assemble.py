"""MegaScope of one rank: its capture, its publisher, and the way between them."""

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from megatronapp_common.frames import Frame
from megatronapp_common.scope.protocol import SOCKET
from megatronapp_trainer.inference.worker_group import WorkerGroup
from megatronapp_trainer.scope.analysis.analyzer import RankAnalyzer
from megatronapp_trainer.scope.capture.step_capture import StepCapture
from megatronapp_trainer.scope.comparison.rank_comparer import RankComparer
from megatronapp_trainer.scope.transfer.publisher import FrameJob, FramePublisher


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankScope:
    """The parts of MegaScope that a rank holds until it ends."""

    capture: StepCapture
    publisher: FramePublisher
    analyzer: RankAnalyzer
    comparer: RankComparer

    def close(self) -> None:
        """Remove all hooks, send what can be sent within a second, and end the thread."""
        try:
            self.capture.detach()
        finally:
            self.publisher.close()


def open_scope(
    group: WorkerGroup,
    run_dir: pathlib.Path,
    *,
    attempt: int,
    limits: Mapping[str, int] | None = None,
    perturbations: Sequence[Mapping[str, Any]] = (),
) -> RankScope:
    """Open MegaScope on every rank, before the first step. Nothing is captured until rank 0 begins a run.

    `limits`: limits of a run, `perturbations`: recipes that requests can name; rank 0 publishes both.
    """
    publishers: list[FramePublisher] = []

    def post(job: FrameJob) -> None:
        publishers[0].post(job)

    capture = StepCapture(group.runner, attempt=attempt, sink=post)
    hello = capture.hello()
    if limits is not None and hello.header["rank"] == 0:
        hello = Frame(hello.type, {**hello.header, "limits": dict(limits), "perturbations": list(perturbations)})
    window = group.idle_window if capture.waits_for_device else None
    publishers.append(FramePublisher(run_dir / SOCKET, hello, idle_window=window))
    capture.attach(group)
    analyzer = RankAnalyzer(group)
    analyzer.attach(group)
    comparer = RankComparer(group)
    comparer.attach(group)
    publishers[0].start()
    return RankScope(capture=capture, publisher=publishers[0], analyzer=analyzer, comparer=comparer)
