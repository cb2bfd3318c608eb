"""Meaning of --data-path and --split, and the spellings that are refused."""

import pytest

from megatronapp_trainer.data.blend import Blend, parse_blend, split_fractions
from megatronapp_trainer.errors import UsageError


@pytest.mark.parametrize(
    ("arguments", "blend"),
    [
        (["a"], Blend(prefixes=("a",), weights=None)),
        (["a", "b"], Blend(prefixes=("a", "b"), weights=None)),
        (["0.3", "a", "7", "b"], Blend(prefixes=("a", "b"), weights=(0.3, 7.0))),
        (["1", "a"], Blend(prefixes=("a",), weights=(1.0,))),
    ],
)
def test_blends(arguments: list[str], blend: Blend) -> None:
    assert parse_blend(arguments, "--data-path") == blend


@pytest.mark.parametrize(
    "arguments", [["1"], ["a", "1"], ["1", "a", "b"], ["1", "2", "3", "4"], ["0", "a"], ["-1", "a"]]
)
def test_blends_that_are_refused(arguments: list[str]) -> None:
    with pytest.raises(UsageError, match="--train-data-path"):
        parse_blend(arguments, "--train-data-path")


@pytest.mark.parametrize(
    ("split", "fractions"),
    [("98,2,0", (0.98, 0.02, 0.0)), ("1", (1.0, 0.0, 0.0)), ("1,1", (0.5, 0.5, 0.0)), ("2, 1, 1", (0.5, 0.25, 0.25))],
)
def test_splits(split: str, fractions: tuple[float, float, float]) -> None:
    assert split_fractions(split) == pytest.approx(fractions)


@pytest.mark.parametrize("split", ["", "a,b", "1,2,3,4", "0,0,0", "-1,2", "1;2"])
def test_splits_that_are_refused(split: str) -> None:
    with pytest.raises(UsageError, match="--split"):
        split_fractions(split)
