"""The optimizer works over lists of tensors: few waits for the device, and megatron-core's own numbers."""

import collections
import warnings
from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.torch

RunRanks = Callable[..., list[Any]]

MODEL = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --vocab-size 64 --mock-data "
    "--micro-batch-size 1 --global-batch-size 2 --train-iters 9 --lr 1e-2 --eval-iters 0 --clip-grad 0.1"
)


def prepared(flags: str) -> Any:
    warnings.simplefilter("ignore")
    from megatronapp_trainer.config import parse
    from megatronapp_trainer.device import prepare_device
    from megatronapp_trainer.parallel.groups import initialize_groups
    from megatronapp_trainer.training.build import build_iterators, build_run, build_schedule, layout_of
    from megatronapp_trainer.training.loop import Trainer
    from megatronapp_trainer.training.signals import StopRequest

    config = parse(f"{MODEL} {flags}".split())
    layout = layout_of(config)
    device = prepare_device(layout.local_rank)
    initialize_groups(config, layout, device)
    run = build_run(config, layout, device, vocab_size=64)
    return run, Trainer(run, build_iterators(config, layout, 0), build_schedule(run), stop_request=StopRequest())


def operations_of_the_norm(flags: str) -> tuple[int, int, int]:
    """Operations and reads of scalars that a gradient norm takes, and the number of gradients."""
    from torch.utils._python_dispatch import TorchDispatchMode

    calls: collections.Counter[str] = collections.Counter()

    class Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            calls[str(function)] += 1
            return function(*args, **(kwargs or {}))

    run, trainer = prepared(flags)
    optimizer, counts = run.state.optimizer, Counting()  # type: ignore[no-untyped-call]
    norm = optimizer.get_grad_norm

    def counted() -> Any:
        with counts:
            return norm()

    optimizer.get_grad_norm = counted
    trainer.step()
    gradients = sum(len(part.get_main_grads_for_grad_norm()) for part in optimizer.chained_optimizers)
    return calls.total(), calls["aten._local_scalar_dense.default"], gradients


def weights_with_and_without(flags: str) -> tuple[bool, list[float], list[float]]:
    """Return whether weights after three steps equal those of megatron-core's own functions, and all gradient norms."""
    import torch
    from megatron.core import utils
    from megatron.core.optimizer import clip_grads

    from megatronapp_trainer.training import optimizer_kernels

    weights: list[list[torch.Tensor]] = []
    norms: list[list[float]] = []
    for ours in (True, False):
        optimizer_kernels.install()
        if not weights:
            run, trainer = prepared(flags)
        else:
            from megatronapp_trainer.training.build import build_iterators, build_run, build_schedule
            from megatronapp_trainer.training.loop import Trainer
            from megatronapp_trainer.training.signals import StopRequest

            again = build_run(run.config, run.layout, run.device, vocab_size=64)
            trainer = Trainer(
                again, build_iterators(run.config, run.layout, 0), build_schedule(again), stop_request=StopRequest()
            )
            run = again
        assert clip_grads.l2_norm_impl is optimizer_kernels.list_norm
        if not ours:
            clip_grads.l2_norm_impl = utils.local_multi_tensor_l2_norm
            clip_grads.multi_tensor_scale_impl = utils.local_multi_tensor_scale
        norms.append([trainer.step().grad_norm or 0.0 for _ in range(3)])
        weights.append([parameter.detach().clone() for parameter in run.state.chunks[0].parameters()])
    equal = all(torch.equal(fused, reference) for fused, reference in zip(*weights, strict=True))
    return equal, norms[0], norms[1]


@pytest.mark.parametrize("flags", ["", "--bf16", "--bf16 --use-distributed-optimizer"])
def test_a_norm_is_a_few_operations_over_all_gradients(run_ranks: RunRanks, flags: str) -> None:
    ((operations, reads, gradients),) = run_ranks(1, operations_of_the_norm, flags)
    assert gradients > 40
    assert operations < 20
    assert reads == 1


@pytest.mark.parametrize("flags", ["", "--bf16", "--bf16 --use-distributed-optimizer"])
def test_norm_and_clipping_are_megatrons_to_the_last_bit(run_ranks: RunRanks, flags: str) -> None:
    ((equal, ours, theirs),) = run_ranks(1, weights_with_and_without, flags)
    assert min(ours) > 0.1
    assert ours == theirs
    assert equal
