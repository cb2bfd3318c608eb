"""Transfers between stages whose ranks meet over gloo, which sends memory of the host alone, for tensors of GPUs."""

import dataclasses
from typing import Any

import torch
import torch.distributed as dist

from megatronapp_trainer.parallel.transport import PostedTransfers, TransferRequest

_FORWARD, _BACKWARD = 1, 2
"""Tags of activations and of gradients: with two stages both are sent by the same rank."""


class HostTransport:
    """Sends and receives through copies in the memory of the host.

    For ranks that share a GPU, which NCCL refuses (`--ranks-per-gpu`). A send waits for the device.
    """

    def __init__(self, pipeline_group: dist.ProcessGroup, dtype: torch.dtype, device: torch.device) -> None:
        """Take the ranks of a pipeline in the order of their stages, and what is received: its type and its device."""
        self._group = pipeline_group
        self._dtype = dtype
        self._device = device
        ranks, place = dist.get_process_group_ranks(pipeline_group), dist.get_rank(pipeline_group)
        self.next_rank = ranks[(place + 1) % len(ranks)]
        """Global rank of the next stage; of the last stage the first one."""
        self.prev_rank = ranks[place - 1]
        """Global rank of the previous stage; of the first stage the last one."""

    def post(
        self,
        *,
        send_next: torch.Tensor | None,
        send_prev: torch.Tensor | None,
        recv_prev: bool,
        recv_next: bool,
        tensor_shape: Any,  # noqa: ANN401 - list of int or torch.Size
    ) -> PostedTransfers:
        """Start these transfers. Received tensors hold their content once their request was waited for."""
        requests: dict[str, TransferRequest] = {}
        for name, tensor, rank, tag in (
            ("send_next", send_next, self.next_rank, _FORWARD),
            ("send_prev", send_prev, self.prev_rank, _BACKWARD),
        ):
            if tensor is not None:
                copy = tensor.detach().cpu()
                work = dist.isend(copy, dst=rank, group=self._group, tag=tag)
                requests[name] = _Send(work, copy)
        received: dict[str, torch.Tensor | None] = {"recv_prev": None, "recv_next": None}
        for name, is_due, rank, tag in (
            ("recv_prev", recv_prev, self.prev_rank, _FORWARD),
            ("recv_next", recv_next, self.next_rank, _BACKWARD),
        ):
            if is_due:
                copy = torch.empty(tensor_shape, dtype=self._dtype)
                work = dist.irecv(copy, src=rank, group=self._group, tag=tag)
                into = torch.empty(tensor_shape, dtype=self._dtype, device=self._device, requires_grad=True)
                received[name] = into
                requests[name] = _Receipt(work, copy, into)
        return PostedTransfers(received["recv_prev"], received["recv_next"], requests)

    def close(self, *, drain: bool = True) -> None:
        """Do nothing: the process group has other users."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Send:
    work: Any
    copy: torch.Tensor
    """Must live until it is sent."""

    def wait(self) -> None:
        self.work.wait()


@dataclasses.dataclass(frozen=True, slots=True)
class _Receipt:
    work: Any
    copy: torch.Tensor
    into: torch.Tensor

    def wait(self) -> None:
        self.work.wait()
        with torch.no_grad():
            self.into.copy_(self.copy)
