"""megatron-core's point-to-point communicator with a span around every post and every wait.

Only `_communicate` is overridden: the schedules, the order of posts and the requests stay megatron-core's own.
"""

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

from megatronapp_common.trace import RecordKind
from megatronapp_trainer.scan.peers import SENDS, PeerCounters
from megatronapp_trainer.scan.recorder import Recorder, RecordKey, TimeMark


class TransferRequest(Protocol):
    """Handle of a posted transfer, as the schedules use it."""

    def wait(self) -> Any:  # noqa: ANN401 - the type of the library underneath
        """Wait until the tensor may be used or reused."""


class TracedRequest:
    """A request whose wait is recorded, once."""

    def __init__(self, request: TransferRequest, wait: Callable[[TransferRequest], Any]) -> None:
        self._request: TransferRequest | None = request
        self._wait = wait

    def wait(self) -> Any:  # noqa: ANN401 - the type of the library underneath
        """Wait, recording how long; a second call returns at once."""
        if self._request is None:
            return None
        request, self._request = self._request, None
        return self._wait(request)


class TracedP2PCommunicator(P2PCommunicator):  # type: ignore[misc] # megatron-core carries no types
    """Records SEND_POST, RECV_POST, SEND_WAIT and RECV_WAIT with (directed pair, ordinal) as their key."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        config: Any,  # noqa: ANN401 - megatron-core's ModelParallelConfig, untyped
        *,
        recorder: Recorder,
        peers: PeerCounters,
        withhold: Callable[[int], None],
    ) -> None:
        super().__init__(group, config)
        self._recorder = recorder
        self._peers = peers
        self._withhold = withhold

    def _communicate(
        self,
        *,
        tensor_send_next: torch.Tensor | None,
        tensor_send_prev: torch.Tensor | None,
        recv_prev: bool,
        recv_next: bool,
        tensor_shape: Any,  # noqa: ANN401 - list of int or torch.Size
        wait_on_reqs: bool = True,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, dict[str, TracedRequest] | None]:
        mark = self._recorder.host_mark()
        from_prev, from_next, requests = super()._communicate(
            tensor_send_next=tensor_send_next,
            tensor_send_prev=tensor_send_prev,
            recv_prev=recv_prev,
            recv_next=recv_next,
            tensor_shape=tensor_shape,
            wait_on_reqs=False,
        )
        tensors = {
            "send_next": tensor_send_next,
            "send_prev": tensor_send_prev,
            "recv_prev": from_prev,
            "recv_next": from_next,
        }
        traced = {name: self._traced(name, request, tensors[name], mark) for name, request in requests.items()}
        if not wait_on_reqs:
            return from_prev, from_next, traced
        _wait_all(traced.values())
        return from_prev, from_next, None

    def _traced(
        self, name: str, request: TransferRequest, tensor: torch.Tensor | None, mark: TimeMark
    ) -> TracedRequest:
        """Record the post of one transfer and prepare the record of its wait."""
        assert tensor is not None
        peer = self.next_rank if name.endswith("next") else self.prev_rank
        slot, ordinal = self._peers.next_message(name, peer)
        sends = name in SENDS
        posted = RecordKey(RecordKind.SEND_POST if sends else RecordKind.RECV_POST, comm=slot, ordinal=ordinal)
        self._recorder.transfer(posted, mark, tensor.numel() * tensor.element_size())
        waited = RecordKey(RecordKind.SEND_WAIT if sends else RecordKind.RECV_WAIT, comm=slot, ordinal=ordinal)

        def wait(request: TransferRequest) -> Any:  # noqa: ANN401 - the type of the library underneath
            begun = self._recorder.enter(waited)
            result = request.wait()
            if not sends:
                self._withhold(peer)
            self._recorder.leave(waited, begun)
            return result

        return TracedRequest(request, wait)


def _wait_all(requests: Iterable[TracedRequest]) -> None:
    for request in requests:
        request.wait()
