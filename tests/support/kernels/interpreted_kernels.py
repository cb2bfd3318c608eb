"""Kernels of training in Triton's interpreter: values, gradients and whole trainings, next to plain torch.

A separate process, started with TRITON_INTERPRET=1: Triton reads it when it is imported. Prints results as JSON.

    python interpreted_kernels.py FUNCTION[=ARGUMENT]...
"""

import json
import sys
import warnings
from typing import Any

MODEL = (
    "--num-layers 1 --hidden-size 32 --num-attention-heads 2 --seq-length 8 --vocab-size 40 --mock-data "
    "--micro-batch-size 2 --global-batch-size 4 --train-iters 3 --lr 1e-2 --eval-iters 0 "
    "--attention-dropout 0 --hidden-dropout 0 --untie-embeddings-and-output-weights"
)


def _largest_error(function: Any, reference: Any, *inputs: Any) -> float:
    """Largest relative error of a function's result and of its gradients."""
    import torch

    pairs = []
    for call in (function, reference):
        leaves = [value.clone().requires_grad_() for value in inputs]
        result = call(*leaves)
        generator = torch.Generator().manual_seed(1)
        result.backward(torch.randn(result.shape, generator=generator))
        pairs.append([result.detach(), *[leaf.grad for leaf in leaves]])
    return max(
        float((found - expected).abs().max() / expected.abs().max()) for found, expected in zip(*pairs, strict=True)
    )


def errors() -> dict[str, float]:
    """Largest relative error of each kernel; no size is a multiple of a block."""
    import torch
    from torch.nn import functional

    from megatronapp_trainer.models.kernels.activations import Activation, bias_activation
    from megatronapp_trainer.models.kernels.cross_entropy import cross_entropy
    from megatronapp_trainer.models.kernels.norms import norm
    from megatronapp_trainer.models.kernels.residual import bias_residual

    torch.manual_seed(0)
    narrow, wide = (torch.randn(35, 2, width) for width in (70, 140))
    bias, weight = torch.randn(70), torch.rand(70) + 0.5
    labels = torch.randint(0, 4200, (3, 2))
    tanh = lambda x: functional.gelu(x, approximate="tanh")  # noqa: E731

    def gated(x: Any) -> Any:
        gate, up = x.chunk(2, -1)
        return functional.silu(gate) * up

    def losses(logits: Any) -> Any:
        return functional.cross_entropy(logits.view(-1, 4200), labels.view(-1), reduction="none").view(3, 2)

    return {
        "gelu": _largest_error(
            lambda x, b: bias_activation(x, b, Activation.GELU), lambda x, b: functional.gelu(x + b), narrow, bias
        ),
        "tanh": _largest_error(lambda x: bias_activation(x, None, Activation.GELU_TANH), tanh, narrow),
        "swiglu": _largest_error(
            lambda x, b: bias_activation(x, b, Activation.SWIGLU), lambda x, b: gated(x + b), wide, bias.repeat(2)
        ),
        "residual": _largest_error(bias_residual, lambda x, b, y: y + (x + b), narrow, bias, narrow.flip(0)),
        "layer norm": _largest_error(
            lambda x, w, b: norm(x, w, b, 1e-5),
            lambda x, w, b: functional.layer_norm(x, (70,), w, b, 1e-5),
            narrow,
            weight,
            bias,
        ),
        "rms norm": _largest_error(
            lambda x, w: norm(x, w, None, 1e-5), lambda x, w: functional.rms_norm(x, (70,), w, 1e-5), narrow, weight
        ),
        "embedding": _embedding_error(),
        "cross entropy": _largest_error(lambda x: cross_entropy(x, labels), losses, torch.randn(3, 2, 4200) * 3),
        **_rounding_errors(),
    }


def _rounding_errors() -> dict[str, float]:
    """Largest relative error of matrices in 8 bits. Their numbers are those of e4m3: the interpreter rounds others
    wrongly where they reach the next power of two.
    """
    import torch

    from megatronapp_trainer.models.kernels import fp8, quantize

    rows = torch.randn(3, 9000).mul(40).to(fp8.E4M3).float()
    rows[:, 8900] = fp8.LARGEST
    rows *= torch.tensor([[0.25], [0.0], [8.0]])
    columns = torch.randn(300, 35).mul(40).to(fp8.E4M3).float()
    columns[299] = -fp8.LARGEST
    columns *= 2.0 ** torch.arange(-17, 18)
    columns[:, 1] = 0
    found = {
        "rows in fp8": (rows, rows, quantize.quantize_rows),
        "columns in fp8": (columns, columns.t(), quantize.quantize_columns),
    }
    errors = {}
    for name, (matrix, expected, rounded) in found.items():
        parts = torch.empty(expected.shape, dtype=fp8.E4M3), torch.empty(len(expected), 1)
        rounded(matrix, *parts, fp8.LARGEST, fp8.SMALLEST_SCALE)
        errors[name] = float((fp8.Quantized(*parts).restored() - expected).abs().max() / expected.abs().max())
    return errors


def _embedding_error() -> float:
    import torch

    from megatronapp_trainer.models.kernels.embedding import add_rows

    torch.manual_seed(0)
    tokens, rows = torch.randint(0, 9, (40,)), torch.randn(40, 70)
    total, expected = torch.ones(12, 70), torch.ones(12, 70)
    add_rows(total, tokens, rows)
    return float((total - expected.index_add_(0, tokens, rows)).abs().max())


def split_loss(store: str) -> dict[str, list[float]]:
    """Errors of losses, and of this rank's part of their gradient, of logits whose columns are split over the ranks.

    `store`: the rank, and the file by which two ranks meet.
    """
    import torch
    import torch.distributed as dist

    from megatronapp_trainer.models.kernels.cross_entropy import cross_entropy

    rank, path = store.split(":")
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=int(rank), world_size=2)
    torch.manual_seed(0)
    logits, labels = torch.randn(4, 10), torch.tensor([0, 4, 5, 9])
    first = 5 * dist.get_rank()
    part = logits[:, first : first + 5].clone().requires_grad_()
    losses = cross_entropy(part, labels, first=first, group=dist.group.WORLD)
    losses.sum().backward()  # type: ignore[no-untyped-call]
    whole = logits.clone().requires_grad_()
    torch.nn.functional.cross_entropy(whole, labels, reduction="sum").backward()  # type: ignore[no-untyped-call]
    assert part.grad is not None
    assert whole.grad is not None
    expected = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
    dist.destroy_process_group()
    gradients = (part.grad - whole.grad[:, first : first + 5]).flatten()
    return {"losses": (losses - expected).tolist(), "gradients": gradients.tolist()}


def losses(flags: str) -> dict[str, list[float]]:
    """Losses of a training in plain torch, and on kernels, with weight gradients added directly."""
    warnings.simplefilter("ignore")
    return {"torch": _losses(flags, kernels=False), "kernels": _losses(flags, kernels=True)}


def _losses(flags: str, *, kernels: bool) -> list[float]:
    from megatronapp_trainer.config import parse
    from megatronapp_trainer.device import prepare_device
    from megatronapp_trainer.models import gpt
    from megatronapp_trainer.models.kernels.choice import FusedParts
    from megatronapp_trainer.parallel.groups import destroy_groups, initialize_groups
    from megatronapp_trainer.training.build import build_iterators, build_run, build_schedule, layout_of
    from megatronapp_trainer.training.loop import Trainer
    from megatronapp_trainer.training.signals import StopRequest

    config = parse(f"{MODEL} {flags}".split())
    layout = layout_of(config)
    device = prepare_device(layout.local_rank)
    initialize_groups(config, layout, device)
    if kernels:
        parts = FusedParts(norm=True, activation=True, residual=True, cross_entropy=True)
        gpt.fused_parts = lambda *_arguments: parts  # type: ignore[attr-defined] # until the process ends
    run = build_run(config, layout, device, vocab_size=40)
    trainer = Trainer(run, build_iterators(config, layout, 0), build_schedule(run), stop_request=StopRequest())
    if kernels:
        from megatronapp_trainer.models.kernels.columns import column_sums
        from megatronapp_trainer.pipeline.split_backward import install_direct_gradients

        install_direct_gradients(run.state.chunks, sum_rows=column_sums, embedding_rows=True)
    found = [trainer.step().loss.mean for _ in range(3)]
    destroy_groups()
    return found


FUNCTIONS: dict[str, Any] = {function.__name__: function for function in (errors, split_loss, losses)}

if __name__ == "__main__":
    calls = [call.partition("=") for call in sys.argv[1:]]
    print(json.dumps([FUNCTIONS[name](*([argument] if given else [])) for name, given, argument in calls]))
