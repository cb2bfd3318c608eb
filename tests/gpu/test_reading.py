"""Analyses on devices: logit lens, attribution and scores of heads are those of the processor, on each layout."""

from collections.abc import Callable
from typing import Any

import analyzing_ranks
import numpy as np
import pytest
from generating_ranks import VARIANTS

from megatronapp_common.scope.analysis_requests import AttributionRequest, HeadScoreRequest, LensRequest

RunRanks = Callable[..., list[Any]]
Found = dict[str, dict[str, Any]]
CHECKED = {name: VARIANTS[name] for name in ("learned-tied", "rotary-grouped")}
TOLERANCE = 2e-4
"""Largest difference to the processor of contributions and log-probabilities, which are up to about 10, in fp32."""
SCORE_TOLERANCE = 1e-5


def bodies() -> dict[str, Any]:
    text = tuple(analyzing_ranks.text())
    return {
        "lens": LensRequest(ids=text, rows=(3, len(text)), layers=(0, 2, 3), top=4, token=7),
        "attribution": AttributionRequest(ids=text, row=21, token=7, against=101, neurons=6),
        "heads": HeadScoreRequest(ids=(*text, *text)[:60]),
    }


@pytest.fixture(scope="module")
def expected(on_processor: RunRanks) -> Found:
    """Results of the processor, which the unit tests compare with those of plain PyTorch."""
    found: Found = on_processor(1, analyzing_ranks.analyze, "", CHECKED, bodies())[0]
    return found


def check_equal(found: Found, expected: Found) -> None:
    for variant, answers in expected.items():
        for kind in ("lens", "attribution", "heads"):
            check_result(kind, found[variant][kind], answers[kind])


def check_result(kind: str, found: tuple[Any, Any], expected: tuple[Any, Any]) -> None:
    header, tensors = found
    assert set(tensors) == set(expected[1])
    for name, truth in expected[1].items():
        value = tensors[name]
        if (
            truth.dtype.kind in "iu"
        ):  # tokens, ranks and neurons in an order in which nearly equal ones may change places
            assert (value == truth).mean() > 0.9, name
        else:
            np.testing.assert_allclose(
                value, truth, atol=SCORE_TOLERANCE if kind == "heads" else TOLERANCE, err_msg=name
            )
    for name in ("embedding", "constant", "logit"):
        if name in expected[0]:
            assert header[name] == pytest.approx(expected[0][name], abs=TOLERANCE)


def test_results_are_those_of_the_processor(run_ranks: RunRanks, expected: Found) -> None:
    check_equal(run_ranks(1, analyzing_ranks.analyze, "", CHECKED, bodies())[0], expected)


@pytest.mark.gpus(2)
@pytest.mark.parametrize("split", ["tensor", "pipeline"])
def test_layouts_have_the_same_results(run_ranks: RunRanks, expected: Found, split: str) -> None:
    found = run_ranks(2, analyzing_ranks.analyze, f"--{split}-model-parallel-size 2", CHECKED, bodies())
    check_equal(found[0], expected)


def test_an_analysis_without_memory_ends_alone(run_ranks: RunRanks) -> None:
    ((tokens, chunks),) = run_ranks(1, analyzing_ranks.without_memory, "", bodies()["lens"])
    assert len(tokens) == 6
    assert chunks == [1] * 3
