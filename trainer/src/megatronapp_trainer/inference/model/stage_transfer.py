"""Transfer of hidden states between pipeline stages while the model generates."""

from typing import Any

import torch
import torch.distributed as dist

from megatronapp_trainer.parallel.layout import Layout


class StageTransfer:
    """Receiver and sender of the hidden states [N, 1, H] of one rank."""

    def __init__(self, layout: Layout, *, hidden: int, dtype: torch.dtype, device: torch.device) -> None:
        self._layout = layout
        self._hidden = hidden
        self._like: dict[str, Any] = {"dtype": dtype, "device": device}
        self.buffers: dict[tuple[int, int | None], torch.Tensor] = {}
        """Buffers of decode steps, at fixed addresses for CUDA graphs, by number of slots and turn."""

    def receive(self, tokens: int) -> torch.Tensor | None:
        """Receive the hidden states of a prompt's tokens from the stage before; None on the first stage."""
        return self._receive(torch.empty(tokens, 1, self._hidden, **self._like))

    def receive_decode(self, slots: int, buffer_set: int | None) -> torch.Tensor | None:
        """Receive the hidden states of a decode step into the buffer of this size; None on the first stage."""
        if (slots, buffer_set) not in self.buffers:
            self.buffers[slots, buffer_set] = torch.empty(slots, 1, self._hidden, **self._like)
        return self._receive(self.buffers[slots, buffer_set])

    def _receive(self, hidden: torch.Tensor) -> torch.Tensor | None:
        # NCCL's stream waits for what was launched before, such as the last step that reads the same buffer, and what
        # is launched after waits for it; gloo returns when the numbers are there.
        if self._layout.is_first_stage:
            return None
        from megatron.core import parallel_state

        source = parallel_state.get_pipeline_model_parallel_prev_rank()
        dist.recv(hidden, src=source, group=parallel_state.get_pipeline_model_parallel_group())
        return hidden

    def send(self, hidden: torch.Tensor) -> None:
        """Send hidden states to the next stage. The next step may write over them.

        With NCCL its kernels wait for the transfer; gloo returns after it.
        """
        from megatron.core import parallel_state

        target = parallel_state.get_pipeline_model_parallel_next_rank()
        dist.send(hidden.contiguous(), dst=target, group=parallel_state.get_pipeline_model_parallel_group())
