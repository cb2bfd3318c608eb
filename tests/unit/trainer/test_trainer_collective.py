"""A failure of one rank reaches all of them."""

import errno
import os
import socket
from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.torch


def outcomes(failing_rank: int, kind: str) -> tuple[str, str, int | None]:
    """Return what `on_all_ranks` raises or returns here, when one rank fails with this error."""
    import torch.distributed as dist

    from megatronapp_trainer import errors
    from megatronapp_trainer.parallel.agreement import broadcast_from_zero, on_all_ranks

    dist.init_process_group("gloo")
    rank = dist.get_rank()

    def work() -> int:
        if rank == failing_rank:
            if kind == "RefusedError":
                raise errors.RefusedError("the reason", final=True)
            raise getattr(errors, kind, OSError)("the reason")
        return rank

    try:
        value = on_all_ranks(work)
    except Exception as error:
        return type(error).__name__, str(error), None
    return "", "", value + broadcast_from_zero(lambda: 10 * (rank + 1))


@pytest.fixture
def call(run_ranks: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    return lambda *arguments: run_ranks(2, outcomes, *arguments)


def bind_the_port_again() -> str:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", int(os.environ["MASTER_PORT"])))
        except OSError as error:
            return errno.errorcode[error.errno or 0]
    return "bound"


def test_the_port_of_forked_ranks_is_reserved(run_ranks: Callable[..., list[Any]]) -> None:
    assert run_ranks(1, bind_the_port_again) == ["EADDRINUSE"]


@pytest.mark.parametrize(
    ("kind", "elsewhere"),
    [("DataError", "DataError"), ("OSError", "TrainerError"), ("RefusedError", "RendezvousError")],
)
def test_all_ranks_raise(call: Callable[..., list[Any]], kind: str, elsewhere: str) -> None:
    first, second = call(1, kind)
    assert tuple(first) == (elsewhere, "rank 1: the reason", None)
    assert tuple(second) == (kind, "the reason", None)


def test_without_a_failure_everyone_gets_a_result(call: Callable[..., list[Any]]) -> None:
    first, second = call(7, "DataError")
    assert tuple(first) == ("", "", 10)
    assert tuple(second) == ("", "", 11)
