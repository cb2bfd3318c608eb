"""Comparison of the kernels of MegaScope with plain torch. On a machine without GPU, run with TRITON_INTERPRET=1."""

import math
import os
from typing import Any

import torch

from megatronapp_common.scope.layer_statistics import BINS, SiteLayer
from megatronapp_common.scope.protocol import TEMPERATURES
from megatronapp_trainer.inference.model.token_statistics import _entropy
from megatronapp_trainer.scope.capture import attention_recompute
from megatronapp_trainer.scope.capture.attention_recompute import AttentionRule
from megatronapp_trainer.scope.capture.reductions import MEASURES, codes
from megatronapp_trainer.scope.comparison.shard_divergence import COLUMNS, change_of, divergence_parts, merged
from megatronapp_trainer.scope.statistics.accumulator import StatisticsAccumulator

CASES = (
    # layers, sequences, heads, key heads, channels, keys, window
    (2, 3, 4, 2, 8, 100, None),
    (1, 2, 4, 4, 24, 130, 17),
    (2, 1, 6, 1, 32, 64, None),
    (3, 2, 2, 2, 128, 70, 0),
)


def check(kernels: Any, sizes: tuple[Any, ...], dtype: torch.dtype, device: torch.device) -> None:
    layers, batch, heads, groups, channels, length, window = sizes
    source = torch.Generator().manual_seed(length)
    cache = torch.randn((layers, batch + 1, length + 1, groups, channels), generator=source).to(device, dtype)
    query = (torch.randn((layers, batch, heads, channels), generator=source) * 2).to(device, dtype)
    positions = torch.randint(0, length, (batch,), generator=source).to(device)
    positions[0] = length - 1 if batch == 1 else 0
    keys, rule = cache[:, :batch, :length], AttentionRule(scale=channels**-0.5, window=window)
    chances = attention_recompute.probabilities(query[:, :, None], keys, positions[:, None], rule)
    expected = attention_recompute.head_measures(chances, positions[:, None], rule)
    planes = kernels.head_measures(query, keys, positions, rule)
    for name, plane in zip(MEASURES, planes, strict=True):
        torch.testing.assert_close(plane.transpose(0, 1), expected[name].squeeze(2), atol=1e-5, rtol=1e-5)
    pins = torch.tensor([[0, layers - 1], [heads - 1, 0], [groups - 1, 0]], device=device)
    rows = torch.stack([chances[0, :, heads - 1, 0], chances[layers - 1, :, 0, 0]])
    apart = kernels.pinned_codes(query, keys, positions, pins, rule).int() - codes(rows).int()
    assert apart.abs().max() <= 1, "of codes that stand for 1/255 of a root"
    assert (apart != 0).float().mean() <= 0.02


def check_statistics(kernels: Any, dtype: torch.dtype, device: torch.device) -> None:
    """Compare counts, which are equal, and moments with those of plain torch on a processor."""
    plain = StatisticsAccumulator([SiteLayer("residual", layer) for layer in (0, 1)], torch.device("cpu"))
    moments = torch.zeros(2, 3, dtype=torch.float64, device=device)
    counts = torch.zeros(2, 4 + BINS, dtype=torch.int64, device=device)
    source = torch.Generator().manual_seed(0)
    for count in (0, 1, 4095, 4096, 9000):
        values = torch.randn(count, generator=source) * torch.randn(count, generator=source).mul_(6).exp_()
        values[::7] = 0
        values[3::100], values[4::100], values[5::100], values[6::100] = math.nan, math.inf, -math.inf, 1e-40
        for place, row in enumerate(plain.rows):
            part = values[place * count // 3 :].to(dtype)
            plain.add(row, part)
            kernels.add(part.to(device), moments, counts, place)
    assert torch.equal(plain._counts, counts.cpu())
    torch.testing.assert_close(moments.cpu(), plain._moments, rtol=1e-6, atol=0)


def check_distributions(kernels: Any, device: torch.device) -> None:
    """Compare sums over rows of logits, some of them far apart, with those of plain torch in fp64."""
    inverse_T = torch.tensor([1 / temperature for temperature in TEMPERATURES], device=device)
    source = torch.Generator().manual_seed(0)
    for vocabulary in (1, 1000, 2500):
        logits_RV = torch.randn(3, vocabulary, generator=source) * torch.tensor([[0.1], [3.0], [40.0]])
        found = kernels.sums(logits_RV.to(device), inverse_T).double().cpu()
        logits_RV = logits_RV.double()
        total_R1 = logits_RV.logsumexp(1, keepdim=True)
        sums = [(logits_RV / temperature).logsumexp(1, keepdim=True) for temperature in TEMPERATURES]
        expected = torch.cat([total_R1, _entropy(logits_RV, total_R1), *sums], 1)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def check_comparisons(kernels: Any, dtype: torch.dtype, device: torch.device) -> None:
    """Compare measures of two rows with those of plain torch, and equal rows with exactly 0."""
    source = torch.Generator().manual_seed(0)
    logits = (torch.randn(2, 3000, generator=source) * 10).to(dtype)
    for first, end, token in ((0, 3000, 2999), (0, 1024, 5), (1500, 2999, 0)):
        reference, token_1 = logits[0, first:end], torch.tensor([token])
        expected = merged(divergence_parts(reference, logits[1], first, token_1).numpy())
        on_device = reference.to(device), logits[1].to(device), first, token_1.to(device), len(COLUMNS)
        found = merged(kernels.divergence(*on_device).cpu().numpy())
        assert found.rank == expected.rank
        for name in ("kl", "logprob_a", "logprob_b"):
            assert math.isclose(getattr(found, name), getattr(expected, name), rel_tol=1e-9, abs_tol=1e-9), name
        assert merged(kernels.divergence(on_device[1][first:end], *on_device[1:]).cpu().numpy()).kl == 0
    for shape in ((4, 40), (3, 5, 130), (2, 2500)):
        reference, values = (torch.randn(shape, generator=source).to(dtype) for _ in range(2))
        row = torch.stack([reference, values], 1).to(device)[:, 1]  # a slot of a larger tensor
        change = kernels.change(reference.to(device), row)
        torch.testing.assert_close(change.cpu(), change_of(reference, values), rtol=1e-5, atol=0)
        assert kernels.change(reference.to(device), reference.to(device)).count_nonzero() == 0


def let_the_interpreter_loop() -> None:
    """NumPy takes an array of one number no more for an index, which the interpreter of Triton 3.6 counts on."""
    from triton.runtime import interpreter

    before = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        before(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched


def main() -> None:
    has_gpu = torch.cuda.is_available()
    if not has_gpu:
        assert os.environ["TRITON_INTERPRET"] == "1"
        let_the_interpreter_loop()
    from megatronapp_trainer.inference.model import distribution_kernels
    from megatronapp_trainer.scope.capture import attention_kernels as kernels
    from megatronapp_trainer.scope.comparison import comparison_kernels
    from megatronapp_trainer.scope.statistics import statistics_kernels

    device = torch.device("cuda" if has_gpu else "cpu")
    check_distributions(distribution_kernels, device)
    print("distributions agree:", flush=True)
    for dtype in (torch.float32, torch.bfloat16 if has_gpu else torch.float16):
        check_statistics(statistics_kernels, dtype, device)
        print("statistics agree:", dtype, flush=True)
        check_comparisons(comparison_kernels, dtype, device)
        print("comparisons agree:", dtype, flush=True)
    for sizes in CASES:
        for dtype in (torch.float32, torch.bfloat16 if has_gpu else torch.float16):
            check(kernels, sizes, dtype, device)
            print("agree:", sizes, dtype, flush=True)


if __name__ == "__main__":
    main()
