"""Errors that are shared by all ranks, so that one failing rank never leaves the others waiting in a collective."""

import contextlib
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch.distributed as dist

from megatronapp_trainer.errors import TrainerError
from megatronapp_trainer.parallel.worlds import global_rank_of

T = TypeVar("T")

_LOST_PEER = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Timed out waiting",
    "Socket closed",
)
"""Texts of gloo's RuntimeError when the other side is disconnected."""


def is_peer_lost_error(error: BaseException) -> bool:
    """Return True if torch, which has several texts for it, reports that a peer is lost or unreachable."""
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _LOST_PEER)


def is_port_in_use_error(error: BaseException) -> bool:
    """Return True if torch's store found its port taken."""
    return isinstance(error, dist.DistNetworkError) and "EADDRINUSE" in str(error)


class Agreement:
    """Collects the failure of this rank; `settle` makes it the failure of every rank."""

    def __init__(self) -> None:
        self._error: Exception | None = None

    @contextlib.contextmanager
    def attempt(self) -> Iterator[None]:
        """Run work of this rank alone; no collective may be inside."""
        try:
            yield
        except Exception as error:  # any error must reach the other ranks before it is raised
            self._error = error

    def settle(self) -> None:
        """Raise on all ranks if any of them has failed, naming the first; collective over all ranks.

        Raises:
            Exception: this rank's own failure, unchanged.
            TrainerError: the failure of another rank, of the same class if it is one of the trainer's.
        """
        failures = _gather(self._error)
        if self._error is not None:
            raise self._error
        for rank, failure in enumerate(failures):
            if failure is not None:
                kind, text = failure
                raise kind(f"rank {global_rank_of(rank)}: {text}")


def on_all_ranks(work: Callable[[], T]) -> T:
    """Run `work`, free of collectives, on every rank; collective. Raises on all of them if it failed on one."""
    agreement = Agreement()
    results: list[T] = []
    with agreement.attempt():
        results.append(work())
    agreement.settle()
    return results[0]


def on_rank_zero(work: Callable[[], T]) -> T | None:
    """Run `work` on rank 0 while the others wait; its result there, None elsewhere. Raises everywhere."""
    return on_all_ranks(lambda: work() if rank() == 0 else None)


def broadcast_from_zero(work: Callable[[], T]) -> T:
    """Run `work` on rank 0 and give its result to every rank; the result must be picklable."""
    value = on_rank_zero(work)
    if not dist.is_initialized():
        assert value is not None
        return value
    box: list[T | None] = [value]
    dist.broadcast_object_list(box, src=0)
    answer: T = box[0]  # type: ignore[assignment]  # filled by the broadcast
    return answer


def gather_from_all(value: T) -> list[T]:
    """Return the value of every rank, by rank; collective, and each value must be picklable."""
    if not dist.is_initialized():
        return [value]
    everyone: list[T | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone  # type: ignore[return-value]  # filled by the exchange


def gather_to_zero(value: T) -> list[T] | None:
    """Return the value of every rank on rank 0, None on the others; collective, and each value must be picklable."""
    if not dist.is_initialized():
        return [value]
    everyone: list[T | None] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(value, everyone, dst=0)
    return everyone  # type: ignore[return-value]  # filled by the exchange


def rank() -> int:
    """Return this process's rank, 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """Return the number of ranks, 1 without a process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def _raisable(error: Exception | None) -> type[TrainerError]:
    """Return the class for other ranks: the error's own if it is ours, or its nearest base that takes only a text."""
    ours = (base for base in type(error).__mro__ if issubclass(base, TrainerError))
    return next((base for base in ours if base.__init__ is TrainerError.__init__), TrainerError)


def _gather(error: Exception | None) -> list[tuple[type[TrainerError], str] | None]:
    if not dist.is_initialized():
        return []
    kind = _raisable(error)
    own = None if error is None else (kind, str(error) or type(error).__name__)
    everyone: list[tuple[type[TrainerError], str] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    return everyone
