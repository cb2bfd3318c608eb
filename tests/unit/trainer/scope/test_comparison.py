"""Branches of a generation compared on the ranks, against plain torch and on every layout."""

from collections.abc import Callable
from typing import Any

import pytest
from comparing_ranks import comparing, text_of
from generating_ranks import LAYOUTS, VARIANTS, prompts
from perturbing_ranks import calculation, recipe, request, storage

pytestmark = pytest.mark.torch
RunRanks = Callable[..., list[Any]]
PROMPT = prompts((19,))[0]
NEW = 6
NONE = {"type": "gaussian", "coefficient": 0.0}
ABLATED = storage("mlp.linear_fc2", {"type": "zero"}, layers=[1])
EMPTY = recipe(calculation("mlp2", NONE), storage("mlp.linear_fc1", NONE))


def nothing_changes(flags: str, variant: str) -> list[tuple[float, int, float, float]]:
    """Compare with coefficient 0 while another request generates: the largest number of each kind."""
    with comparing(flags, variant) as (_, _, comparer):
        if comparer is None:
            return []
        others = [request("other", prompt=PROMPT[:7], max_new_tokens=9, logits=False)]
        out = []
        for forced in (True, False):
            found = comparer.compare(
                text_of(f"a{int(forced)}", PROMPT, NEW), (None, EMPTY), forced=forced, others=others
            )
            assert len(found.rows) == NEW
            assert found.chosen[0] == found.chosen[1]
            out += [
                (row.divergence.kl, row.divergence.rank, float(row.drift.max()), float(row.heads.max()))
                for row in found.rows
            ]
        return out


@pytest.mark.parametrize(
    "layout", ["alone", *(pytest.param(name, marks=pytest.mark.full("layouts")) for name in ("TP2", "PP2"))]
)
def test_a_perturbation_of_coefficient_0_changes_nothing(run_ranks: RunRanks, layout: str) -> None:
    count, flags = LAYOUTS[layout]
    found = run_ranks(count, nothing_changes, flags, VARIANTS["rotary-grouped"])[0]
    assert set(found) == {(0.0, 0, 0.0, 0.0)}
