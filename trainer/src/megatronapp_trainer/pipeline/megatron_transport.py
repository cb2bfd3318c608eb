"""The transport of megatron-core, and its communicator over any transport, which its schedules need."""

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

from megatronapp_trainer.parallel.transport import PostedTransfers, TransferRequest, Transport


class MegatronTransport:
    """Sends and receives as megatron-core does, through torch.distributed."""

    def __init__(self, pipeline_group: dist.ProcessGroup, core_config: Any) -> None:  # noqa: ANN401 - untyped library
        self._communicator = P2PCommunicator(pipeline_group, core_config)

    @property
    def next_rank(self) -> int:
        """Global rank of the next stage."""
        rank: int = self._communicator.next_rank
        return rank

    @property
    def prev_rank(self) -> int:
        """Global rank of the previous stage."""
        rank: int = self._communicator.prev_rank
        return rank

    def post(
        self,
        *,
        send_next: torch.Tensor | None,
        send_prev: torch.Tensor | None,
        recv_prev: bool,
        recv_next: bool,
        tensor_shape: Any,  # noqa: ANN401 - list of int or torch.Size
    ) -> PostedTransfers:
        """Start the transfers in megatron-core's order, which keeps two stages from waiting for each other."""
        return PostedTransfers(
            *self._communicator._communicate(
                tensor_send_next=send_next,
                tensor_send_prev=send_prev,
                recv_prev=recv_prev,
                recv_next=recv_next,
                tensor_shape=tensor_shape,
                wait_on_reqs=False,
            )
        )

    def close(self, *, drain: bool = True) -> None:
        """Do nothing: the process group has other users."""


class TransportCommunicator(P2PCommunicator):  # type: ignore[misc] # megatron-core carries no types
    """megatron-core's communicator, all of whose methods end in `_communicate`, with a transport underneath."""

    def __init__(self, pipeline_group: dist.ProcessGroup, core_config: Any, transport: Transport) -> None:  # noqa: ANN401
        super().__init__(pipeline_group, core_config)
        self._transport = transport

    def _communicate(
        self,
        *,
        tensor_send_next: torch.Tensor | None,
        tensor_send_prev: torch.Tensor | None,
        recv_prev: bool,
        recv_next: bool,
        tensor_shape: Any,  # noqa: ANN401 - list of int or torch.Size
        wait_on_reqs: bool = True,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, dict[str, TransferRequest] | None]:
        posted = self._transport.post(
            send_next=tensor_send_next,
            send_prev=tensor_send_prev,
            recv_prev=recv_prev,
            recv_next=recv_next,
            tensor_shape=tensor_shape,
        )
        if not wait_on_reqs:
            return posted
        for request in posted.requests.values():
            request.wait()
        return posted.from_prev, posted.from_next, None
