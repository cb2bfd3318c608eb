"""Exchange of orders between all ranks of a job, on the host: gloo, for ranks on GPUs, too.

The group is apart from those of torch.distributed, because with MegaFBD the ranks of each role are a world of their own
and orders go to both.
"""

import dataclasses
import datetime
import json
import struct
from collections.abc import Sequence
from typing import Any

import torch
from torch._C._distributed_c10d import AllreduceOptions, BroadcastOptions, ProcessGroupGloo, ReduceOp, Store

from megatronapp_common.control.orders import Order
from megatronapp_trainer.errors import TransferError

MESSAGE_BYTES = 2048
"""Size of every message: a broadcast is posted before its content is known to the receivers."""
MAX_PROBLEM_BYTES = 512
"""Most bytes of the text with which a rank refuses an order; it is cut there."""
_HEAD = struct.Struct("<QI")  # iteration, length of the JSON


class OrderMessage:
    """Orders that rank 0 read at a step boundary, as a message of fixed size."""

    @staticmethod
    def pack(iteration: int, orders: Sequence[Order]) -> torch.Tensor:
        """Return the message as bytes; `orders` are those that `fitting` chose."""
        text = json.dumps([order.to_json() for order in orders], separators=(",", ":")).encode()
        data = _HEAD.pack(iteration, len(text)) + text
        return torch.frombuffer(bytearray(data.ljust(MESSAGE_BYTES, b"\0")), dtype=torch.uint8)

    @staticmethod
    def unpack(message: torch.Tensor, *, iteration: int) -> list[Order]:
        """Return the orders. Raises TransferError if rank 0 read them at another step boundary than this rank."""
        data = message.numpy().tobytes()
        at, length = _HEAD.unpack_from(data)
        if at != iteration:
            raise TransferError(
                f"rank 0 gave orders after {at} steps, and this rank expected those after {iteration} steps"
            )
        return [Order.from_json(entry) for entry in json.loads(data[_HEAD.size : _HEAD.size + length])]


def fitting(orders: Sequence[Order]) -> list[Order]:
    """Return the first orders that fit into a message together; the others follow in the next one.

    An order that fits into no message loses its recipe, so that the ranks refuse it and later orders follow.
    """
    chosen: list[Order] = []
    for order in orders:
        sent = order if _fits([order]) else dataclasses.replace(order, recipe=None)
        if not _fits([*chosen, sent]):
            break
        chosen.append(sent)
    return chosen


def _fits(orders: Sequence[Order]) -> bool:
    return len(json.dumps([order.to_json() for order in orders], separators=(",", ":"))) <= MESSAGE_BYTES - _HEAD.size


class PendingOrders:
    """Orders that were posted at a step boundary and hold from the next one on."""

    def __init__(self, work: Any, message: torch.Tensor, iteration: int) -> None:  # noqa: ANN401 - torch's Work
        self._work = work
        self._message = message
        self._iteration = iteration

    def read(self) -> list[Order]:
        """Wait for the orders, which are the same on all ranks."""
        self._work.wait()
        return OrderMessage.unpack(self._message, iteration=self._iteration)


class ControlGroup:
    """All ranks of a job, of both roles with MegaFBD. Every method is collective over them."""

    def __init__(self, store: Store, rank: int, size: int, timeout: datetime.timedelta) -> None:
        """Connect the ranks. `timeout`: most time that a rank may be late."""
        self._group: Any = ProcessGroupGloo(store, rank, size, timeout)  # torch's stubs lack its collectives
        self._is_first = rank == 0

    def post(self, iteration: int, orders: Sequence[Order]) -> PendingOrders:
        """Start to broadcast orders of rank 0 after `iteration` steps, and return at once."""
        message = OrderMessage.pack(iteration, orders if self._is_first else ())
        options = BroadcastOptions()
        options.rootRank = 0
        return PendingOrders(self._group.broadcast([message], options), message, iteration)

    def exchange(self, iteration: int, orders: Sequence[Order], *, stop: bool) -> tuple[list[Order], bool]:
        """Return the orders of rank 0, and whether any rank was asked to stop by a signal.

        The sum over the ranks of `stop` and of messages of zeros, except for rank 0: so that a signal to any worker
        ends a pause, as it ends a running training.
        """
        message = torch.zeros(MESSAGE_BYTES + 1, dtype=torch.uint8)
        if self._is_first:
            message[:MESSAGE_BYTES] = OrderMessage.pack(iteration, orders)
        message[MESSAGE_BYTES] = stop
        options: Any = AllreduceOptions()
        options.reduceOp = ReduceOp.MAX
        self._group.allreduce([message], options).wait()
        return OrderMessage.unpack(message[:MESSAGE_BYTES], iteration=iteration), bool(message[MESSAGE_BYTES])

    def first_problem(self, problem: str) -> str:
        """Return the text of the first rank that has one, the same on all ranks; empty: none has."""
        mine = torch.zeros(MAX_PROBLEM_BYTES, dtype=torch.uint8)
        data = problem.encode()[:MAX_PROBLEM_BYTES]
        mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else 0
        found = [torch.zeros_like(mine) for _ in range(self._group.size())]
        self._group.allgather([found], [mine]).wait()
        texts = [bytes(text.tolist()).rstrip(b"\0").decode(errors="ignore") for text in found]
        return next((text for text in texts if text), "")
