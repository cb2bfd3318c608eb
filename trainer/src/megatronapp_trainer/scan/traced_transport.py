"""A transport with a span around every post and every wait; order and requests are those of the one underneath."""

from collections.abc import Callable
from typing import Any

import torch

from megatronapp_common.trace import RecordKind
from megatronapp_trainer.parallel.transport import PostedTransfers, TransferRequest, Transport
from megatronapp_trainer.scan.peers import SENDS, PeerCounters
from megatronapp_trainer.scan.recorder import Recorder, RecordKey, TimeMark


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


class TracedTransport:
    """Records SEND_POST, RECV_POST, SEND_WAIT and RECV_WAIT with (directed pair, ordinal) as their key."""

    def __init__(
        self,
        transport: Transport,
        *,
        recorder: Recorder,
        peers: PeerCounters,
        withhold: Callable[[int], object],
    ) -> None:
        self._transport = transport
        self._recorder = recorder
        self._peers = peers
        self._withhold = withhold

    @property
    def next_rank(self) -> int:
        """Return the rank that the transport underneath names."""
        return self._transport.next_rank

    @property
    def prev_rank(self) -> int:
        """Return the rank that the transport underneath names."""
        return self._transport.prev_rank

    def post(
        self,
        *,
        send_next: torch.Tensor | None,
        send_prev: torch.Tensor | None,
        recv_prev: bool,
        recv_next: bool,
        tensor_shape: Any,  # noqa: ANN401 - list of int or torch.Size
    ) -> PostedTransfers:
        """Post through the transport underneath, and record it."""
        mark = self._recorder.host_mark()
        posted = self._transport.post(
            send_next=send_next,
            send_prev=send_prev,
            recv_prev=recv_prev,
            recv_next=recv_next,
            tensor_shape=tensor_shape,
        )
        tensors = {
            "send_next": send_next,
            "send_prev": send_prev,
            "recv_prev": posted.from_prev,
            "recv_next": posted.from_next,
        }
        traced: dict[str, TransferRequest] = {
            name: self._traced(name, request, tensors[name], mark) for name, request in posted.requests.items()
        }
        return posted._replace(requests=traced)

    def close(self, *, drain: bool = True) -> None:
        """End the transport underneath."""
        self._transport.close(drain=drain)

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
