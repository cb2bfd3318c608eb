"""Spans of a step as marks of MegatronApp's tracer: begin (`B`) and end (`E`) of named scopes, nested."""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatronapp_common.trace import BYTES_UNIT, DURATION_UNIT_NS, Flag, LayerSite, RecordKind
from megatronapp_trainer.scan.metadata import Communicator

_NAMES = {
    RecordKind.FORWARD: "forward",
    RecordKind.BACKWARD: "backward",
    RecordKind.GRAD_REDUCE: "allreduce",
    RecordKind.OPTIMIZER: "optimizer",
    RecordKind.LOSS_REDUCE: "loss",
    RecordKind.TP_REDUCE: "_reduce",
    RecordKind.TP_GATHER: "_gather_along_first_dim",
}
"""Scopes that MegatronApp has. Other kinds of spans are in the ring alone."""
_SITES = {
    LayerSite.EMBEDDING: "embedding",
    LayerSite.ATTENTION_NORM: "input_layernorm",
    LayerSite.ATTENTION: "attention",
    LayerSite.MLP_NORM: "pre_mlp_layernorm",
    LayerSite.MLP: "mlp",
    LayerSite.FINAL_NORM: "final_layernorm",
    LayerSite.LOSS: "output_layer",
}
_TRANSFERS = {
    (RecordKind.SEND_POST, "next"): "send-warmup",
    (RecordKind.SEND_POST, "previous"): "send-cooldown",
    (RecordKind.RECV_WAIT, "previous"): "recv-warmup",
    (RecordKind.RECV_WAIT, "next"): "recv-cooldown",
}
Records = NDArray[np.void]
Mark = dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """Rank of a file."""

    data: int
    """Number of the replica. Ranks that share a sequence are counted as replicas: files have no number for them."""
    pipeline: int
    tensor: int
    rank: int
    local_rank: int

    @property
    def file_name(self) -> str:
        """Return MegatronApp's name of the file."""
        return f"benchmark-data-{self.data}-pipeline-{self.pipeline}-tensor-{self.tensor}.json"

    def fields(self) -> Mark:
        """Return what each mark says of its rank."""
        return {
            "dp_rk": self.data,
            "pp_rk": self.pipeline,
            "tp_rk": self.tensor,
            "g_rk": self.rank,
            "dev": self.local_rank,
        }


@dataclasses.dataclass(slots=True)
class _Scope:
    name: str
    start_ns: int
    end_ns: int
    arguments: Mark


class RankMarks:
    """Marks of the steps of one rank."""

    def __init__(self, place: RankPlace, table: Iterable[Communicator]) -> None:
        """Take the rank and its communicators."""
        self._place = place
        self._pairs = {c.slot: (c.members[0], c.members[1]) for c in table if c.kind == "p2p"}
        self._last_end_ns: int | None = None

    def step(self, records: Records, real_offset_ns: int) -> list[Mark]:
        """Return the marks of one step from its records, which hold its STEP; an empty list without one.

        `real_offset_ns`: real time less monotonic time.
        """
        steps = records[records["kind"] == RecordKind.STEP]
        if not len(steps):
            return []
        start_ns = int(steps[0]["start_ns"])
        end_ns = start_ns + int(steps[0]["duration"]) * DURATION_UNIT_NS
        pad_ns = None if self._last_end_ns is None else max(start_ns - self._last_end_ns, 0)
        self._last_end_ns = end_ns
        begun = {"name": "iteration", "ph": "B", "rel_ts": 0, "pad_before": pad_ns, "step": int(steps[0]["step"])}
        begun["start_real_ns"] = start_ns + real_offset_ns
        ended = {"name": "iteration", "ph": "E", "rel_ts": end_ns - start_ns, "duration_wall": end_ns - start_ns}
        inside = _nested(list(self._scopes(records)), start_ns, end_ns)
        return [mark | self._place.fields() for mark in (begun, *inside, ended)]

    def _scopes(self, records: Records) -> Iterator[_Scope]:
        sizes = {
            (int(record["comm"]), int(record["ordinal"])): int(record["aux"]) * BYTES_UNIT
            for record in records[records["kind"] == RecordKind.RECV_POST]
        }
        for record in records:
            name = self._name(record)
            if name is None:
                continue
            start_ns = int(record["start_ns"])
            arguments: Mark = {}
            if int(record["flags"]) & Flag.AUX_BYTES:
                arguments["data"] = int(record["aux"]) * BYTES_UNIT
            elif record["kind"] == RecordKind.RECV_WAIT:
                arguments["data"] = sizes.get((int(record["comm"]), int(record["ordinal"])), 0)
            yield _Scope(name, start_ns, start_ns + int(record["duration"]) * DURATION_UNIT_NS, arguments)

    def _name(self, record: np.void) -> str | None:
        kind = RecordKind(int(record["kind"]))
        if kind in {RecordKind.LAYER_FORWARD, RecordKind.LAYER_BACKWARD}:
            return _SITES[LayerSite(int(record["ordinal"]))]
        if kind in {RecordKind.SEND_POST, RecordKind.RECV_WAIT}:
            source, destination = self._pairs[int(record["comm"])]
            peer = destination if kind is RecordKind.SEND_POST else source
            return _TRANSFERS[kind, "next" if peer > self._place.rank else "previous"]
        return _NAMES.get(kind)


def _nested(scopes: Sequence[_Scope], start_ns: int, end_ns: int) -> Iterator[Mark]:
    """Yield begins and ends of scopes in their order, cut so that they lie within each other or apart."""
    opened: list[_Scope] = []

    def ended(scope: _Scope) -> Mark:
        return {"name": scope.name, "ph": "E", "rel_ts": scope.end_ns - start_ns} | scope.arguments

    for scope in sorted(scopes, key=lambda scope: (scope.start_ns, -scope.end_ns)):
        scope.start_ns = min(max(scope.start_ns, start_ns), end_ns)
        while opened and opened[-1].end_ns <= scope.start_ns:
            yield ended(opened.pop())
        scope.end_ns = max(min(scope.end_ns, opened[-1].end_ns if opened else end_ns), scope.start_ns)
        opened.append(scope)
        yield {"name": scope.name, "ph": "B", "rel_ts": scope.start_ns - start_ns}
    while opened:
        yield ended(opened.pop())
