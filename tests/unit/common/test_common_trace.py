"""The trace record and its numbers are a wire format: nothing may move."""

import enum

import pytest

from megatronapp_common import trace
from megatronapp_common.trace import (
    COLLECTIVE_KINDS,
    COMPUTE_KINDS,
    P2P_KINDS,
    PASS_KINDS,
    RECORD,
    Counter,
    Flag,
    Metric,
    PassFlag,
    RecordKind,
)


def test_a_record_has_32_bytes_without_holes() -> None:
    assert RECORD.itemsize == trace.RECORD_BYTES == 32
    assert RECORD.names == (
        "start_ns",
        "duration",
        "step",
        "ordinal",
        "aux",
        "comm",
        "microbatch",
        "kind",
        "chunk",
        "layer",
        "flags",
    )
    assert RECORD.fields is not None
    offsets = {name: (field[1], field[0].str) for name, field in RECORD.fields.items()}
    assert offsets == {
        "start_ns": (0, "<u8"),
        "duration": (8, "<u4"),
        "step": (12, "<u4"),
        "ordinal": (16, "<u4"),
        "aux": (20, "<u4"),
        "comm": (24, "<u2"),
        "microbatch": (26, "<u2"),
        "kind": (28, "|u1"),
        "chunk": (29, "|u1"),
        "layer": (30, "|u1"),
        "flags": (31, "|u1"),
    }


def test_the_longest_duration_is_34_seconds() -> None:
    assert 34.3 < trace.MAX_DURATION_UNITS * trace.DURATION_UNIT_NS / 1e9 < 34.4


KINDS = {
    "STEP": 1,
    "DATA": 2,
    "FORWARD": 3,
    "BACKWARD": 4,
    "SEND_POST": 5,
    "SEND_WAIT": 6,
    "RECV_POST": 7,
    "RECV_WAIT": 8,
    "GRAD_REDUCE": 9,
    "PARAM_GATHER": 10,
    "EMBED_REDUCE": 11,
    "GRAD_NORM": 12,
    "OPTIMIZER": 13,
    "LOSS_REDUCE": 14,
    "EVALUATE": 15,
    "CHECKPOINT": 16,
    "TP_REDUCE": 17,
    "TP_GATHER": 18,
    "LAYER_FORWARD": 19,
    "LAYER_BACKWARD": 20,
    "FAULT": 21,
    "GC": 22,
    "WEIGHT": 23,
    "COPY": 24,
    "STOPPED": 28,
    "WORK": 29,
    "NCCL": 30,
    "METRIC": 32,
    "COUNTER": 33,
}
FLAGS = {
    "SATURATED": 1,
    "AUX_BYTES": 2,
    "AUX_WORK": 4,
    "AUX_RUN_QUEUE": 8,
    "DEVICE_CLOCK": 16,
    "SKIPPED_UPDATE": 32,
    "INJECTED": 64,
    "AUX_LEAD": 128,
}


PASS_FLAGS = {"EARLY": 32}


@pytest.mark.parametrize(("kinds", "numbers"), [(RecordKind, KINDS), (Flag, FLAGS), (PassFlag, PASS_FLAGS)])
def test_numbers_are_never_used_again(kinds: type[enum.IntEnum], numbers: dict[str, int]) -> None:
    now = {member.name: int(member) for member in kinds}
    assert {name: now[name] for name in numbers} == numbers
    assert len(set(now.values())) == len(now)


@pytest.mark.parametrize("kinds", [RecordKind, Flag, PassFlag, Metric, Counter])
def test_no_name_is_an_alias_and_kinds_fit_into_their_field(kinds: type[enum.IntEnum]) -> None:
    assert len(kinds.__members__) == len(list(kinds))
    assert all(0 < int(member) < 256 for member in kinds)


def test_flags_of_passes_take_no_bit_that_a_pass_may_have_otherwise() -> None:
    assert PASS_KINDS < COMPUTE_KINDS
    assert not sum(PassFlag) & ~Flag.SKIPPED_UPDATE


def test_the_sets_of_kinds_do_not_overlap() -> None:
    together = [*COMPUTE_KINDS, *P2P_KINDS, *COLLECTIVE_KINDS]
    assert len(set(together)) == len(together)
