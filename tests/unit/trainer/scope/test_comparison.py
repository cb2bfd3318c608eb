"""Branches of a generation compared on the ranks, against plain torch and on every layout."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from comparing_ranks import Compared, comparing, text_of
from generating_ranks import LAYOUTS, VARIANTS, plain_of, prompts
from perturbing_ranks import calculation, recipe, request, storage
from plain_sites import PatchedGpt, SeenGpt

pytestmark = pytest.mark.torch
RunRanks = Callable[..., list[Any]]
PROMPT = prompts((19,))[0]
NEW = 6
NONE = {"type": "gaussian", "coefficient": 0.0}
EMPTY = recipe(calculation("mlp2", NONE), storage("mlp.linear_fc1", NONE))


def nothing_changes(flags: str, variant: str) -> list[tuple[float, int, float, float]]:
    """Compare with coefficient 0 while another request generates: the largest number of each kind."""
    with comparing(flags, variant) as (_, _, comparer):
        if comparer is None:
            return []
        others = [request("other", prompt=PROMPT[:7], max_new_tokens=9, logits=False)]
        out = []
        for forced in (True, False):
            if not forced:  # as on a GPU, where rows are compared while the thread waits for the token
                comparer.comparer._window = comparer.engine._gang.idle_window
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


SOURCE = prompts((15,))[0][::-1]
HEAD, WIDTH = 2, 16
PATCHED = recipe(
    calculation(
        "head_output",
        {"type": "patch", "source": {"tokens": list(SOURCE)}},
        layers=[1],
        heads=[HEAD],
        positions=[{"origin": "promptEnd", "first": -2}],
    ),
    calculation(
        "mlp2", {"type": "patch", "source": {"tokens": list(SOURCE)}}, layers=[2], positions=[{"first": 3, "end": 5}]
    ),
)


def patched(flags: str, variant: str) -> Compared:
    """Compare with a recipe that patches a head and an MLP, whose sources are read in chunks."""
    with comparing(flags, variant, prefill_chunk=8) as (_, _, comparer):
        return Compared() if comparer is None else comparer.compare(text_of("a0", PROMPT, NEW), (None, PATCHED))


def plain_branches(variant: str, ids: list[int]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the sites of plain torch for A, and for B with the values of the source put in."""
    with comparing("", variant) as (model, config, _):
        plain = plain_of(model, config)
        a, b = SeenGpt(plain._weights, plain._shape), PatchedGpt(plain._weights, plain._shape)
        source = a.sites(list(SOURCE))
        last = slice(len(PROMPT) - 2, len(PROMPT))
        head = torch.from_numpy(source["head_output"])[-2:, 1, HEAD]
        columns = slice(HEAD * WIDTH, (HEAD + 1) * WIDTH)
        b.patch_input("decoder.layers.1.self_attention.linear_proj", last, columns, head)
        b.patch_output("decoder.layers.2.mlp.linear_fc2", slice(3, 5), torch.from_numpy(source["mlp2"])[3:5, 2])
        return a.sites(ids), b.sites(ids)


@pytest.mark.full("every layout", but=("TP2",))
@pytest.mark.parametrize("layout", [*LAYOUTS])
def test_a_patched_branch_differs_as_in_plain_torch(run_ranks: RunRanks, layout: str) -> None:
    count, flags = LAYOUTS[layout]
    found = run_ranks(count, patched, flags, VARIANTS["rotary-grouped"])[0]
    assert [row.index for row in found.rows] == list(range(NEW))
    ids = [*PROMPT, *found.chosen[0][:-1]]
    (truth,) = run_ranks(1, plain_branches, VARIANTS["rotary-grouped"], ids)
    rows = slice(len(PROMPT) - 1, None)
    a, b = ({name: torch.from_numpy(values[rows]) for name, values in branch.items()} for branch in truth)
    logs_a, logs_b = (branch["logits"].double().log_softmax(-1) for branch in (a, b))
    kl = (logs_a.exp() * (logs_a - logs_b)).sum(-1)
    assert float(kl.min()) > 1e-4  # the patch must matter, or nothing is compared
    drift = (b["residual"] - a["residual"]).norm(dim=-1) / a["residual"].norm(dim=-1)
    # In the prompt's last row the ranks read the patched head; plain torch records it before it is put in.
    heads = (b["head_output"] - a["head_output"]).norm(dim=-1) / a["head_output"].norm(dim=-1)
    for place, row in enumerate(found.rows):
        token = found.chosen[0][place]
        assert row.divergence.kl == pytest.approx(float(kl[place]), rel=1e-3, abs=1e-6)
        assert row.divergence.rank == int((logs_b[place] > logs_b[place, token]).sum())
        assert row.divergence.logprob_a == pytest.approx(float(logs_a[place, token]), abs=1e-4)
        assert row.divergence.logprob_b == pytest.approx(float(logs_b[place, token]), abs=1e-4)
        assert row.drift is not None and row.heads is not None
        torch.testing.assert_close(torch.from_numpy(row.drift), drift[place], rtol=1e-3, atol=1e-5)
        mine = torch.from_numpy(row.heads)
        if place == 0:
            mine, theirs = mine.clone(), heads[place].clone()
            assert float(mine[1, HEAD]) > 0.1
            mine[1, HEAD] = theirs[1, HEAD] = 0
            torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-5)
        else:
            torch.testing.assert_close(mine, heads[place], rtol=1e-3, atol=1e-5)
