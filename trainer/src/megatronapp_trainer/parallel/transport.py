"""Transfers between a pipeline stage and its neighbours."""

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:  # an observer of steps needs no torch
    import torch


class TransferRequest(Protocol):
    """A transfer that was posted."""

    def wait(self) -> Any:  # noqa: ANN401 - the type of the library underneath
        """Wait until the tensor may be used or reused."""


class PostedTransfers(NamedTuple):
    """The result of one post: tensors that are being received, and the requests to wait for."""

    from_prev: "torch.Tensor | None"
    from_next: "torch.Tensor | None"
    requests: dict[str, TransferRequest]
    """By direction: send_next, send_prev, recv_prev, recv_next."""


class Transport(Protocol):
    """Moves activations and their gradients between stages. A wrapper, such as that of the tracer, delegates to it."""

    @property
    def next_rank(self) -> int:
        """Global rank of the next stage; of the last stage the first one."""

    @property
    def prev_rank(self) -> int:
        """Global rank of the previous stage; of the first stage the last one."""

    def post(
        self,
        *,
        send_next: "torch.Tensor | None",
        send_prev: "torch.Tensor | None",
        recv_prev: bool,
        recv_next: bool,
        tensor_shape: Any,  # noqa: ANN401 - list of int or torch.Size
    ) -> PostedTransfers:
        """Start these transfers and return without waiting for them. Received tensors have `tensor_shape`."""

    def close(self, *, drain: bool = True) -> None:
        """End the transport; with `drain`, what was sent is delivered first. Process groups stay as they are."""
