"""docs/expressions.md says what is so."""

import pathlib
import re

import pytest

from megatronapp_common.errors import FilterError
from megatronapp_common.filters.expression import MAX_CHARACTERS, MAX_COST, MAX_DEPTH, MAX_NODES, parse
from megatronapp_common.filters.reducers import parse_reducer
from megatronapp_common.filters.shard_plan import compile_reduction_plan

TEXT = (pathlib.Path(__file__).resolve().parents[4] / "docs" / "expressions.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```filter\n(.*?)```", TEXT, re.DOTALL)[0].splitlines()
REFUSALS = re.findall(r"^\| `(.+)` \| (column .+) \|$", TEXT, re.MULTILINE)
MERGED = re.findall(r"^\| `(.+)` \| (merges|refused: .+) \|$", TEXT, re.MULTILINE)


@pytest.mark.parametrize("text", EXAMPLES)
def test_an_example_works(text: str) -> None:
    compile_reduction_plan(parse_reducer(text), width=64, pixels=4)


@pytest.mark.parametrize(("text", "sentence"), REFUSALS)
def test_documented_refusals_are_those_of_the_parser(text: str, sentence: str) -> None:
    with pytest.raises(FilterError) as refused:
        parse(text)
    assert str(refused.value) == sentence


@pytest.mark.parametrize(("text", "sentence"), MERGED)
def test_what_merges(text: str, sentence: str) -> None:
    reducer = parse_reducer(text)
    if sentence == "merges":
        assert compile_reduction_plan(reducer, width=64, pixels=1, shards=4).merged
        return
    with pytest.raises(FilterError, match=sentence.removeprefix("refused: ")):
        compile_reduction_plan(reducer, width=64, pixels=1, shards=4)


def test_limits_and_tables() -> None:
    assert f"{MAX_CHARACTERS} characters, {MAX_NODES} parts, {MAX_DEPTH} of them" in TEXT
    assert f"and {MAX_COST} operations" in TEXT
    assert (len(EXAMPLES), len(REFUSALS), len(MERGED)) == (14, 11, 5)
