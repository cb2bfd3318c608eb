"""Which rows of a step belong to which run, and to which step of it. Pure: every rank finds the same by itself.

A rank is informed of what begins and ends, and then sees only the segments of steps. That is enough: a row's step
follows from its position and the length of its prompt, and each unfinished sample takes part in every decode step.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple

from megatronapp_common.scope.protocol import ATLAS, MAX_MESSAGE_BYTES
from megatronapp_common.scope.protocol_requests import CaptureSettings, ProbeSite
from megatronapp_trainer.hooks.forward_observer import Segment
from megatronapp_trainer.scope.capture.capture_spec import CaptureSpec, capture_spec_of
from megatronapp_trainer.scope.transfer.part_frames import TrackedRow

_MOST_HEADER_BYTES = MAX_MESSAGE_BYTES - (24 << 10)
"""Bytes of an overview that tensors may use."""
_MEASURES = 3


def request_id(run: str, sample: int) -> str:
    """The engine's name of a sample."""
    return f"{run}-{sample}"


@functools.lru_cache(maxsize=256)
def run_of(request: str) -> tuple[str, int]:
    """Split a request's name into run and sample; another name is returned unchanged, with sample -1."""
    run, _, sample = request.rpartition("-")
    return (run, int(sample)) if sample.isdecimal() else (request, -1)


class PromptRead(NamedTuple):
    """Tokens of one prompt that a step reads."""

    sample: int
    first_token: int
    segment: Segment
    ends: bool
    """True if the prompt ends here."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RowStride:
    """Reported rows of a prompt: each `every`-th from `first` up to `end`, and with `last` also the last one."""

    first: int
    end: int
    every: int
    last: bool

    def includes(self, position: int) -> bool:
        """Return true if this row is reported."""
        inside = self.first <= position < self.end
        on_grid = inside and (position - self.first) % self.every == 0
        return on_grid or (self.last and position == self.end - 1)


@dataclasses.dataclass(kw_only=True)
class TrackedRequest:
    """A run, or a probe, and how far each sample has been read."""

    name: str
    lengths: Sequence[int]
    strides: Sequence[RowStride]
    capture: CaptureSettings | None = None
    """None: a probe."""
    recipe: CaptureSpec | None = None
    sites: Sequence[ProbeSite] = ()
    """Sites of a probe."""
    read: list[int] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        self.read = [0] * len(self.lengths)

    @property
    def is_probe(self) -> bool:
        """True for a probe, which requests exact numbers of known tokens."""
        return self.capture is None

    @property
    def is_captured(self) -> bool:
        """True for a probe, and for a run whose capture is not off."""
        return self.is_probe or self.recipe is not None

    @property
    def all_read(self) -> bool:
        """True once every prompt has been read."""
        return all(read >= length for read, length in zip(self.read, self.lengths, strict=True))

    def step_of(self, row: TrackedRow) -> int:
        """0 in the prompt; then one for each generated token that is read."""
        return max(0, row.position - self.lengths[row.sample] + 1)

    def reads(self, segments: Sequence[Segment]) -> list[PromptRead]:
        """Return which of a step's segments belong to this request."""
        out, token = [], 0
        for segment in segments:
            run, sample = run_of(segment.request_id)
            if run == self.name:
                ends = segment.end == self.lengths[sample]
                out.append(PromptRead(sample=sample, first_token=token, segment=segment, ends=ends))
            token += len(segment.tokens)
        return out

    def rows(self, reads: Sequence[PromptRead], *, decode: bool) -> list[TrackedRow]:
        """Return the reported rows of what a step reads, in its order."""
        return [row for read in reads for row in self.rows_of(read, decode=decode)]

    def rows_of(self, read: PromptRead, *, decode: bool) -> list[TrackedRow]:
        """Return the reported rows of one prompt."""
        segment, stride = read.segment, self.strides[read.sample]
        if decode:
            return [TrackedRow(token=segment.slot, sample=read.sample, position=segment.start)]
        return [
            TrackedRow(token=read.first_token + position - segment.start, sample=read.sample, position=position)
            for position in range(segment.start, segment.end)
            if stride.includes(position)
        ]

    def advance(self, reads: Sequence[PromptRead]) -> None:
        """Note that these tokens have been read."""
        for read in reads:
            self.read[read.sample] = max(self.read[read.sample], read.segment.end)

    def more(self, step: int, rows: Sequence[TrackedRow]) -> bool:
        """Other rows of this step will follow, those of this plan being `rows`. After `advance`."""
        return not self.all_read or any(self.step_of(row) < step for row in rows)


class RequestTracker:
    """Runs and probes that a rank captures."""

    def __init__(self) -> None:
        self._requests: dict[str, TrackedRequest] = {}
        self._ids: tuple[str, ...] = ()
        """Requests of the last step, whose runs are `_touched`."""
        self._touched: list[TrackedRequest] = []

    @property
    def is_empty(self) -> bool:
        """True without any run and probe."""
        return not self._requests

    def get(self, name: str) -> TrackedRequest | None:
        """Return a run or probe by its name."""
        return self._requests.get(name)

    def add(self, request: TrackedRequest) -> None:
        """Track a run or probe from the next step on."""
        self._requests[request.name] = request
        self._ids = ()

    def remove(self, name: str) -> None:
        """Track a run or probe no more; an unknown name does nothing."""
        self._requests.pop(name, None)
        self._ids = ()

    def clear(self) -> None:
        """Remove all runs and probes."""
        self._requests.clear()
        self._ids = ()

    def touched_by(self, segments: Sequence[Segment]) -> list[TrackedRequest]:
        """Return the runs and probes whose tokens a step reads: mostly those of the step before."""
        if not self._requests:
            return []
        ids = tuple([segment.request_id for segment in segments])
        if ids != self._ids:
            owners = {run_of(request_id)[0] for request_id in ids}
            self._ids, self._touched = ids, [request for name, request in self._requests.items() if name in owners]
        return self._touched


def tracked_run(run: str, capture: CaptureSettings, lengths: Sequence[int], sizes: "ModelSizes") -> TrackedRequest:
    """A run that begins."""
    recipe = capture_spec_of(capture)
    rows = sizes.overview_rows(recipe)
    strides = [RowStride(first=0, end=length, every=-(-length // rows), last=True) for length in lengths]
    return TrackedRequest(name=run, lengths=tuple(lengths), strides=strides, capture=capture, recipe=recipe)


def tracked_probe(
    probe: str, sites: Sequence[ProbeSite], lengths: Sequence[int], queries: tuple[int, int] | None, stride: int
) -> TrackedRequest:
    """A probe that begins."""
    first, end = queries if queries is not None else (0, max(lengths))
    strides = [RowStride(first=first, end=min(end, length), every=stride, last=False) for length in lengths]
    return TrackedRequest(name=probe, lengths=tuple(lengths), strides=strides, sites=tuple(sites))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ModelSizes:
    """Sizes of the whole model that limit the rows of an overview."""

    layers: int
    heads: int
    components: int = 8

    def overview_rows(self, recipe: CaptureSpec | None) -> int:
        """Rows of one prompt that fit into its overview, as the hub codes them."""
        if recipe is None:
            return 1
        fields = [3 * recipe.qkv + 12, (recipe.mlp + 4) * (recipe.mlp1 + recipe.mlp2), 2 * _MEASURES]
        fields += [_MEASURES * self.heads * recipe.attention, 2 * self.components * recipe.pca]
        atlas = min(self.layers * self.heads * ATLAS * ATLAS, _MOST_HEADER_BYTES * 3 // 4) * recipe.attention
        return max(2, (_MOST_HEADER_BYTES - atlas) // (self.layers * sum(fields)) - 1)
