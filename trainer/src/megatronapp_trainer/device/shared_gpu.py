"""megatron-core on GPUs that several ranks share, whose collectives go through gloo."""

import contextlib
from collections.abc import Iterator

import torch.distributed as dist


def install() -> None:
    """Let megatron-core reduce gradients one tensor after another: gloo has no coalesced reduction of CUDA tensors."""
    from megatron.core.distributed import param_and_grad_buffer

    param_and_grad_buffer._coalescing_manager = _uncoalesced


@contextlib.contextmanager
def _uncoalesced(group: dist.ProcessGroup, *, async_ops: bool) -> Iterator[None]:
    """Leave the collectives within the context as they are.

    They must not be asynchronous, as nothing would wait for them; `config/checks.py` refuses the flags that lead to it.
    """
    assert not async_ops, f"asynchronous reduction over gloo in a group of {group.size()} ranks"
    yield
