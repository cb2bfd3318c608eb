"""Inboxes of a pipeline's ranks: for neighbours alone, of the size that is needed, and refused where they cannot be."""

import contextlib
import io
import itertools
import os
import pathlib
import types
from collections.abc import Callable
from typing import Any

import pytest

from megatronapp_common.names import Env, ExitCode

RunRanks = Callable[..., list[Any]]

pytestmark = pytest.mark.torch

FLAGS = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 1 "
    "--global-batch-size 8 --train-iters 1 --lr 2e-3 --mock-data --vocab-size 120 "
    "--pipeline-model-parallel-size 2 --load there"
)


def neighbours(ranks: int, chunks: int, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Neighbours of each rank of a pipeline whose ranks in the world are 10, 11, ..."""
    import torch
    import torch.distributed as dist

    from megatronapp_trainer.pipeline.planning.tasks import Placement
    from megatronapp_trainer.pipeline.transport.inboxes import Inboxes, TaskAddresses
    from megatronapp_trainer.pipeline.transport.tensor_transport import TensorSpec

    pipeline = [10 + rank for rank in range(ranks)]
    found = []
    for rank in pipeline:
        monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
        spec = TensorSpec((4, 1, 8), torch.float32)
        found.append(Inboxes(Placement(ranks, chunks), TaskAddresses(pipeline, [rank]), spec, 1).neighbours)
    return found


def test_only_neighbours_have_inboxes_and_they_wrap_around_with_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert neighbours(4, 1, monkeypatch) == [[11], [10, 12], [11, 13], [12]]
    assert neighbours(4, 2, monkeypatch) == [[11, 13], [10, 12], [11, 13], [10, 12]]
    assert neighbours(2, 3, monkeypatch) == [[11], [10]]


def test_all_transfers_of_tasks_are_between_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatronapp_trainer.pipeline.planning.tasks import Placement, Task

    for ranks, chunks in itertools.product((2, 3, 5), (1, 2, 3)):
        placement, adjacent = Placement(ranks, chunks), neighbours(ranks, chunks, monkeypatch)
        for rank, chunk in itertools.product(range(ranks), range(chunks)):
            for task in (Task.forward(0, chunk), Task.backward(0, chunk)):
                following = placement.next_task(rank, task)
                assert following is None or following.rank == rank or 10 + following.rank in adjacent[rank]


def test_slots_follow_the_activations_and_stay_under_the_limit() -> None:
    import torch

    from megatronapp_trainer.errors import UsageError
    from megatronapp_trainer.pipeline.planning.tasks import Placement
    from megatronapp_trainer.pipeline.transport.inboxes import Inboxes, TaskAddresses
    from megatronapp_trainer.pipeline.transport.tensor_transport import TensorSpec

    def slots(chunks: int, peak: int) -> int:
        addresses = TaskAddresses([0, 1], [0])
        return Inboxes(Placement(2, chunks), addresses, TensorSpec((1,), torch.float32), peak).slots

    assert (slots(1, 4), slots(2, 4)) == (6, 10)
    assert slots(1, 4094) == 4096
    with pytest.raises(UsageError, match="at most 4096; give a smaller --dpp-memory-cap"):
        slots(1, 4095)


def test_devices_that_do_not_reach_their_neighbours_are_found() -> None:
    from megatronapp_trainer.pipeline.transport.inboxes import _devices_apart, _Proposal, _Reach

    def proposals(reached: dict[str, str], seen: str) -> list[_Proposal]:
        """Return those of four ranks in a row, with a device each."""
        return [
            _Proposal(
                job="job",
                memory="",
                boards=(),
                inbox_bytes=0,
                pinned_bytes=0,
                free=None,
                reach=_Reach(name, frozenset(seen), frozenset(reached.get(name, "abcd"))),
                neighbours=tuple(rank for rank in (index - 1, index + 1) if 0 <= rank < 4),
            )
            for index, name in enumerate("abcd")
        ]

    assert _devices_apart(proposals({}, "abcd")) is None
    assert _devices_apart(proposals({"c": "bc"}, "abcd")) == (2, 3)
    assert _devices_apart(proposals({"c": "cd"}, "abcd")) == (2, 1)
    assert _devices_apart(proposals({"a": "ab"}, "abcd")) is None  # c and d are no neighbours of a
    assert _devices_apart(proposals({"c": "c"}, "c")) is None  # not seen: the transport tries it
    hosts = [proposal._replace(reach=None) for proposal in proposals({"c": "c"}, "abcd")]
    assert _devices_apart(hosts) is None


def test_messages_of_ranks_without_a_device_take_shared_memory() -> None:
    from megatronapp_trainer.pipeline.transport.inboxes import _needed, _Proposal, _Reach
    from megatronapp_trainer.pipeline.transport.shared_memory import FILE_BYTES

    def proposal(memory: str, name: str | None, *neighbours: int) -> _Proposal:
        reach = None if name is None else _Reach(name, frozenset(name), frozenset(name))
        return _Proposal("job", memory, neighbours, (), 10 if name else 1000, 1000, None, reach)

    ranks = [proposal("a", "x", 1, 2, 3), proposal("a", "y", 0), proposal("a", None, 0), proposal("b", "z", 0)]
    assert _needed(ranks[0], ranks) - FILE_BYTES == 10 + 1000  # of the device, of the host, none of the other node
    assert _needed(ranks[2], ranks) - FILE_BYTES == 1000
    assert _needed(ranks[3], ranks) == FILE_BYTES


class SilentTransport:
    """A transport on which nothing arrives."""

    options = types.SimpleNamespace(deadline_s=5.0)

    def wait_activity(self, _seen: int, _deadline_s: float | None = None) -> bool:
        return False


@pytest.mark.parametrize(
    ("follows", "expected", "missing"),
    [
        (True, [], "a decision of rank 4$"),
        (True, [1], "a decision of rank 4, or .* from rank 1$"),
        (False, [1], "next: F0.0 from rank 1$"),
    ],
)
def test_a_wait_that_ends_with_nothing_names_what_is_missing(follows: bool, expected: list[int], missing: str) -> None:
    from megatronapp_trainer.errors import TransferTimeoutError
    from megatronapp_trainer.pipeline.planning.tasks import Task
    from megatronapp_trainer.pipeline.transport.shared_memory_transport import SharedMemoryTransport

    transport: Any = object.__new__(SharedMemoryTransport)
    transport._transport, transport._seen = SilentTransport(), 0
    transport._follows, transport._leader = follows, 4
    transport._expected = {Task.forward(number, 0): sender for number, sender in enumerate(expected)}
    with pytest.raises(TransferTimeoutError, match=missing):
        transport.wait()


def refusal(flags: str) -> tuple[int, str]:
    """Exit code and message of a rank whose shared memory is full; no model may be built."""
    import warnings

    from megatronapp_trainer import pretrain

    warnings.simplefilter("ignore")
    fields = list(os.statvfs("/"))
    fields[4] = 1  # free blocks
    os.statvfs = lambda _path: os.statvfs_result(fields)  # type: ignore[assignment]

    def train(*_arguments: Any) -> None:
        raise AssertionError("the run goes on")

    pretrain._train = train  # type: ignore[assignment]
    with contextlib.redirect_stderr(io.StringIO()) as errors:
        code = pretrain.main(f"{FLAGS} {flags}".split())
    return code, errors.getvalue()


@pytest.mark.parametrize("flag", ["--use-dpp", "--transport native"])
def test_memory_that_cannot_do_is_refused_before_the_checkpoint_is_loaded(
    run_ranks: RunRanks, tmp_path: pathlib.Path, flag: str
) -> None:
    for code, errors in run_ranks(2, refusal, flag, environment={Env.SHM_DIR: str(tmp_path)}):
        assert code == ExitCode.USAGE, errors
        assert f"{flag}: {tmp_path} has 0 MiB free, and messages between its 2 ranks need 1 MiB (" in errors
        assert "--dpp-memory-cap" in errors
