"""Real trace of a foreign cluster (OSDI'25 artifact): the known slow worker is named, at the published cost."""

import json
import os
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from megatronapp_analyzer.model import RANK_RECORD, Communicator, JobLayout, StepRecords
from megatronapp_common.trace import DURATION_UNIT_NS, MAX_DURATION_UNITS, NO_COMM, NO_MICROBATCH, Flag, RecordKind

_DEFAULT = pathlib.Path(__file__).parents[4] / "shared" / "data"
DATA = pathlib.Path(os.environ.get("MEGATRONAPP_TEST_DATA", _DEFAULT)) / "straggler"
STAGES = REPLICAS = 4
LOCAL = {
    "forward-compute": RecordKind.FORWARD,
    "backward-compute": RecordKind.BACKWARD,
    "optimizer": RecordKind.OPTIMIZER,
}
GROUPS = {
    "params-all-gather": (RecordKind.PARAM_GATHER, "dp"),
    "grads-reduce-scatter": (RecordKind.GRAD_REDUCE, "dp"),
    "embedding-grads-all-reduce": (RecordKind.EMBED_REDUCE, "embed"),
    "optimizer-clip-main-grad": (RecordKind.GRAD_NORM, "mp"),
}


def _rank(stage: int, replica: int) -> int:
    return replica + REPLICAS * stage


def _comms(stage: int, replica: int) -> dict[int, Communicator]:
    me = _rank(stage, replica)
    table = [
        Communicator("dp", tuple(_rank(stage, other) for other in range(REPLICAS))),
        Communicator("mp", tuple(_rank(other, replica) for other in range(STAGES))),
        Communicator("embed", (_rank(0, replica), _rank(STAGES - 1, replica))),
    ]
    for other in (stage - 1, stage + 1):
        if 0 <= other < STAGES:
            table += [
                Communicator("p2p", (me, _rank(other, replica))),
                Communicator("p2p", (_rank(other, replica), me)),
            ]
    return dict(enumerate(table))


COMMS = {_rank(stage, replica): _comms(stage, replica) for stage in range(STAGES) for replica in range(REPLICAS)}
BOOTS = {rank: f"machine-{rank}" for rank in COMMS}
"""One machine for each worker, as the workers' clocks differ."""


class _Rows:
    def __init__(self, step: int) -> None:
        self.step = step
        self.rows: list[tuple[int, ...]] = []

    def add(self, rank: int, kind: RecordKind, start_s: float, length_s: float, **fields: int) -> None:
        row = {"comm": NO_COMM, "ordinal": 0, "microbatch": NO_MICROBATCH, "flags": int(Flag.DEVICE_CLOCK), **fields}
        start_ns = 1_000_000_000 + int(start_s * 1e9)
        units = int(length_s * 1e9) // DURATION_UNIT_NS
        if units > MAX_DURATION_UNITS:
            units, row["flags"] = MAX_DURATION_UNITS, row["flags"] | int(Flag.SATURATED)
        self.rows.append(
            (
                start_ns,
                units,
                self.step,
                row["ordinal"],
                0,
                row["comm"],
                row["microbatch"],
                int(kind),
                0,
                0,
                row["flags"],
                rank,
            )
        )


def _slot(rank: int, comm: Communicator) -> int:
    return next(slot for slot, slot_comm in COMMS[rank].items() if slot_comm == comm)


def _transfer(rows: _Rows, op: dict[str, Any], rank: int, batched: set[tuple[int, float]]) -> None:
    direction, what = op["optype"].split("-")
    towards = (1 if direction == "forward" else -1) * (1 if what == "send" else -1)
    if not 0 <= op["stage"] + towards < STAGES:
        return  # no-op transfers at the ends of the pipeline
    peer = _rank(op["stage"] + towards, op["dp_rank"])
    pair = (rank, peer) if what == "send" else (peer, rank)
    key = {"comm": _slot(rank, Communicator("p2p", pair)), "ordinal": op["seq_id"]}
    if what == "recv":
        rows.add(rank, RecordKind.RECV_POST, op["start_ts"], 0.0, **key)
        rows.add(rank, RecordKind.RECV_WAIT, op["start_ts"], op["duration"], **key)
        return
    rows.add(rank, RecordKind.SEND_POST, op["start_ts"], 0.0, **key)
    if (rank, op["start_ts"]) not in batched:
        rows.add(rank, RecordKind.SEND_WAIT, op["start_ts"], op["duration"], **key)


def _group(rows: _Rows, op: dict[str, Any], rank: int) -> None:
    kind, name = GROUPS[op["optype"]]
    slot = next((slot for slot, comm in COMMS[rank].items() if comm.kind == name and rank in comm.members), None)
    if slot is not None:
        rows.add(rank, kind, op["start_ts"], op["duration"], comm=slot)


def _view(step: int, ops: list[dict[str, Any]]) -> StepRecords:
    rows = _Rows(step)
    batched = {(_rank(op["stage"], op["dp_rank"]), op["start_ts"]) for op in ops if op["optype"].endswith("-recv")}
    for op in ops:
        rank = _rank(op["stage"], op["dp_rank"])
        if op["optype"] in LOCAL:
            rows.add(rank, LOCAL[op["optype"]], op["start_ts"], op["duration"], microbatch=op["seq_id"] & 0xFFFF)
        elif op["optype"] in GROUPS:
            _group(rows, op, rank)
        elif op["optype"].endswith(("-send", "-recv")):
            _transfer(rows, op, rank, batched)
    for rank in COMMS:
        mine = [op for op in ops if _rank(op["stage"], op["dp_rank"]) == rank]
        first = min(op["start_ts"] for op in mine)
        rows.add(rank, RecordKind.STEP, first, max(op["start_ts"] + op["duration"] for op in mine) - first)
    records = np.array(rows.rows, RANK_RECORD)
    order = np.lexsort((records["start_ns"], records["rank"]))
    return StepRecords(attempt=0, step=step, records=records[order], comms=COMMS, boot_ids=BOOTS)


def _views() -> Iterator[StepRecords]:
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is needed to read the outside trace")
    steps: dict[int, list[dict[str, Any]]] = {}
    for op in parquet.read_table(DATA / "trace-AR.parquet").to_pylist():
        steps.setdefault(op["step"], []).append(op)
    for step in sorted(steps):
        yield _view(step, steps[step])


@pytest.mark.skipif(not DATA.is_dir(), reason=f"outside data is absent: {DATA} (set MEGATRONAPP_TEST_DATA)")
def test_the_known_slow_worker_is_named_at_its_published_cost(judge: Callable[..., Any]) -> None:
    views = list(_views())
    run = judge(JobLayout.grid(pp=STAGES, dp=REPLICAS, ranks_per_worker=2), views)

    assert run.subjects == {("rank", (_rank(0, 0),), "compute")}
    recorded = [view.step for view in views]
    assert recorded.index(run.first_step()) <= 7, "named within four steps after warm-up"
    published = json.loads((DATA / "mw-AR.json").read_text())
    assert run.last.seconds_per_step == pytest.approx(published["tori"] - published["trem"], rel=0.05)
