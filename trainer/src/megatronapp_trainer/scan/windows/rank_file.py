"""Files of MegatronApp's form, which `megatronapp aggregate`, `trace import` and `scan analyze` read.

The spans are read from the rank's own ring, as its agent reads them: a device ends some of them after the step.
"""

import json
import logging
import os
import pathlib
from collections.abc import Callable
from typing import Protocol

import numpy as np

from megatronapp_common.trace import RECORD, RecordKind
from megatronapp_native.errors import RingError
from megatronapp_trainer.scan.windows.rank_marks import Mark, RankMarks, Records

log = logging.getLogger(__name__)
MAX_READ = 1 << 20
STEPS_LATER = 2
"""Steps after which the device has ended the spans of a step; later ones are not in the file."""
_END = b"\n]\n"
FAILURES = (OSError, RingError, KeyError, ValueError)
"""Failures of the disk, of the ring, and of records that the metadata does not explain."""


class RingSource(Protocol):
    """Methods used of `megatronapp_native.RingReader`."""

    def read(self, max_records: int) -> tuple[bytes, int]:
        """Return records since the last call, and how many were lost."""

    def close(self) -> None:
        """End reading of the ring."""


class RankFile:
    """The file of a rank. One that cannot be written is given up, and the training continues."""

    def __init__(
        self,
        path: pathlib.Path,
        marks: RankMarks,
        *,
        open_ring: Callable[[], RingSource],
        real_offset_ns: Callable[[], int],
    ) -> None:
        """Take the place of the file; one that exists is replaced by the first step.

        Args:
            path: of the file; its folder is created.
            marks: form the content.
            open_ring: opens the rank's ring.
            real_offset_ns: gives real time less monotonic time.
        """
        self._path = path
        self._marks = marks
        self._open_ring = open_ring
        self._real_offset_ns = real_offset_ns
        self._ring: RingSource | None = None
        self._expected: list[int] = []
        self._records: Records = np.zeros(0, RECORD)
        self._begun = False
        self._failed = False

    def step_begin(self, step: int, *, in_window: bool) -> None:
        """Write steps that are over, and expect `step` if it is in a window."""
        if self._failed:
            return
        try:
            if in_window:
                if self._ring is None:
                    self._ring = self._open_ring()
                    self._ring.read(MAX_READ)  # of earlier steps
                self._expected.append(step)
            if self._ring is not None:
                self._take_in()
                self._write([due for due in self._expected if due + STEPS_LATER <= step])
        except FAILURES as error:
            self._give_up(error)

    def close(self) -> None:
        """Write the steps that are left."""
        if self._ring is None or self._failed:
            return
        try:
            self._take_in()
            self._write(self._expected)
        except FAILURES as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self._failed = True
        log.warning("%s gets no more steps: %s: %s", self._path, type(error).__name__, error)

    def _take_in(self) -> None:
        assert self._ring is not None
        data, lost = self._ring.read(MAX_READ)
        if lost:
            log.warning("%s lacks %d records; a larger --trace-capacity holds more", self._path, lost)
        read = np.frombuffer(data, RECORD)
        read = read[(read["kind"] < RecordKind.METRIC) & np.isin(read["step"], self._expected)]
        self._records = np.concatenate([self._records, read])

    def _write(self, due: list[int]) -> None:
        if not due:
            return
        marks = [mark for step in due for mark in self._marks.step(self._of_step(step), self._real_offset_ns())]
        if marks:
            self._append(marks)
        self._expected = [step for step in self._expected if step not in due]
        self._records = self._records[np.isin(self._records["step"], self._expected)]
        if not self._expected and self._ring is not None:
            self._ring.close()
            self._ring = None

    def _of_step(self, step: int) -> Records:
        found: Records = self._records[self._records["step"] == step]
        return found

    def _append(self, marks: list[Mark]) -> None:
        """Add marks at the end of the list in the file, which is whole JSON after each call."""
        lines = b",\n".join(json.dumps(mark, separators=(",", ":")).encode() for mark in marks)
        if not self._begun:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_bytes(b"[\n" + lines + _END)
            self._begun = True
            return
        with self._path.open("r+b") as file:
            file.seek(-len(_END), os.SEEK_END)
            file.write(b",\n" + lines + _END)
