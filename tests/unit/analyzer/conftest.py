from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from megatronapp_analyzer.hub.archive import spooled_ingest
from megatronapp_common.trace import NO_COMM, NO_MICROBATCH, RECORD, Flag, Metric, RecordKind

Rows = NDArray[np.void]
RowBuilder = Callable[..., Rows]
MS = 1_000_000
BOOT_OFFSET_NS = 1_700_000_000_000_000_000


@pytest.fixture(autouse=True)
def patient_spool(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the end of a spool wait for a slow disk."""
    monkeypatch.setattr(spooled_ingest, "CLOSE_S", 120.0)


def build_rows(entries: Sequence[dict[str, int]]) -> Rows:
    out = np.zeros(len(entries), RECORD)
    out["comm"], out["microbatch"] = NO_COMM, NO_MICROBATCH
    for place, fields in enumerate(entries):
        for name, value in fields.items():
            out[name][place] = value
    return out


def build_step(rank: int, step: int, *, compute_ms: float = 3.0, ended: bool = True) -> Rows:
    """One step of 10 ms of a two-stage pipeline of two ranks: one message each way; rank 1 reports a loss."""
    start = 1_000 * MS + step * 10 * MS
    compute = int(compute_ms * MS) // 8
    send = {"kind": RecordKind.SEND_POST, "comm": rank, "start_ns": start + 4 * MS, "duration": 100, "aux": 64}
    receive = {"kind": RecordKind.RECV_WAIT, "comm": 1 - rank, "start_ns": start + 5 * MS, "duration": MS // 8}
    entries = [
        {"kind": RecordKind.FORWARD, "start_ns": start, "duration": compute, "microbatch": 0},
        send | {"flags": Flag.AUX_BYTES},
        receive,
        {"kind": RecordKind.BACKWARD, "start_ns": start + 6 * MS, "duration": compute, "microbatch": 0},
    ]
    if ended:
        entries.append({"kind": RecordKind.STEP, "start_ns": start, "duration": 10 * MS // 8})
    if rank == 1:
        loss = int(np.array([4.0 + step], "<f4").view("<u4")[0])
        entries.append({"kind": RecordKind.METRIC, "comm": Metric.LOSS, "start_ns": start + 10 * MS, "aux": loss})
    rows = build_rows(entries)
    rows["step"] = step
    return rows


def build_ring_header(rank: int, *, boot_id: str = "boot", offset_ns: int = BOOT_OFFSET_NS) -> dict[str, Any]:
    metadata = {
        "rank": rank,
        "localRank": 0,
        "worker": rank,
        "node": f"node-{rank}",
        "world": 2,
        "layout": {"tensor": 1, "pipeline": 2, "virtualPipeline": None, "data": 1, "context": 1, "expert": 1},
        "coordinates": {"tp": 0, "cp": 0, "ep": 0, "dp": 0, "pp": rank},
        "comms": [{"slot": 0, "kind": "p2p", "members": [0, 1]}, {"slot": 1, "kind": "p2p", "members": [1, 0]}],
        "device": "cpu",
        "totalIterations": 100,
    }
    return {
        "rank": rank,
        "worker": rank,
        "metadata": metadata,
        "bootId": boot_id,
        "clockPairs": [[0, 1], [5 * MS, 5 * MS + offset_ns]],
        "capacity": 1024,
    }


@pytest.fixture
def rows() -> RowBuilder:
    """Return a function that makes records from dictionaries."""
    return build_rows


@pytest.fixture
def step_rows() -> RowBuilder:
    """Records of one step of one of two ranks."""
    return build_step


@pytest.fixture
def ring_header() -> Callable[..., dict[str, Any]]:
    """RING header of one of two ranks."""
    return build_ring_header
