"""Search for the newest step whose parts are all in some worker's memory, and transfer of those that a rank lacks."""

import dataclasses
import logging
import pathlib
import time
from collections.abc import Collection

import torch.distributed as dist

from megatronapp_trainer.checkpoint.memory.exchange import Group, exchange
from megatronapp_trainer.checkpoint.memory.parts import (
    DRAFT_SUFFIX,
    BrokenPartError,
    MappedPart,
    PartHeader,
    part_name,
    parts_of,
    read_header,
)
from megatronapp_trainer.checkpoint.memory.place import MemoryPlace, free_bytes
from megatronapp_trainer.checkpoint.memory.selection import (
    Generation,
    Stored,
    Transfer,
    describe_ranks,
    generations,
    transfers,
    without,
)
from megatronapp_trainer.errors import StorageError
from megatronapp_trainer.parallel.agreement import gather_from_all, on_all_ranks
from megatronapp_trainer.utils.byte_sizes import bytes_text

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StoredStep:
    """A step whose parts are all there, this rank's in a file of its worker, verified."""

    step: int
    save: str
    path: pathlib.Path
    """Part of this rank."""
    header: PartHeader
    received: int
    """Number of ranks that received their part from another worker."""
    seconds: float


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _WorkerFiles:
    sizes: dict[Stored, int]
    """Size of each whole file that fits this run."""
    flaws: list[str]
    others: int
    """Number of whole files that do not."""


class MemorySearch:
    """Finds what to resume from; all its methods are collective."""

    def __init__(self, place: MemoryPlace, flags: str, group: Group) -> None:
        """Prepare to search; `flags`: digest of those that the state depends on."""
        self._place = place
        self._flags = flags
        self._group = group
        self._sizes: dict[Stored, int] = {}

    def newest(self, after: int) -> StoredStep | None:
        """Return the newest step that is whole and later than `after`, with this rank's part on its worker.

        Why a later one is not taken is in the log of rank 0.

        Raises:
            StorageError: a worker has no memory for a part that it needs.
            RuntimeError: a peer was lost.
        """
        began_s = time.monotonic()
        everyone = gather_from_all(on_all_ranks(self._list))
        stored = {
            worker: set(files.sizes)
            for worker, files in zip(self._place.workers, everyone, strict=True)
            if files is not None
        }
        for files in everyone:
            if files is not None:
                self._sizes |= files.sizes
                self._note(*files.flaws)
        others = sum(files.others for files in everyone if files is not None)
        if others:
            self._note(
                f"{others} files in the memory of workers are not used: they were written with other flags, "
                "in another layout or by another training"
            )
        found_saves = generations(stored, len(self._place.workers))
        if not found_saves and dist.get_rank() == 0:
            logger.info("no worker has a state of this job in memory")
        for generation in found_saves:
            if generation.step <= after:
                if dist.get_rank() == 0:
                    logger.info("step %d in memory is not newer than the checkpoint of step %d", generation.step, after)
                return None
            if (found := self._obtain(generation, began_s)) is not None:
                return found
        return None

    def _list(self) -> _WorkerFiles | None:
        """Return the files of this worker on its first rank, None on the others."""
        if not self._place.is_first:
            return None
        sizes: dict[Stored, int] = {}
        flaws = []
        others = 0
        for path in parts_of(self._place.directory, self._place.prefix):
            try:
                header = read_header(path)
            except BrokenPartError as error:
                flaws.append(f"{path} in the memory of a worker is not used: {error}")
                continue
            if header.world != len(self._place.workers) or header.flags != self._flags:
                others += 1
                continue
            sizes[header.step, header.save, header.rank] = path.stat().st_size
        return _WorkerFiles(sizes=sizes, flaws=flaws, others=others)

    def _obtain(self, generation: Generation, began_s: float) -> StoredStep | None:
        """Provide every rank with its part of a save, from another copy if one is damaged; None if that is impossible.

        Parts of one save alone are combined.
        """
        damaged: set[tuple[str, int]] = set()
        pending: Collection[int] = range(len(self._place.workers))
        received: set[int] = set()
        while True:
            current = without(generation, damaged)
            if current.missing:
                what = "an undamaged copy of the state" if damaged else "the state"
                self._note(
                    f"step {generation.step} in memory cannot be used: no worker has {what} of "
                    f"{describe_ranks(current.missing)}"
                )
                return None
            needed = [transfer for transfer in transfers(current, self._place.workers) if transfer.receiver in pending]
            received |= {transfer.receiver for transfer in needed}
            flaws = gather_from_all(self._provide(current, needed, is_pending=self._place.rank in pending))
            found = {rank: flaw for rank, flaw in enumerate(flaws) if flaw is not None}
            if not found:
                return self._stored(generation, len(received), began_s)
            damaged |= {(worker, rank) for rank, (worker, _) in found.items()}
            pending = list(found)
            self._note(*(text for _, text in found.values()))

    def _provide(self, save: Generation, needed: list[Transfer], *, is_pending: bool) -> tuple[str, str] | None:
        """Transfer parts, and verify this rank's; returns the worker of a damaged one, and what is wrong with it."""
        rank = self._place.rank
        receives = any(transfer.receiver == rank for transfer in needed)
        pairs = [(transfer.sender, transfer.receiver) for transfer in needed]
        target, sources = on_all_ranks(  # a rank that failed alone would leave its peer waiting
            lambda: (
                self._create(save) if receives else None,
                {to: MappedPart.open(self._path(save, to)) for sender, to in pairs if sender == rank},
            )
        )
        for transfer in needed:
            if transfer.sender == rank:
                source = sources[transfer.receiver]
                exchange([(source.content, transfer.receiver)], [], self._group)
                source.close()
            elif transfer.receiver == rank:
                assert target is not None
                exchange([], [(target.content, transfer.sender)], self._group)
        if target is not None:
            target.rename(self._path(save, rank))
            target.close()
        if not is_pending:
            return None
        worker = save.sources[rank][0] if receives else self._place.worker
        flaw = self._flaw(save)
        return None if flaw is None else (worker, f"the state of rank {rank} in the memory of {worker} is {flaw}")

    def _create(self, save: Generation) -> MappedPart:
        size = self._sizes[save.step, save.save, self._place.rank]
        path = self._place.path(f"rank{self._place.rank}-received{DRAFT_SUFFIX}")
        if size > free_bytes(self._place.directory):
            raise StorageError(
                f"{bytes_text(size)} for the state of rank {self._place.rank}, which another worker has, are not free "
                f"in {self._place.directory}; raise spec.shm.sizeLimit"
            )
        try:
            return MappedPart.create(path, size)
        except OSError as error:
            raise StorageError(f"{path} cannot be written: {error}") from error

    def _flaw(self, save: Generation) -> str | None:
        """Return what is wrong with this rank's part, or None; a damaged file is deleted."""
        path = self._path(save, self._place.rank)
        try:
            header = read_header(path)
            part = MappedPart.open(path)
        except (BrokenPartError, OSError) as error:
            flaw = str(error)
        else:
            is_whole = part.checksum(header.payload_bytes) == header.checksum
            is_of_save = (header.step, header.save, header.rank) == (save.step, save.save, self._place.rank)
            part.close()
            if is_whole and is_of_save:
                return None
            flaw = "damaged: its checksum is another"
        path.unlink(missing_ok=True)
        return flaw

    def _path(self, save: Generation, rank: int) -> pathlib.Path:
        return self._place.path(f"rank{rank}-step{save.step}-{save.save}.part")

    def _stored(self, save: Generation, received: int, began_s: float) -> StoredStep:
        path = self._path(save, self._place.rank)
        header = on_all_ranks(lambda: read_header(path))
        assert path.name.endswith(part_name(header))
        return StoredStep(
            step=save.step,
            save=save.save,
            path=path,
            header=header,
            received=received,
            seconds=time.monotonic() - began_s,
        )

    def _note(self, *texts: str) -> None:
        if dist.get_rank() == 0:
            for text in texts:
                logger.warning("%s", text)
