"""Figures of a step's pipeline: length of its passes, idle share of each rank, early passes, transfers. Pure NumPy."""

import bisect
import dataclasses
import threading
from collections.abc import Iterable, Sequence

import cachetools
import numpy as np
from numpy.typing import NDArray

from megatronapp_analyzer.hub.ingest.digest import durations_ns, is_kind
from megatronapp_analyzer.hub.ingest.message_arrows import peers
from megatronapp_analyzer.hub.ingest.step_cache import CACHED_BYTES, StepCache
from megatronapp_analyzer.hub.ingest.store import StepKey, StoredStep
from megatronapp_analyzer.model import JobLayout
from megatronapp_common.trace import BYTES_UNIT, PASS_KINDS, PassFlag, RecordKind, TransferPath

TRANSFER_STEPS = 16
"""Newest steps whose transfers are summed."""
FIRST_STEPS = 50
"""Steps under each plan whose figures are held for good."""
Floats = NDArray[np.float64]


@dataclasses.dataclass(frozen=True, slots=True)
class Transfers:
    """Messages that a rank received from another by one path."""

    source: int
    destination: int
    path: int
    """A `TransferPath`, or a number that a newer release wrote."""
    count: int
    size_bytes: int
    seconds: float
    """Sum of the times of their copies, which may overlap."""


@dataclasses.dataclass(frozen=True, slots=True)
class PipelinePasses:
    """Figures of one step."""

    attempt: int
    step: int
    seconds: float
    """From the first pass to the end of the last one, of the pipeline in which that is longest."""
    bubble: Floats
    """[rank] share of its pipeline's length in which it ran no pass; NaN for ranks without a pass."""
    early: int
    """Passes that ran before their turn in the plan, of all ranks."""
    count: int
    """Passes of all ranks."""


def pipeline_passes(step: StoredStep, layout: JobLayout) -> PipelinePasses | None:
    """Return the figures of a step; None if it has no passes, or ranks that the layout does not have.

    Starts of ranks on several nodes are compared on the clocks that the store aligned.
    """
    records = step.view.records
    passes = is_kind(records, PASS_KINDS)
    ranks = records["rank"][passes]
    if not len(ranks) or int(ranks.max()) >= layout.world:
        return None
    starts = records["start_ns"][passes].astype(np.int64) + step.offsets_ns[ranks]
    lengths = durations_ns(records[passes])
    numbers = _pipelines(layout)
    pipeline = numbers[ranks]
    size = int(pipeline.max()) + 1
    first = np.full(size, np.iinfo(np.int64).max)
    last = np.zeros(size, np.int64)
    np.minimum.at(first, pipeline, starts)
    np.maximum.at(last, pipeline, starts + lengths)
    seconds = np.where(last > 0, last - first, 0) * 1e-9
    busy = np.bincount(ranks, weights=lengths * 1e-9, minlength=layout.world)
    bubble = np.full(layout.world, np.nan)
    seen = np.unique(ranks)
    whole = seconds[numbers[seen]]
    bubble[seen] = np.clip(1 - busy[seen] / np.maximum(whole, 1e-12), 0, 1)
    return PipelinePasses(
        attempt=step.view.attempt,
        step=step.view.step,
        seconds=float(seconds.max()),
        bubble=bubble,
        early=int(np.count_nonzero(records["flags"][passes] & PassFlag.EARLY)),
        count=len(ranks),
    )


def _pipelines(layout: JobLayout) -> NDArray[np.int64]:
    """Return for each rank the number of its pipeline."""
    places = np.array(layout.pipeline_places)
    numbers: NDArray[np.int64] = np.unique(places, axis=0, return_inverse=True)[1].reshape(-1)
    return numbers


def transfers_of(step: StoredStep) -> tuple[Transfers, ...]:
    """Return the transfers of a step by source, destination and path; none where they are megatron-core's."""
    records = step.view.records
    copies = is_kind(records, (RecordKind.COPY,))
    if not copies.any():
        return ()
    source = peers(step.view)[copies]
    chosen = records[copies]
    keys = np.stack([source, chosen["rank"].astype(np.int64), chosen["layer"].astype(np.int64)], axis=1)
    names, row = np.unique(keys, axis=0, return_inverse=True)
    row = row.reshape(-1)
    count = np.bincount(row)
    size_bytes = np.bincount(row, weights=chosen["aux"].astype(np.float64) * BYTES_UNIT)
    seconds = np.bincount(row, weights=durations_ns(chosen) * 1e-9)
    return tuple(
        Transfers(int(key[0]), int(key[1]), int(key[2]), int(count[i]), int(size_bytes[i]), float(seconds[i]))
        for i, key in enumerate(names)
        if key[0] >= 0
    )


def sum_transfers(steps: Iterable[tuple[Transfers, ...]]) -> list[Transfers]:
    """Return the transfers of all steps by source, destination and path."""
    sums: dict[tuple[int, int, int], Transfers] = {}
    for transfers in steps:
        for pair in transfers:
            key = (pair.source, pair.destination, pair.path)
            before = sums.get(key, Transfers(*key, 0, 0, 0.0))
            sums[key] = Transfers(
                *key, before.count + pair.count, before.size_bytes + pair.size_bytes, before.seconds + pair.seconds
            )
    return [sums[key] for key in sorted(sums)]


def path_name(path: int) -> str:
    """Return the lower-case name of a path; its number if a newer release wrote it."""
    try:
        return TransferPath(path).name.lower().replace("_", "-")
    except ValueError:
        return f"path-{path}"


class PassesCache:
    """Figures of steps that were requested before, so that a page that polls costs the newest steps only.

    Threads may share it: none computes while it holds the lock.
    """

    def __init__(self, limit_bytes: int = CACHED_BYTES) -> None:
        self._figures: StepCache[PipelinePasses] = StepCache(_bytes_of, limit_bytes)
        self._lock = threading.Lock()
        self._transfers: cachetools.LRUCache[StepKey, tuple[Transfers, ...]] = cachetools.LRUCache(TRANSFER_STEPS)

    @property
    def bytes(self) -> int:
        """Return the bytes of the figures held, without transfers."""
        return self._figures.bytes

    def figures(self, steps: Iterable[StoredStep], layout: JobLayout) -> list[PipelinePasses]:
        """Return the figures of stored steps that have passes."""
        return self._figures.figures(steps, lambda step: pipeline_passes(step, layout))

    def transfers(self, steps: Sequence[StoredStep]) -> list[Transfers]:
        """Return the transfers of the newest TRANSFER_STEPS steps by source, destination and path."""
        newest = steps[-TRANSFER_STEPS:]
        with self._lock:
            known = {step.key: self._transfers[step.key] for step in newest if step.key in self._transfers}
        found = known | {step.key: transfers_of(step) for step in newest if step.key not in known}
        with self._lock:
            self._transfers.update(found)
        return sum_transfers(found.values())


def _bytes_of(passes: PipelinePasses | None) -> int:
    """Return an upper bound of what figures take: an array, and some 500 bytes of objects."""
    return 512 + (0 if passes is None else passes.bubble.nbytes)


class PlanSamples:
    """Figures of the first steps under each plan of the newest attempt, which the store deletes long before a job ends.

    A job without plans has a single sample, of its first steps, as plans may be published after their first step.
    """

    def __init__(self) -> None:
        self._attempt = -1
        self._figures: dict[int, PipelinePasses] = {}

    def add(self, step: StoredStep, layout: JobLayout, starts: Sequence[int]) -> None:
        """Take a finished step; `starts`: first step of each plan that is published, ascending."""
        attempt, number = step.key
        if attempt < self._attempt or not step.digest.complete:
            return
        if attempt > self._attempt:
            self._attempt, self._figures = attempt, {}
        starts = starts or (0,)
        for older in [known for known in self._figures if known < starts[0]]:
            del self._figures[older]
        if number < starts[0]:
            return
        plan = bisect.bisect_right(starts, number)
        if sum(bisect.bisect_right(starts, known) == plan for known in self._figures) >= FIRST_STEPS:
            return
        if (passes := pipeline_passes(step, layout)) is not None:
            self._figures[number] = passes

    def of_attempt(self, attempt: int) -> list[PipelinePasses]:
        """Return the figures that are held of an attempt."""
        return list(self._figures.values()) if attempt == self._attempt else []
