"""A step that is not finite: captured in a second computation, whose numbers are those of the first to the last bit."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from not_finite_training import LAYER, STEP, train

from megatronapp_common.frames import Frame, decode
from megatronapp_common.scope.layer_statistics import (
    RECORD,
    Records,
    SiteLayer,
    first_not_finite,
    merge,
    read_statistics,
)

pytestmark = pytest.mark.torch
RunRanks = Callable[..., list[Any]]
LAYOUTS = {
    "DP2": (2, "--bf16 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"),
    "TP2xPP2": (4, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"),
    "fp16": (1, "--fp16 --initial-loss-scale 1024"),
    "pair": (2, "--forward-backward-disaggregating"),
    "dynamic": (2, "--use-dpp --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"),
}


def frame_of(rank: dict[str, Any]) -> Frame:
    (data,) = rank["frames"]
    return decode(data)


def losses_of(ranks: list[dict[str, Any]]) -> list[float]:
    (losses,) = [rank["losses"] for rank in ranks if rank["losses"]]
    return list(losses)


@pytest.mark.full("other layouts", but=("pair", "fp16"))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_second_computation_repeats_every_bit(run_ranks: RunRanks, layout: str) -> None:
    size, flags = LAYOUTS[layout]
    again = run_ranks(size, train, f"{flags} --scope-capture-interval 100")
    captured = run_ranks(size, train, f"{flags} --scope-capture-interval {STEP}")
    off = run_ranks(size, train, f"{flags} --scope-capture-interval 100 --no-scope-capture-not-finite")
    assert losses_of(again) == losses_of(captured) == losses_of(off)
    found: dict[SiteLayer, Records] = {}
    for mine, first, plain in zip(again, captured, off, strict=True):
        if layout == "pair" and mine is again[1]:  # a forward rank
            assert "rank 0 died" in mine["error"]
        else:
            assert mine["error"].startswith("NotFiniteError: the loss of step 2 is nan")
            assert "its loss was nan again. The capture of step 3 names the first site" in mine["error"]
        assert "computed once more" not in first["error"] and plain["frames"] == []
        found_again, expected = frame_of(mine), frame_of(first)
        assert found_again.header == {**expected.header, "repeated": True}
        assert found_again.body == expected.body, "every number of every site"
        for row, record in zip(*read_statistics(found_again), strict=True):
            merge(found.setdefault(row, np.zeros(1, RECORD)), record.reshape(1))
    rows = list(found)
    assert first_not_finite(rows, [found[row][0] for row in rows]) == SiteLayer("mlp2", LAYER)
    assert found[SiteLayer("gradient", 0)]["nan"] > 0 and not found[SiteLayer("weight", 0)]["nan"]
