"""Attention on a CPU equals megatron-core's own."""

from collections.abc import Callable
from typing import Any

import pytest
import small_training

pytestmark = pytest.mark.torch

RunRanks = Callable[..., list[Any]]

MODEL = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 1 "
    "--global-batch-size 4 --train-iters 8 --lr 2e-3 --mock-data --vocab-size 120 --eval-iters 0"
)


def attention_difference(groups: int, masked: bool) -> tuple[float, float]:
    """Largest differences of output and query gradient between our attention and megatron-core's."""
    import torch
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType

    from megatronapp_trainer.models.attention import TorchAttention

    run = small_training.prepare(f"{MODEL} --attention-dropout 0 --group-query-attention --num-query-groups {groups}")
    options = {"layer_number": 1, "attn_mask_type": AttnMaskType.causal, "attention_type": "self"}
    torch.manual_seed(1)
    query = torch.randn(16, 2, 4, 8, requires_grad=True)
    key, value = torch.randn(2, 16, 2, groups, 8).unbind(0)
    causal = torch.triu(torch.ones(2, 1, 16, 16), diagonal=1).bool()
    causal[0, :, 7:, :7] |= masked
    results = []
    for kind in (TorchAttention, DotProductAttention):
        mask = None if kind is TorchAttention and not masked else causal
        output = kind(run.core_config, **options)(query, key, value, mask)
        results.append((output, torch.autograd.grad(output.square().sum(), query)[0]))
    (ours, our_grad), (theirs, their_grad) = results
    return (ours - theirs).abs().max().item(), (our_grad - their_grad).abs().max().item()


def local_attention_results(flags: str, masked: bool) -> list[list[Any]]:
    """Output and gradients of `--transformer-impl local` and of megatron-core's own attention, as lists."""
    import torch
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType

    from megatronapp_trainer.models.local import LocalAttention

    run = small_training.prepare(f"{MODEL} --attention-dropout 0 --transformer-impl local {flags}")
    options = {"layer_number": 1, "attn_mask_type": AttnMaskType.causal, "attention_type": "self"}
    torch.manual_seed(1)
    inputs = torch.randn(3, 16, 2, 4, 8, dtype=run.core_config.params_dtype, requires_grad=True)
    mask = torch.triu(torch.ones(2, 1, 16, 16), diagonal=1).bool()
    mask[0, :, 7:, :7] = True
    results = []
    for kind in (LocalAttention, DotProductAttention):
        output = kind(run.core_config, **options)(*inputs.unbind(0), mask if masked else None)
        (gradient,) = torch.autograd.grad(output.float().square().sum(), inputs)
        results.append([output.tolist(), gradient.tolist()])
    return results


@pytest.mark.full("a sweep of groups", but=("False-4", "True-2"))
@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize("masked", [False, True])
def test_fused_attention_equals_megatrons(run_ranks: RunRanks, groups: int, masked: bool) -> None:
    ((output, gradient),) = run_ranks(1, attention_difference, groups, masked)
    assert output < 1e-5
    assert gradient < 1e-4


@pytest.mark.full("a sweep of precisions", but=("False-fp32", "True-bf16"))
@pytest.mark.parametrize(
    "flags",
    [
        pytest.param("", id="fp32"),
        pytest.param("--bf16", id="bf16"),
        pytest.param("--bf16 --attention-softmax-in-fp32", id="softmax"),
    ],
)
@pytest.mark.parametrize("masked", [False, True])
def test_local_attention_is_megatrons_to_the_last_bit(run_ranks: RunRanks, flags: str, masked: bool) -> None:
    ((ours, theirs),) = run_ranks(1, local_attention_results, flags, masked)
    assert ours == theirs
