"""Checkpoints that are written while training continues.

At a step the state is copied, which the next update waits for. Then the ranks' writer processes work in three stages:
one creates the folder, all write their data files, one publishes. A stage begins when the ranks have agreed, at the end
of a step, that the former one has ended everywhere. The agreement is a number in the reduction of the loss: most steps
exchange nothing more.
"""

import contextlib
import enum
import logging
import pickle
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from megatronapp_trainer.checkpoint.saving.device_snapshot import SnapshotMemory
from megatronapp_trainer.checkpoint.saving.files import Publication
from megatronapp_trainer.checkpoint.saving.host_copy import CopyPlace, HostCopies, places_of
from megatronapp_trainer.checkpoint.saving.plans import SharedPlan
from megatronapp_trainer.checkpoint.saving.rank_content import RankContent
from megatronapp_trainer.checkpoint.saving.report import CheckpointReport
from megatronapp_trainer.checkpoint.saving.requests import (
    BeginRequest,
    DiscardRequest,
    PublishRequest,
    Reply,
    Request,
    WriteRequest,
)
from megatronapp_trainer.checkpoint.saving.writer_process import WriterProcess
from megatronapp_trainer.errors import StorageError, SupersededError
from megatronapp_trainer.parallel.agreement import Agreement, gather_from_all, gather_to_zero, rank
from megatronapp_trainer.parallel.worlds import global_rank_of

logger = logging.getLogger(__name__)

PAUSES_S: tuple[float, ...] = (1.0, 10.0, 60.0)
"""Seconds before a failed write is tried again; the last one also before all further tries."""
TRIES_AT_EXIT = 3
"""Failed tries in a row after which the end of a training waits no longer."""
_ROUND_S = 2.0
"""Seconds after which ranks that wait at the end of a training exchange how far they are."""


class SaveStage(enum.Enum):
    """Stage of writing the pending checkpoint."""

    BEGIN = enum.auto()
    WRITE = enum.auto()
    PUBLISH = enum.auto()
    PAUSE = enum.auto()
    """After a failure."""


@dataclass(kw_only=True, slots=True)
class _PendingCheckpoint:
    publication: Publication
    content: RankContent
    began_s: float
    blocked_s: float
    stage: SaveStage = SaveStage.BEGIN
    requested: bool = False
    """True if this rank's request of the stage was sent, or it has none."""
    reply: Reply | None = None
    failed_tries: int = 0
    resumes_s: float = 0.0
    """Time at which a pause ends."""

    @property
    def iteration(self) -> int:
        return self.publication.manifest.iteration


class BackgroundSaves:
    """Writes one checkpoint at a time in the background. All ranks have the same stage at the same step."""

    def __init__(
        self,
        plan: SharedPlan,
        *,
        exit_wait_s: float,
        snapshots: SnapshotMemory | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start the writer process, so that it is ready at the first checkpoint.

        `snapshots`: memory of the device through which copies may pass.
        """
        self._plan = plan
        self._exit_wait_s = exit_wait_s
        self._clock = clock
        self._copies = HostCopies(snapshots)
        self._process = WriterProcess(self._copies.descriptor)
        self._pending: _PendingCheckpoint | None = None
        self._layout: tuple[int, bytes, int] = (-1, b"", 0)
        """Version of the plan, pickle of the items with their places, and bytes of memory."""
        self._whole: tuple[int, bytes] = (-1, b"")
        self.report = CheckpointReport()

    @property
    def writer_pid(self) -> int | None:
        """Return the number of the writer process."""
        return self._process.pid

    @property
    def pending(self) -> int | None:
        """Return the step whose checkpoint is not published yet; equal on all ranks."""
        return None if self._pending is None else self._pending.iteration

    @property
    def is_failing(self) -> bool:
        """Return True while the ranks wait to try again; a newer checkpoint may take the place of this one."""
        return self._pending is not None and self._pending.stage is SaveStage.PAUSE

    def start(self, content: RankContent, publication: Publication, *, began_s: float) -> None:
        """Copy the content, and let it be written; collective. A failing checkpoint is given up.

        Raises:
            StorageError: on every rank, if one has no memory for the copies.
        """
        if self._pending is not None and rank() == 0:
            logger.warning(
                "the checkpoint of step %d was never written; that of step %d takes its place",
                self._pending.iteration,
                publication.manifest.iteration,
            )
        agreement = Agreement()
        with agreement.attempt():
            places = self._reserve(content)
        agreement.settle()  # before the copies, which what the ranks exchange would wait for on a GPU
        self._copies.begin(content.tensors, places)
        blocked_s = self._clock() - began_s
        self._pending = _PendingCheckpoint(
            publication=publication, content=replace(content, tensors=[]), began_s=began_s, blocked_s=blocked_s
        )
        self.report = replace(self.report, pending_iteration=self._pending.iteration)
        self._request()

    def _reserve(self, content: RankContent) -> list[CopyPlace]:
        """Provide memory for the copies; returns where each tensor has its place."""
        places, size_bytes = places_of(content.tensors)
        try:
            self._copies.reserve(size_bytes)
        except OSError as error:
            raise StorageError(
                f"{size_bytes / 2**30:.2f} GiB of host memory, in which --async-save keeps a copy of what this rank "
                f"writes, are not there ({error.strerror}); leave --async-save out, or give the rank more memory"
            ) from error
        if self._layout[0] != self._plan.version:
            self._layout = (self._plan.version, pickle.dumps((content.items, places)), size_bytes)
        return places

    def before_change(self) -> None:
        """Let changes of weights and optimizer wait for the copies."""
        if self._pending is not None:
            began_s = self._clock()
            self._copies.before_change()
            self._pending.blocked_s += self._clock() - began_s

    def busy(self) -> bool:
        """Return True while this rank has work that the pending checkpoint waits for. Never blocks."""
        return self._pending is not None and not self._settled(self._pending, 0.0)

    def _settled(self, pending: _PendingCheckpoint, timeout_s: float) -> bool:
        """Return True if this rank's part of the stage has ended, or ends within a time."""
        if not pending.requested:
            if timeout_s > 0:
                with contextlib.suppress(RuntimeError):  # of a copy, which the request reports
                    self._copies.wait()
            self._request()
        if pending.requested and pending.reply is None:
            pending.reply = self._process.reply(timeout_s)
        if pending.reply is None or pending.stage is not SaveStage.PAUSE:
            return pending.reply is not None
        left_s = pending.resumes_s - self._clock()
        if left_s > 0 and timeout_s > 0:
            time.sleep(min(left_s, timeout_s))
        return self._clock() >= pending.resumes_s

    def _request(self) -> None:
        """Send this rank's request of the stage, if it can be sent already."""
        pending = self._pending
        assert pending is not None
        try:
            request = self._request_of(pending)
        except RuntimeError as error:  # of a copy
            pending.requested, pending.reply = True, Reply(error=f"the state could not be copied: {error}")
            return
        if request is not None:
            self._process.send(request)
            pending.requested = True
        elif rank() != 0 and pending.stage is not SaveStage.WRITE:
            pending.requested, pending.reply = True, Reply()

    def _request_of(self, pending: _PendingCheckpoint) -> Request | None:
        """Return the request, None for ranks that have none, and while the copies are made."""
        if pending.stage is SaveStage.WRITE:
            if not self._copies.done():
                return None
            _, layout, size_bytes = self._layout
            return WriteRequest(
                folder=pending.publication.temporary,
                rank=rank(),
                layout=layout,
                memory_bytes=size_bytes,
                objects=pending.content.objects,
            )
        if pending.stage is SaveStage.BEGIN and rank() == 0:
            return BeginRequest(publication=pending.publication)
        if pending.stage is SaveStage.PAUSE and rank() == 0:
            return DiscardRequest(folder=pending.publication.temporary)
        return None  # the last stage needs the files of all ranks

    def advance(self) -> None:
        """Begin the next stage; collective. Call it where all ranks know that none of them is busy.

        Raises:
            SupersededError: another claim owns the directory.
        """
        began_s = self._clock()
        pending = self._pending
        assert pending is not None
        is_published = self._next_stage(pending)
        pending.blocked_s += self._clock() - began_s
        if is_published:
            self._published(pending)

    def _next_stage(self, pending: _PendingCheckpoint) -> bool:
        """Return True after the last stage."""
        assert pending.reply is not None
        found = gather_from_all((pending.reply.error, pending.reply.is_superseded))
        if pending.stage is SaveStage.PAUSE:
            self._enter(SaveStage.BEGIN)
            return False
        for number, (error, is_superseded) in enumerate(found):
            if error is not None:
                self._fail(number, error, is_superseded=is_superseded)
                return False
        if pending.stage is SaveStage.PUBLISH:
            return True
        if pending.stage is SaveStage.BEGIN:
            self._enter(SaveStage.WRITE)
        elif pending.stage is SaveStage.WRITE:
            files = gather_to_zero(pending.reply.value)
            self._enter(SaveStage.PUBLISH)
            if files is not None:
                self._process.send(
                    PublishRequest(
                        publication=pending.publication,
                        common=pending.content.common,
                        plan=self._pickled_plan(),
                        files=files,
                    )
                )
                pending.requested = True
        return False

    def _pickled_plan(self) -> bytes:
        if self._whole[0] != self._plan.version:
            self._whole = (self._plan.version, pickle.dumps(self._plan.whole))
        return self._whole[1]

    def _enter(self, stage: SaveStage) -> None:
        assert self._pending is not None
        self._pending.stage, self._pending.requested, self._pending.reply = stage, False, None
        self._request()

    def _published(self, pending: _PendingCheckpoint) -> None:
        written_s = self._clock() - pending.began_s
        self._pending = None
        self.report = replace(
            self.report,
            iteration=pending.iteration,
            taken_at=time.time() - written_s,
            pending_iteration=None,
            blocked_s=pending.blocked_s,
            written_s=written_s,
        )
        if rank() == 0:
            logger.info(
                "the checkpoint of step %d is on the disk: training waited %.3f s, writing took %.3f s",
                pending.iteration,
                pending.blocked_s,
                written_s,
            )

    def _fail(self, number: int, text: str, *, is_superseded: bool) -> None:
        """Report a failed stage, and pause before all of the checkpoint is written again."""
        pending = self._pending
        assert pending is not None
        if is_superseded:
            raise SupersededError(text)
        reason = f"rank {global_rank_of(number)}: {text}"
        pause_s = PAUSES_S[min(pending.failed_tries, len(PAUSES_S) - 1)]
        pending.failed_tries += 1
        pending.resumes_s = self._clock() + pause_s
        self._enter(SaveStage.PAUSE)
        self.report = replace(self.report, failures=self.report.failures + 1, last_failure=reason)
        if rank() == 0:
            logger.warning(
                "the checkpoint of step %d could not be written (%s); training continues, and it is tried again in "
                "%.0f s from its copy in memory. Earlier checkpoints are unchanged",
                pending.iteration,
                reason,
                pause_s,
            )

    def finish(self, *, raises: bool = True) -> None:
        """Wait until the pending checkpoint is published, within a bound; collective.

        Raises:
            StorageError: on every rank, if it is not published in time, or its writing fails again and again.
            SupersededError: another claim owns the directory.
        """
        if self._pending is None:
            return
        if rank() == 0:
            print(
                f"waiting for the checkpoint of step {self._pending.iteration} to be written, for at most "
                f"{self._exit_wait_s:.0f} s",
                flush=True,
            )
        deadline_s = self._clock() + self._exit_wait_s
        while self._pending is not None:
            pending = self._pending
            settled = self._settled(pending, _ROUND_S)
            everyone = gather_from_all((settled, self._clock() >= deadline_s))
            if all(ready for ready, _ in everyone):
                self.advance()
            elif any(late for _, late in everyone):
                self._give_up(f"was not written within {self._exit_wait_s:.0f} s", raises=raises)
            if self._pending is not None and self._pending.failed_tries >= TRIES_AT_EXIT and self.is_failing:
                self._settled(self._pending, _ROUND_S)  # what was written of it is removed
                self._give_up(f"could not be written: {self.report.last_failure}", raises=raises)

    def _give_up(self, problem: str, *, raises: bool) -> None:
        assert self._pending is not None
        text = f"the checkpoint of step {self._pending.iteration} {problem}. Earlier checkpoints are unchanged"
        self._pending = None
        self._process.interrupt()
        self.report = replace(self.report, pending_iteration=None)
        if raises:
            raise StorageError(text)
        if rank() == 0:
            logger.warning(text)

    def close(self) -> None:
        """End the writer process; a checkpoint that is not published is left to the next attempt to remove."""
        with contextlib.suppress(RuntimeError):  # of a copy: what ends the training is the error to report
            self._copies.wait()
        self._process.close()
        self._copies.close()
