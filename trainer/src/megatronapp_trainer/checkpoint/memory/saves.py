"""Saves of the state in memory while training continues.

At a step every rank copies its state into a file of its worker, as the background saver does: the next update waits for
the copy. A thread then computes the checksum, gives the file its name, and exchanges it with the ranks that store
copies of each other's state. A rank has two files for its own state, and two for each that it stores a copy of: one is
written while the other stays whole, until all ranks have agreed, at the next save, that theirs are complete.
"""

import contextlib
import logging
import secrets
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from megatronapp_trainer.checkpoint.memory.exchange import Group, exchange
from megatronapp_trainer.checkpoint.memory.live_state import payload_bytes, read_live_state
from megatronapp_trainer.checkpoint.memory.parts import MappedPart, PartHeader
from megatronapp_trainer.checkpoint.memory.place import MemoryPlace, allocated_bytes, free_bytes
from megatronapp_trainer.checkpoint.memory.search import StoredStep
from megatronapp_trainer.checkpoint.memory.selection import copy_holders, describe_ranks
from megatronapp_trainer.checkpoint.memory.slots import SlotPair
from megatronapp_trainer.checkpoint.saving.device_snapshot import SnapshotMemory
from megatronapp_trainer.checkpoint.saving.host_copy import TensorCopy, begin_copy, places_of, tensor_at
from megatronapp_trainer.checkpoint.saving.report import MemoryReport
from megatronapp_trainer.checkpoint.train_state import TrainState
from megatronapp_trainer.errors import StorageError, TrainerError, UsageError
from megatronapp_trainer.parallel.agreement import Agreement, broadcast_from_zero, gather_from_all, on_all_ranks
from megatronapp_trainer.utils.byte_sizes import bytes_text

logger = logging.getLogger(__name__)

OBJECTS_BYTES = 1 << 20
"""Least space for what is no tensor: random states, rates, counts, and the places of readers of a stream."""
_OBJECTS_FRACTION = 64
"""The space is at least the tensors' divided by this: large trainings read streams with many readers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CopyRule:
    """Number of places of a rank's state, and the distance between them in ranks."""

    jump: int
    factor: int


@dataclass(frozen=True, kw_only=True, slots=True)
class _PreparedSave:
    slot: MappedPart
    pairs: list[tuple[torch.Tensor, torch.Tensor]]
    """Tensors, each with its place in the file."""
    objects: bytes
    header: PartHeader
    """Header without the checksum, which is computed after the copy."""


@dataclass(slots=True)
class _RunningSave:
    step: int
    began_s: float
    blocked_s: float
    copy: TensorCopy
    thread: threading.Thread | None = None
    written_s: float | None = None
    error: BaseException | None = None


class MemorySaves:
    """Saves one step at a time; all ranks begin each together."""

    def __init__(
        self, place: MemoryPlace, rule: CopyRule, flags: str, group: Group, snapshots: SnapshotMemory | None
    ) -> None:
        """Prepare; `flags`: digest of those that the state depends on; `snapshots`: as of `begin_copy`."""
        self._snapshots = snapshots
        self._place = place
        self._rule = rule
        self._flags = flags
        self._group = group
        self._token = broadcast_from_zero(lambda: secrets.token_hex(8))
        self._own: SlotPair | None = None
        self._copies: dict[int, SlotPair] = {}
        """For each rank whose state this one stores a copy of."""
        self._running: _RunningSave | None = None
        self._shortage: type[TrainerError] = UsageError
        self._is_off = False
        self._late: int | None = None
        self.report = MemoryReport()

    @property
    def _holders(self) -> tuple[int, ...]:
        """Return the ranks that store copies of this rank's state."""
        return self._holders_of(self._place.rank)

    def _holders_of(self, rank: int) -> tuple[int, ...]:
        world = len(self._place.workers)
        return copy_holders(rank, world, jump=self._rule.jump, factor=self._rule.factor)

    def reserve(self, state: TrainState, resumed: StoredStep | None) -> None:
        """Take the memory for all saves; files of other steps than the resumed one are deleted. Collective.

        Raises:
            UsageError: on every rank, if a worker has too little of it at the start of a training.
            StorageError: the same where a training is resumed, so that it is tried again.
        """
        place = self._place
        self._shortage = UsageError if state.iteration == 0 else StorageError
        payload = on_all_ranks(lambda: payload_bytes(state))
        capacity = payload + max(OBJECTS_BYTES, payload // _OBJECTS_FRACTION)
        capacities = gather_from_all(capacity)
        stored = [place.rank, *(rank for rank in range(len(capacities)) if place.rank in self._holders_of(rank))]
        pairs = [SlotPair(place, rank, self._capacity_name(rank), capacities[rank], resumed) for rank in stored]
        needed = gather_from_all(sum(pair.needed_bytes for pair in pairs))
        resumed_paths = gather_from_all([pair.resumed_path for pair in pairs])
        names = frozenset(path for rank in place.ranks for path in resumed_paths[rank] if path is not None)
        everything = sum(needed[rank] for rank in place.ranks)
        agreement = Agreement()
        with agreement.attempt():
            if place.is_first:
                place.remove(keep=names)
                self._require_space(everything - allocated_bytes(place), everything)
        agreement.settle()
        with agreement.attempt():
            for pair in pairs:
                self._open(pair, everything)
        agreement.settle()
        self._own, self._copies = pairs[0], {pair.rank: pair for pair in pairs[1:]}
        self.report = MemoryReport(resumed_iteration=None if resumed is None else resumed.step)

    def _capacity_name(self, rank: int) -> str:
        return "own" if rank == self._place.rank else f"copy{self._place.rank}"

    def _require_space(self, missing: int, everything: int) -> None:
        free = free_bytes(self._place.directory)
        if missing > free:
            raise self._too_little(
                everything, f"has {bytes_text(free)} free, and {bytes_text(missing)} more are needed"
            )

    def _too_little(self, everything: int, why: str) -> TrainerError:
        directory, ranks = self._place.directory, self._place.ranks
        return self._shortage(
            f"--non-persistent-save-interval: two saves of the state of {describe_ranks(ranks)}, and of each copy of "
            f"another rank's state, take {bytes_text(everything)} of memory; {directory} {why}. Give it at least "
            f"{bytes_text(everything)} besides what is used (spec.shm.sizeLimit, within the memory limit; or "
            "--non-persistent-local-ckpt-dir), store fewer copies (--replication-factor), or leave the flag "
            "(checkpoint.memorySaveInterval) out"
        )

    def _open(self, pair: SlotPair, everything: int) -> None:
        try:
            pair.open()
        except OSError as error:
            raise self._too_little(everything, f"has less ({error.strerror})") from error

    def start(self, state: TrainState, text_tokens: bytes | None) -> bool:
        """Begin to save this step; collective.

        Returns False if the save before is not complete on some rank, or after a failure, which ends the saves of all
        ranks with a warning: what is whole in memory stays, and training continues.
        """
        began_s = time.monotonic()
        if self._is_off or not self._former_is_complete(state.iteration):
            return False
        prepared: _PreparedSave | None = None
        problem: str | None = None
        try:
            prepared = self._prepare(state, text_tokens)
        except Exception as error:  # the other ranks must not begin either
            problem = f"{type(error).__name__}: {error}"
        if self._is_ended(gather_from_all(problem)):
            return False
        assert prepared is not None, "it is there without a problem"
        running = _RunningSave(state.iteration, began_s, 0.0, begin_copy(prepared.pairs, self._snapshots))
        running.thread = threading.Thread(target=self._run, args=(running, prepared), name="memory-save", daemon=True)
        running.thread.start()
        running.blocked_s = time.monotonic() - began_s
        self._running = running
        return True

    def _prepare(self, state: TrainState, text_tokens: bytes | None) -> _PreparedSave:
        """Collect the state, and free the file of the older save. Raises OSError or StorageError."""
        own = self._own
        assert own is not None, "reserve is called first"
        live = read_live_state(state, text_tokens)
        places, used = places_of(live.tensors)
        if used + len(live.objects) > own.capacity:
            raise StorageError(
                f"{len(live.objects)} bytes of random states and readers do not fit the {own.capacity - used} bytes "
                "that checkpoints in memory have for them"
            )
        slot = own.next()
        for pair in self._copies.values():
            pair.next()
        return _PreparedSave(
            slot=slot,
            pairs=[(tensor, tensor_at(slot.content, at)) for tensor, at in zip(live.tensors, places, strict=True)],
            objects=live.objects,
            header=PartHeader(
                step=state.iteration,
                save=self._token,
                rank=self._place.rank,
                world=len(self._place.workers),
                flags=self._flags,
                payload_bytes=used + len(live.objects),
                objects=(used, len(live.objects)),
                checksum="",
            ),
        )

    def _former_is_complete(self, step: int) -> bool:
        """Return True if every rank has completed the save before, so that the other file may be overwritten."""
        running = self._running
        is_done = running is None or running.thread is None or not running.thread.is_alive()
        error = None if running is None or not is_done else running.error
        found = gather_from_all((is_done, None if error is None else f"{type(error).__name__}: {error}"))
        if self._is_ended([text for _, text in found]):
            return False
        if not all(done for done, _ in found):
            former = None if running is None else running.step
            if self._late != former:
                self._warn("step %d is not saved in memory: the save before it is not complete on all ranks yet", step)
            self._late = former
            return False
        self.poll()
        return True

    def _is_ended(self, problems: Sequence[str | None]) -> bool:
        """Return True after a problem of any rank, which ends the saves; `problems`: those of all ranks."""
        failures = [f"rank {rank}: {text}" for rank, text in enumerate(problems) if text is not None]
        if not failures:
            return False
        self._is_off = True
        self.report = replace(self.report, last_failure=failures[0])
        self._warn("the state is no longer saved in memory in this attempt: %s", failures[0])
        return True

    def _run(self, running: _RunningSave, prepared: _PreparedSave) -> None:
        try:
            self._write(running, prepared)
        except BaseException as error:  # the ranks agree on it at the next save
            running.error = error
        running.written_s = time.monotonic() - running.began_s

    def _write(self, running: _RunningSave, prepared: _PreparedSave) -> None:
        assert self._own is not None
        slot, header = prepared.slot, prepared.header
        running.copy.wait()
        start, length = header.objects
        slot.content[start : start + length].copy_(torch.frombuffer(bytearray(prepared.objects), dtype=torch.uint8))
        self._own.publish(replace(header, checksum=slot.checksum(header.payload_bytes)))
        incoming = [(pair.current.content, rank) for rank, pair in self._copies.items()]
        exchange([(slot.content, holder) for holder in self._holders], incoming, self._group)
        for pair in self._copies.values():
            pair.publish_received(step=header.step, save=header.save)

    def before_change(self) -> None:
        """Let changes of weights and optimizer wait for the copy."""
        if self._running is not None and self._running.written_s is None:
            began_s = time.monotonic()
            self._running.copy.before_change()
            self._running.blocked_s += time.monotonic() - began_s

    def poll(self) -> bool:
        """Return True if a save of this rank has been completed since the last call; the report then has it."""
        running = self._running
        if running is None or running.written_s is None or running.error is not None:
            return False
        if self.report.iteration == running.step:
            return False
        assert self._own is not None
        self.report = replace(
            self.report,
            iteration=running.step,
            blocked_s=running.blocked_s,
            written_s=running.written_s,
            size_bytes=self._own.file_bytes,
        )
        if self._place.rank == 0:
            holders = self._holders
            logger.info(
                "the state of step %d is in memory: %s of this rank%s; training waited %.3f s, saving took %.3f s",
                running.step,
                bytes_text(self._own.file_bytes),
                f", with copies on {describe_ranks(holders)}" if holders else "",
                running.blocked_s,
                running.written_s,
            )
        return True

    def finish(self) -> None:
        """Wait for a save that has begun, unless one has failed: then a peer may wait in vain for what was not sent."""
        if self._running is not None and self._running.thread is not None and not self._is_off:
            self._running.thread.join()

    def discard(self) -> None:
        """Delete the files of all workers, once a checkpoint on the disk is as new; collective."""
        self.finish()
        gather_from_all(None)
        self._is_off = True
        if self._place.is_first:
            self._place.remove()

    def close(self) -> None:
        """Close the files, which stay; a save that has begun ends with the process."""
        if self._running is not None and self._running.thread is not None and self._running.thread.is_alive():
            return
        for pair in (*(() if self._own is None else (self._own,)), *self._copies.values()):
            with contextlib.suppress(OSError):
                pair.close()

    def _warn(self, text: str, *values: object) -> None:
        if self._place.rank == 0:
            logger.warning(text, *values)
