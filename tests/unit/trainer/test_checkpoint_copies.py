"""Copies of a checkpoint by way of the device: slices for the host, and the room for a snapshot. On a CPU, without one;
`tests/gpu/test_checkpoint_copies.py` has the rest.
"""

import threading
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pytest_workers import examples

if TYPE_CHECKING:
    import torch

pytestmark = pytest.mark.torch
LIMIT = 48


def tensor_of(shape: tuple[int, ...], kind: str) -> "torch.Tensor":
    import torch

    count = torch.Size(shape).numel()
    return torch.arange(1, count + 1).reshape(shape).to(getattr(torch, kind))


@settings(max_examples=examples(100), deadline=None)
@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 5), max_size=3).map(tuple),
            st.sampled_from(["bfloat16", "float32", "uint8", "int64", "bool", "float8_e4m3fn"]),
        ),
        max_size=8,
    )
)
def test_slices_hold_each_byte_once(forms: list[tuple[tuple[int, ...], str]]) -> None:
    import torch

    from megatronapp_trainer.checkpoint.saving.device_snapshot import slices_of

    sources = [tensor_of(shape, kind) for shape, kind in forms]
    targets = [torch.zeros_like(source) for source in sources]
    groups = [list(group) for group in slices_of(zip(sources, targets, strict=True), LIMIT)]
    sizes = [sum(source.numel() for source, _ in group) for group in groups]
    assert sum(sizes) == sum(source.nbytes for source in sources)
    assert all(size == LIMIT for size in sizes[:-1])
    assert all(0 < size <= LIMIT for size in sizes[-1:])
    for group in groups:
        for source, target in group:
            target.copy_(source)
    for source, target in zip(sources, targets, strict=True):
        assert torch.equal(source.view(-1).view(torch.uint8), target.view(-1).view(torch.uint8))


@pytest.mark.parametrize(
    ("free", "former", "expected"),
    [
        pytest.param(65, 0, True, id="room"),
        pytest.param(64, 0, False, id="into-the-margin"),
        pytest.param(5, 60, True, id="memory-of-the-one-before"),
        pytest.param(4, 60, False, id="nothing-else-free"),
    ],
)
def test_a_snapshot_leaves_a_margin(free: int, former: int, expected: bool) -> None:
    from megatronapp_trainer.checkpoint.saving.device_snapshot import fits

    assert fits(60, free=free, former=former, total=100) is expected


def test_memory_that_torch_has_given_back_is_not_counted_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from megatronapp_trainer.checkpoint.saving.device_snapshot import SnapshotMemory

    reports = [
        *((100, 100), (40, 100)),  # new memory
        *((40, 100), (40, 100)),  # that of the snapshot before
        *((60, 100), (0, 100)),  # which torch has given back, while something else took some
        (60, 100),
    ]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: reports.pop(0))
    memory = SnapshotMemory()
    taken = [memory.take(60, torch.device("cpu")) is not None for _ in range(4)]
    assert taken == [True, True, False, False]
    assert not reports


def test_a_copy_that_does_not_begin_fails_where_it_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not where it begins: other ranks have begun theirs, and agree on errors once the copies are done."""
    import torch

    from megatronapp_trainer.checkpoint.saving import host_copy

    def refused(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    copy = host_copy.begin_copy([(torch.ones(2), torch.zeros(2))], None)
    copy.before_change()
    for end in (copy.done, copy.wait):
        with pytest.raises(RuntimeError, match="new thread"):
            end()


def test_several_ranks_of_a_gpu_take_no_snapshot() -> None:
    from megatronapp_trainer.checkpoint.saving.device_snapshot import snapshot_memory
    from megatronapp_trainer.config import parse

    flags = (
        "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 8 --micro-batch-size 1 --lr 1e-3 "
        "--global-batch-size 1 --train-iters 1 --mock-data --vocab-size 8 --distributed-backend gloo"
    )
    assert snapshot_memory(parse(flags.split()).parallel) is not None
    assert snapshot_memory(parse(f"{flags} --ranks-per-gpu 2".split()).parallel) is None
