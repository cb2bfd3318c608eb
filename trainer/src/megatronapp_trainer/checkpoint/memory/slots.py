"""The two files of a rank's state on a worker: one stays whole while the other is written."""

import pathlib

import torch

from megatronapp_trainer.checkpoint.memory.parts import (
    DRAFT_SUFFIX,
    MappedPart,
    PartHeader,
    file_bytes,
    part_name,
    read_header,
)
from megatronapp_trainer.checkpoint.memory.place import MemoryPlace
from megatronapp_trainer.checkpoint.memory.search import StoredStep
from megatronapp_trainer.checkpoint.saving.host_copy import pin

_BOTH = 2
_UNUSED = -1


class SlotPair:
    """Files of equal size. They are never larger or smaller than at the start, so that no save runs out of memory."""

    def __init__(self, place: MemoryPlace, rank: int, name: str, capacity: int, resumed: StoredStep | None) -> None:
        """Prepare the files of a rank's state; `resumed`: the step whose file becomes one of them if it is there."""
        self._place = place
        self.rank = rank
        self._name = name
        self.capacity = capacity
        self.file_bytes = file_bytes(capacity)
        self._slots: list[MappedPart] = []
        self._orders = [_UNUSED, _UNUSED]
        """When each got its content, counted from that of the resumed step; steps may be equal."""
        self._current = 0
        self._resumed = resumed
        self.resumed_path = self._path_of_resumed()

    def _path_of_resumed(self) -> pathlib.Path | None:
        if self._resumed is None:
            return None
        path = self._place.path(f"rank{self.rank}-step{self._resumed.step}-{self._resumed.save}.part")
        return path if path.is_file() and path.stat().st_size == self.file_bytes else None

    @property
    def needed_bytes(self) -> int:
        """Return the bytes of both files."""
        return _BOTH * self.file_bytes

    def open(self) -> None:
        """Take the memory of both files, and pin it for a GPU. Raises OSError."""
        if self.resumed_path is not None:
            self._slots.append(MappedPart.open(self.resumed_path))
            self._orders[0] = 0
        while len(self._slots) < _BOTH:
            self._slots.append(MappedPart.create(self._draft(len(self._slots)), self.file_bytes))
        if torch.cuda.is_initialized() and self.rank == self._place.rank:  # type: ignore[no-untyped-call]
            for slot in self._slots:
                pin(slot.content)

    def _draft(self, index: int) -> pathlib.Path:
        return self._place.path(f"rank{self.rank}-{self._name}-{'ab'[index]}{DRAFT_SUFFIX}")

    @property
    def current(self) -> MappedPart:
        """Return the file that is written."""
        return self._slots[self._current]

    def next(self) -> MappedPart:
        """Return the file that was written before the other, which is whole no longer from now on."""
        self._current = self._orders.index(min(self._orders))
        if self._orders[self._current] != _UNUSED:
            self.current.rename(self._draft(self._current))
        self.current.erase_header()
        self._orders[self._current] = _UNUSED
        return self.current

    def publish(self, header: PartHeader) -> None:
        """Complete the file that is written, and give it its name."""
        self.current.write_header(header, self.capacity)
        self._publish(header)

    def publish_received(self, *, step: int, save: str) -> None:
        """Give a file that was received its name.

        Raises:
            BrokenPartError: it is not that of this rank and save.
        """
        header = read_header(self.current.path)
        assert (header.step, header.save, header.rank) == (step, save, self.rank), "ranks save in the same order"
        self._publish(header)

    def _publish(self, header: PartHeader) -> None:
        self.current.rename(self._place.path(part_name(header)))
        self._orders[self._current] = max(self._orders) + 1

    def close(self) -> None:
        """Close both files, which stay."""
        for slot in self._slots:
            slot.close()
