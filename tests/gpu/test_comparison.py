"""Comparisons of branches on devices: coefficient 0 changes nothing, and CUDA graphs no number beyond rounding."""

from collections.abc import Callable
from typing import Any

import pytest
from comparing_ranks import Compared, comparing, text_of
from generating_ranks import VARIANTS, prompts
from perturbing_ranks import calculation, recipe

RunRanks = Callable[..., list[Any]]
PROMPT = prompts((19,))[0]
NEW = 12
NOTHING = recipe(calculation("mlp2", {"type": "gaussian", "coefficient": 0.0}))
PATCHED = recipe(
    calculation(
        "residual",
        {"type": "patch", "source": {"tokens": list(PROMPT[::-1])}},
        layers=[1],
        positions=[{"origin": "promptEnd", "first": -2}],
    )
)


def compared(flags: str, graphs: bool) -> list[Compared]:
    """Compare with both recipes; on rank 0."""
    with comparing(flags, VARIANTS["rotary-grouped"], fuse=False, cuda_graphs=graphs) as (_, _, comparer):
        if comparer is None:
            return []
        return [
            comparer.compare(text_of(f"{place:012x}", PROMPT, NEW), (None, perturbation))
            for place, perturbation in enumerate((NOTHING, PATCHED))
        ]


@pytest.fixture(scope="module")
def expected(on_processor: RunRanks) -> list[Compared]:
    """Return the numbers of the processor, which the unit tests compare with those of plain PyTorch."""
    (found,) = on_processor(1, compared, "", False)
    return list(found)


def check(found: list[Compared], expected: list[Compared]) -> None:
    """Check that nothing changes for coefficient 0, and that numbers are those of the processor within rounding."""
    for row in found[0].rows:
        assert row.drift is not None and row.heads is not None
        assert (row.divergence.kl, row.divergence.rank) == (0.0, 0)
        assert (float(row.drift.max()), float(row.heads.max())) == (0.0, 0.0)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.chosen == theirs.chosen
        for row, plain in zip(mine.rows, theirs.rows, strict=True):
            assert row.index == plain.index
            assert row.divergence.kl == pytest.approx(plain.divergence.kl, rel=1e-2, abs=1e-5)
            assert row.divergence.logprob_b == pytest.approx(plain.divergence.logprob_b, abs=1e-3)
            assert row.drift == pytest.approx(plain.drift, rel=1e-2, abs=1e-4)
            assert row.heads == pytest.approx(plain.heads, rel=1e-2, abs=1e-4)


@pytest.mark.parametrize("graphs", [True, False])
def test_numbers_are_those_of_the_processor(run_ranks: RunRanks, expected: list[Compared], graphs: bool) -> None:
    (found,) = run_ranks(1, compared, "", graphs)
    check(found, expected)


@pytest.mark.gpus(2)
@pytest.mark.parametrize("split", ["tensor", "pipeline"])
def test_layouts_agree(run_ranks: RunRanks, expected: list[Compared], split: str) -> None:
    found, _ = run_ranks(2, compared, f"--{split}-model-parallel-size 2", True)
    check(found, expected)
