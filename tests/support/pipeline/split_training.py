"""Training steps whose tasks F, B and W run in a given order: a small executor with split layers, or megatron-core's.

Tasks are (kind, microbatch): "F", "B" (input gradient alone), "BW" (both gradients), "W".
"""

import hashlib
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import small_training

Task = tuple[str, int]
MICROBATCHES = 4
MODEL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 2 --train-iters 4 "
    "--lr 1e-2 --mock-data --vocab-size 120 --attention-dropout 0 --hidden-dropout 0 --eval-iters 0"
)
GROUPED = (
    "--swiglu --normalization RMSNorm --position-embedding-type rope --group-query-attention --num-query-groups 2 "
    "--disable-bias-linear --untie-embeddings-and-output-weights"
)


def tasks_of(splits: Sequence[bool], waits: Sequence[int]) -> list[Task]:
    """Return 1F1B with backward passes that are split or not; after each, `waits` pending W run, the rest at the end.

    A whole backward pass runs after all pending W, as it must.
    """
    tasks: list[Task] = [("F", 0)]
    pending: list[Task] = []
    for microbatch, (split, wait) in enumerate(zip(splits, waits, strict=True)):
        if microbatch + 1 < len(splits):
            tasks.append(("F", microbatch + 1))
        if split:
            tasks.append(("B", microbatch))
            pending.append(("W", microbatch))
        else:
            tasks += [*pending, ("BW", microbatch)]
            pending = []
        tasks += pending[:wait]
        pending = pending[wait:]
    return tasks + pending


WHOLE = tasks_of((False,) * MICROBATCHES, (0,) * MICROBATCHES)
LATE = tasks_of((True,) * MICROBATCHES, (0, 1, 0, 1))
MIXED = tasks_of((True, True, False, True), (0, 1, 0, 0))


class Executor:
    """Runs the tasks of steps on this rank, with split layers if there is a store."""

    def __init__(self, flags: str, *, split: bool, **options: Any) -> None:
        warnings.simplefilter("ignore")
        from megatron.core.distributed import finalize_model_grads

        from megatronapp_trainer.pipeline.split_backward import install_split_backward

        self.run = small_training.prepare(f"{MODEL} --global-batch-size 8 {flags}")
        (self.chunk,) = self.run.state.chunks
        self.store = install_split_backward([self.chunk], **options)[0] if split else None
        self.finalize = finalize_model_grads
        self.task: Task = ("none", -1)
        self._passes: dict[int, tuple[Any, Any]] = {}

    def step(
        self, number: int, tasks: Iterable[Task], after: Callable[[Task], None] = lambda task: None
    ) -> list[float]:
        """Run the tasks and the optimizer; the losses of the microbatches on the last stage."""
        self.gradients(number, tasks, after)
        self.run.state.optimizer.step()
        return self.losses

    def gradients(self, number: int, tasks: Iterable[Task], after: Callable[[Task], None] = lambda task: None) -> None:
        """Run the tasks and reduce the gradients."""
        self.losses: list[float] = []
        self.chunk.zero_grad_buffer()
        self.run.state.optimizer.zero_grad()
        if self.store is not None:
            self.store.begin_step(MICROBATCHES)
        for self.task in tasks:
            kind, microbatch = self.task
            if kind == "F":
                self._forward(number, microbatch)
            elif kind == "W":
                assert self.store is not None
                self.store.run(microbatch)
            else:
                self._backward(microbatch, split=kind == "B")
            after(self.task)
        self.task = ("finish", -1)
        if self.store is not None:
            self.store.finish_step()
        self.finalize([self.chunk])

    def _forward(self, step: int, microbatch: int) -> None:
        import torch
        import torch.distributed as dist
        from megatron.core.utils import get_attr_wrapped_model

        layout = self.run.layout
        generator = torch.Generator().manual_seed(1000 * step + 10 * microbatch + layout.data_rank)
        device = self.run.device.torch_device
        text = torch.randint(120, (2, 17), generator=generator).to(device)
        received = None
        if not layout.is_first_stage:
            core = self.run.core_config
            length = 16 // layout.tensor_size if core.sequence_parallel else 16
            received = torch.empty(length, 2, 32, dtype=core.pipeline_dtype, device=device, requires_grad=True)
            dist.recv(received.detach(), layout.rank - layout.tensor_size)
            get_attr_wrapped_model(self.chunk, "set_input_tensor")(received)
        output = self.chunk(text[:, :-1], torch.arange(16, device=device).expand(2, 16), None, labels=text[:, 1:])
        if layout.is_last_stage:
            output = output.mean() / MICROBATCHES
            self.losses.append(output.item())
        else:
            dist.send(output.detach(), layout.rank + layout.tensor_size)
        self._passes[microbatch] = received, output

    def _backward(self, microbatch: int, *, split: bool) -> None:
        import torch
        import torch.distributed as dist

        layout = self.run.layout
        received, output = self._passes.pop(microbatch)
        gradient = None
        if not layout.is_last_stage:
            gradient = torch.empty_like(output)
            dist.recv(gradient, layout.rank + layout.tensor_size)
        if self.store is not None:
            with self.store.backward(microbatch, split=split):
                output.backward(gradient)
        elif microbatch < MICROBATCHES - 1:
            with self.chunk.no_sync():
                output.backward(gradient)
        else:
            output.backward(gradient)
        if received is not None:
            dist.send(received.grad, layout.rank - layout.tensor_size)

    def digests(self) -> dict[str, tuple[str, str]]:
        """Digests of each parameter and its gradient."""
        return {name: (_digest(part), _digest(part.main_grad)) for name, part in self.chunk.named_parameters()}


def _digest(tensor: Any) -> str:
    import torch

    return hashlib.sha256(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:12]


def trace(flags: str, tasks: Sequence[Task], *, split: bool = True, steps: int = 3, **options: Any) -> list[Any]:
    """Losses, and digests of weights and gradients, after each step."""
    executor = Executor(flags, split=split, **options)
    return [(executor.step(number, tasks), executor.digests()) for number in range(steps)]
