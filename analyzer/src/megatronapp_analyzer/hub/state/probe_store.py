"""Results of probe texts of a training: the frames of ranks by step, in memory or in one file for each step."""

import dataclasses
import errno
import logging
import os
import pathlib
from collections.abc import Iterator, Mapping

import numpy as np

from megatronapp_analyzer.hub.ingest.frame_files import read_frames, truncate_to, whole_frames
from megatronapp_common import frames
from megatronapp_common.errors import FrameError
from megatronapp_common.frames import Frame
from megatronapp_common.scope.probe_texts import ProbePart, read_probe

LOG = logging.getLogger(__name__)
MAX_BYTES = 128 << 20
"""Most bytes of all steps; beyond, older steps become sparser."""
MAX_STEPS = 1024
"""Most steps, each a file."""
MIN_STEPS = 4
"""Number of steps that stay even if they need more, while the disk has space for them."""
SUFFIX = ".frames"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class KnownText:
    """A text as the ranks name it."""

    source: str
    strings: tuple[str, ...]


@dataclasses.dataclass(kw_only=True, slots=True)
class ProbedStep:
    """A step after which the texts were run."""

    step: int
    """Steps done."""
    attempt: int
    nbytes: int = 0
    frames: list[Frame] = dataclasses.field(default_factory=list)
    """Frames of ranks, where nothing is on disk."""
    mean_logprobs: dict[int, float] = dataclasses.field(default_factory=dict)
    """By text the mean log-probability of the tokens that follow in it."""
    perturbation: str | None = None
    """Digest of the recipe that was in force in the step; None: none was."""


class ProbeStore:
    """Steps with the results of all texts. A step of a newer attempt replaces that of an older one."""

    def __init__(
        self,
        folder: pathlib.Path | None,
        *,
        writable: bool = True,
        max_bytes: int = MAX_BYTES,
        max_steps: int = MAX_STEPS,
        disk_bytes: int | None = None,
    ) -> None:
        """Read what `folder` has; None: all is in memory. `disk_bytes`: most bytes, however few steps these are."""
        self._folder = folder
        self._writable = writable
        self._max_bytes = max_bytes if disk_bytes is None else min(max_bytes, disk_bytes)
        self._disk_bytes = disk_bytes
        self._max_steps = max_steps
        self._failed = False
        self._left_out = False
        self._steps: dict[int, ProbedStep] = {}
        self.texts: dict[int, KnownText] = {}
        self.layers: set[int] = set()
        self.heads = 0
        for path in [] if folder is None else sorted(folder.glob(f"*{SUFFIX}")):
            self._restore_file(path)
        if self._steps and writable:  # the limit may have been larger
            self._make_space(max(self._steps), 0)

    @property
    def steps(self) -> list[ProbedStep]:
        """Return the steps, ascending."""
        return [step for _, step in sorted(self._steps.items())]

    def take(self, frame: Frame) -> None:
        """Take a frame of a rank. Raises FrameError for one that no rank sends."""
        part = read_probe(frame)
        found = self._steps.get(part.step)
        if found is not None and part.attempt < found.attempt:
            return
        if found is None or part.attempt > found.attempt:
            self._remove(part.step)
            found = self._steps[part.step] = ProbedStep(step=part.step, attempt=part.attempt)
        self._note(found, part)
        data = frames.encode(frame)
        self._thin(part.step, len(data))
        if not self._make_space(part.step, len(data)):
            return
        found.nbytes += len(data)
        if self._folder is None:
            found.frames.append(frame)
        elif self._writable:
            self._append(self._path(part.step), data)

    def parts(self, step: int, text: int) -> Iterator[ProbePart]:
        """Yield what ranks have sent of a text of a step; nothing for a step that is not there."""
        found = self._steps.get(step)
        if found is None:
            return
        stored = found.frames if self._folder is None else read_frames(self._path(step))
        for frame in stored:
            if frame.header.get("text") == text:
                yield read_probe(frame)

    def _restore_file(self, path: pathlib.Path) -> None:
        """Read a file; an incomplete frame at its end is cut off, so that later ones are read again."""
        whole = 0
        for frame, end in whole_frames(path):
            self._restore(path, frame)
            whole = end
        if self._writable:
            truncate_to(path, whole)

    def _restore(self, path: pathlib.Path, frame: Frame) -> None:
        try:
            part = read_probe(frame)
        except FrameError as error:
            LOG.warning("%s: a probe text is skipped: %s", path, error)
            return
        found = self._steps.setdefault(part.step, ProbedStep(step=part.step, attempt=part.attempt))
        self._note(found, part)
        found.nbytes += len(frames.encode(frame))

    def _note(self, step: ProbedStep, part: ProbePart) -> None:
        step.perturbation = step.perturbation or part.perturbation
        if part.kind == "text" and not isinstance(part.strings, Mapping):
            self.texts[part.text] = KnownText(source=part.source, strings=tuple(part.strings))
        elif part.kind == "attention":
            self.layers.add(part.layer)
            self.heads = max(self.heads, part.first + len(part.arrays[0]))
        elif part.kind == "predictions" and part.tokens > 1:
            step.mean_logprobs[part.text] = float(np.mean(part.arrays[0][:-1], dtype=np.float64))

    def _path(self, step: int) -> pathlib.Path:
        assert self._folder is not None
        return self._folder / f"{step}{SUFFIX}"

    def _append(self, path: pathlib.Path, data: bytes) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("ab", buffering=0) as file:
                before = file.tell()
                if file.write(data) < len(data):
                    file.truncate(before)
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            if not self._failed:
                LOG.error("%s: cannot be written: %s; free some space; probe texts are not stored", path, error)
            self._failed = True

    def _remove(self, step: int) -> None:
        if self._steps.pop(step, None) is not None and self._folder is not None and self._writable:
            self._path(step).unlink(missing_ok=True)

    def _thin(self, current: int, nbytes: int) -> None:
        """Remove the steps whose neighbours are the closest until `nbytes` more of the current step fit.

        The first step and the newest quarter stay.
        """
        while len(self._steps) > MIN_STEPS and (
            len(self._steps) > self._max_steps or self._nbytes + nbytes > self._max_bytes
        ):
            numbers = sorted(self._steps)
            places = [at for at in range(1, len(numbers) - max(1, len(numbers) // 4)) if numbers[at] != current]
            self._remove(numbers[min(places, key=lambda at: numbers[at + 1] - numbers[at - 1])])

    @property
    def _nbytes(self) -> int:
        return sum(step.nbytes for step in self._steps.values())

    def _make_space(self, current: int, nbytes: int) -> bool:
        """Remove other steps until `nbytes` more of the current one fit on the disk; return false if they do not."""
        if self._disk_bytes is None:
            return True
        for step in [step for step in sorted(self._steps) if step != current]:
            if self._nbytes + nbytes <= self._disk_bytes:
                break
            self._remove(step)
        if self._nbytes + nbytes <= self._disk_bytes:
            return True
        if not self._left_out:
            LOG.warning(
                "%s: step %d has more than %d bytes of probe texts, of which the rest is not stored; "
                "write a larger spec.analyzer.volume.sizeLimit, or fewer or shorter texts",
                self._folder,
                current,
                self._disk_bytes,
            )
        self._left_out = True
        return False
