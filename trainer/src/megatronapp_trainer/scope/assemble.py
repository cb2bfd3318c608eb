"""MegaScope of one rank, whole: watcher, publisher, and the way between them."""

import dataclasses
import pathlib
from collections.abc import Mapping

from megatronapp_common.frames import Frame
from megatronapp_trainer.inference.worker_group import WorkerGroup
from megatronapp_trainer.scope.capture.session import StepCapture
from megatronapp_trainer.scope.transfer.publisher import FrameJob, FramePublisher

SOCKET = "scope.sock"
"""In the folder of the run, where the agent listens."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankScope:
    """What a rank holds until it ends."""

    session: StepCapture
    publisher: FramePublisher

    def close(self) -> None:
        """Look no more, send what can be sent within a second, and end the thread."""
        try:
            self.session.detach()
        finally:
            self.publisher.close()


def open_scope(
    gang: WorkerGroup, run_dir: pathlib.Path, *, attempt: int, limits: Mapping[str, int] | None = None
) -> RankScope:
    """On every rank, before the first step. Nothing is looked at until rank 0 begins a run.

    `limits`: of a run, which rank 0 tells.
    """
    held: list[FramePublisher] = []

    def post(job: FrameJob) -> None:
        held[0].post(job)

    session = StepCapture(gang.stage, attempt=attempt, sink=post)
    hello = session.hello()
    if limits is not None and hello.header["rank"] == 0:
        hello = Frame(hello.type, {**hello.header, "limits": dict(limits)})
    held.append(FramePublisher(run_dir / SOCKET, hello, lull=gang.lull if session.waits_for_device else None))
    session.attach(gang)
    held[0].start()
    return RankScope(session=session, publisher=held[0])
