"""Vector filters that users type, and the messages about them."""

import contextlib
import inspect
import re
import sys
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pytest_workers import examples
from scope_filters import filters

from megatronapp_common.errors import FilterError
from megatronapp_common.filters.evaluate import NumpyBackend, evaluate
from megatronapp_common.filters.expression import (
    MAX_CHARACTERS,
    MAX_COST,
    MAX_DEPTH,
    MAX_NODES,
    Expression,
    cost,
    parse,
)
from megatronapp_common.filters.reducers import NAMED, Histogram, parse_reducer
from megatronapp_common.filters.shard_plan import compile_reduction_plan, run
from megatronapp_common.filters.syntax import Apply, DataVector, Function, Reduce, Reduction, depth, walk

DATA = np.array([3.0, -1.0, 0.0, 2.0], np.float32)
READ = {
    "data.mean(dim=-1)": 1.0,
    " data . mean ( ) ": 1.0,
    "data.mean(-1)": 1.0,
    "data.mean(axis=-1, keepdim=False)": 1.0,
    "torch.mean(data, dim=-1,)": 1.0,
    "mean(data)": 1.0,
    "data.mean(dim=(-1))": 1.0,
    "(data).mean(+-1)": 1.0,
    "data.abs().max(dim=-1)": 3.0,
    "data.abs().max(dim=-1).values": 3.0,
    "data.max(-1)[0]": 3.0,
    "torch.max(data, -1)[0]": 3.0,
    "data.amin(dim=-1)": -1.0,
    "data[:2].sum()": 2.0,
    "data[:, :2].sum()": 2.0,
    "data[..., 1::2].sum()": 1.0,
    "data[-3:-1].min()": -1.0,
    "data[:, :, :][...].sum()": 4.0,
    "data[..., :2,].sum()": 2.0,
    "data[0]": 3.0,
    "data[..., -1]": 2.0,
    "torch.sqrt(data.abs()).sum() ** 2 / 1.0": (3**0.5 + 1 + 2**0.5) ** 2,
    "data.square().mean().sqrt()": 3.5**0.5,
    "(data > 0).float().mean(dim=-1)": 0.5,
    "(data > 0).sum(dim=-1)": 2.0,
    "(data != 0).mean()": 0.75,
    "torch.where(data > 0, data, 0).sum(-1)": 5.0,
    "data.where(data > 0, -data).sum()": 6.0,
    "where(data.mean() >= 1, data.max(), data.min())": 3.0,
    "data.pow(2).sum()": 14.0,
    "-2 ** 2 + data.sum()": 0.0,
    "2 ** -1 * data.sum()": 2.0,
    "2 ** 3 ** 0 - data.sum() - 1": -3.0,
    "10 - 4 - data.sum()": 2.0,
    "12 / 2 / data.sum()": 1.5,
    "1 + 2 * data.sum()": 9.0,
    "(1 + 2) * data.sum()": 12.0,
    "--data.sum()": 4.0,
    "1e1 + .5 + 2. + data.sum()": 16.5,
    "(data - data.mean()).square().mean()": 2.5,
    "(data[1:] - data[:-1]).abs().max()": 4.0,
    "(data == data.max()).float().sum()": 1.0,
}
REFUSED = {
    "": (1, "write data.mean"),
    "data": (1, "end it with .mean"),
    "data.sqrt()": (6, "end it with .mean"),
    "1 + 1": (3, "does not read data"),
    "data.mean() > 0": (13, "where(condition, 1, 0)"),
    "meen(data)": (1, "did you mean mean"),
    "data.clamp(min=0).mean()": (6, "where(data < 0, 0, data) for min=0, where(data > 1, 1, data) for max=1"),
    "dta.mean()": (1, "did you mean data"),
    "data.quux()": (6, "known are data, abs"),
    "x.mean()": (1, "called data"),
    "np.sqrt(data).mean()": (1, "write the function alone"),
    "data.mean": (6, "write data.mean()"),
    "mean": (1, "write mean(data)"),
    "data.mean(dim=0)": (11, "write dim=-1"),
    "data.mean(dim=-2)": (11, "write dim=-1"),
    "data.mean(1)": (11, "write dim=-1"),
    "data.mean(-1, -1)": (15, "takes a vector and an axis"),
    "data.mean(keepdim=True)": (11, "leave keepdim out"),
    "data.abs(dim=-1).mean()": (10, "leave it out"),
    "data.mean(dim=-1, 3)": (19, "are last"),
    "data.mean(dim)": (14, "write dim=-1"),
    "mean()": (1, "write data.mean"),
    "max(data, data)": (11, "where(a > b, a, b)"),
    "abs(data, data).sum()": (1, "takes 1, and here are 2"),
    "where(data > 0).sum()": (1, "where takes 3"),
    "where(data, data, 0).sum()": (7, "begins with a comparison"),
    "where(data > 0, data > 1, 0).sum()": (22, "not a number"),
    "data.mean().mean()": (13, "one number already"),
    "data.mean()[:2]": (13, "no parts"),
    "data.mean()[1]": (13, "no elements"),
    "data.max()[1]": (12, "omit the index"),
    "(data > 0).max()": (12, "true or false"),
    "(data > 0)[0]": (7, "true or false"),
    "-(data > 0)": (1, "true or false"),
    "0 < data < 1": (3, "one comparison at a time"),
    "(data > 0) + 1": (7, "true or false"),
    "(1 > 0) * data": (4, "two constants"),
    "data & 1": (6, "one where into another"),
    "data // 2": (6, "divide with /"),
    "data % 2": (6, "no remainder"),
    "data ^ 2": (6, "** for a power"),
    "data \u00d7 2": (6, "write * for times"),
    "data.mean() if 1 else 2": (13, "write where"),
    "lambda: data": (1, "no program"),
    "__import__('os').system('id')": (1, "is not known"),
    "data.__class__": (6, "is not known"),
    "data.mean('x')": (11, "no texts"),
    "data[::-1].mean()": (6, "step of -1"),
    "data[::0].mean()": (6, "step of 0"),
    "data[1.5]": (6, "whole number"),
    "data[-x]": (7, "called data"),
    "data[-]": (7, "whole number"),
    "data[9999999999]": (6, "below a billion"),
    "data[data > 0].mean()": (6, "choose by value"),
    "data[0, :8].mean()": (6, "one axis here"),
    "data[:8, :8].mean()": (6, "one axis here"),
    "data[]": (6, "write bounds"),
    "data[:8": (8, "close the '['"),
    "data mean": (6, "write an operator"),
    "2.sqrt()": (3, "write an operator"),
    "data.sum() / 03": (14, "without leading zeros"),
    "data.sum() + 1_000": (15, "is not known"),
    "data.sum() + 0x10": (15, "is not known"),
    "data.sum() + 2j": (15, "is not known"),
    "(data)(data)": (7, "write an operator"),
    "mean(*data)": (6, "write data, a number"),
    "mean(**data)": (6, "write data, a number"),
    "data, data": (5, "write an operator"),
    "(data := 1)": (7, "is unexpected here"),
    "data..mean()": (6, "name of a function"),
    "torch(data)": (6, "write a function after it"),
    "torch.data": (7, "is not known"),
    "data.mean(": (11, "the end of the text"),
    "(data.mean()": (13, "close the '(' of column 1"),
    "data.mean())": (12, "end here"),
    "1/0": (2, "not finite"),
    "9**9**9**9": (5, "not finite"),
    "1e999 * data.sum()": (1, "not finite"),
    "(-1) ** 0.5 * data.sum()": (6, "not finite"),
    "data.std(dim=-1)": (6, "reducer std"),
    "data.norm(dim=-1)": (6, "square().sum"),
    "data.mean().values": (13, "omit it"),
    "data\x00": (5, "U+0000"),
    "\u0661 * data": (1, "has no meaning"),
    "data;data": (5, "one formula"),
    "@": (1, "no matrix"),
}


def value(text: str) -> float:
    return float(evaluate(parse(text).root, DATA, NumpyBackend())[0])


@pytest.mark.parametrize("text", READ)
def test_expressions_as_users_type_them_are_computed(text: str) -> None:
    assert value(text) == pytest.approx(READ[text], rel=1e-6)


@pytest.mark.parametrize("text", READ)
def test_the_long_form_is_read_to_an_equal_tree(text: str) -> None:
    expression = parse(text)
    assert parse(str(expression)) == expression


@pytest.mark.parametrize("text", REFUSED)
def test_impossible_expressions_are_refused_with_their_column(text: str) -> None:
    with pytest.raises(FilterError) as refused:
        parse(text)
    column, sentence = REFUSED[text]
    assert refused.value.column == column, refused.value
    assert sentence in refused.value.sentence
    assert str(refused.value) == f"column {column}: {refused.value.sentence}"


def test_the_tree_is_small_and_typed() -> None:
    tree = parse("data.abs().max(dim=-1)")
    assert tree == Expression(Reduce(Reduction.MAX, Apply(Function.ABS, DataVector())))
    assert [node.column for node in walk(tree.root)] == [12, 6, 1]
    assert hash(tree) == hash(parse("max(abs(data))"))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("(" * 100 + "data.mean()" + ")" * 100, "nests more than"),
        ("-" * 100 + "data.mean()", "nests more than"),
        ("data.mean()" + " ** data.mean()" * 30, "parts deep|parts, and"),
        ("abs(" * 90 + "data", "nests more than"),
        ("data" + ".abs()" * 40 + ".mean()", "parts deep"),
        ("(" + "+".join(["data"] * 40) + ").mean()", "parts, and"),
        ("(data ** 2 ** data ** 2 + data ** 3 ** data ** 3 + data ** data ** data ** data).sum()", "operations"),
        ("data.mean() + " + "1" * MAX_CHARACTERS, "characters"),
        ("1" * 400, "not finite"),
        ("9**" * 60 + "data.mean()", "nests more than"),
    ],
)
def test_limits_are_refused_with_a_reason(text: str, sentence: str) -> None:
    with pytest.raises(FilterError, match=sentence):
        parse(text)


@pytest.mark.parametrize("opening", ["(", "abs(", "-", "2**", "where(", "data + (", "data.pow("])
def test_no_text_needs_many_frames(opening: str) -> None:
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack(0)) + 450)
    try:
        with pytest.raises(FilterError):
            parse(opening * (MAX_CHARACTERS // len(opening)))
    finally:
        sys.setrecursionlimit(before)


@pytest.mark.parametrize("name", NAMED)
def test_a_named_reducer_has_a_text(name: str) -> None:
    assert parse_reducer(str(NAMED[name])) == NAMED[name]


def test_what_the_limits_allow_is_allowed() -> None:
    parse("(" * 46 + "data" + ")" * 46 + ".mean()")
    parse("data" + ".abs()" * (MAX_DEPTH - 2) + ".mean()")
    parse(f"{'+'.join(['1'] * 200)} + data.mean()")
    assert cost(parse("(data ** 2).mean()").root) == 9
    assert cost(parse("data.mean() ** 2 / 3").root) == 1


@pytest.mark.parametrize(
    "text", ["9**9**9**9", "data" * 10**6, "(" * 499, "1" * 500, "[" * 500, "-" * 500, "data[" * 99]
)
def test_nasty_texts_take_little_memory(text: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(FilterError):
            parse(text)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


TOKENS = (
    "data torch . mean max abs where ( ) [ ] : , - + * ** / < >= == = dim keepdim -1 0 1 2.5 1e3 ... values True "
    "999999999999999999 \u00e9 _ if"
)
tokens = st.sampled_from([*TOKENS.split(), " ", "\n"])
texts = st.text(max_size=60) | st.lists(tokens, max_size=40).map("".join) | st.lists(tokens, max_size=20).map(" ".join)


def check(text: str) -> None:
    try:
        reducer = parse_reducer(text)
    except FilterError as error:
        assert 1 <= error.column <= len(text) + 1
        assert re.search(r"[;?]", error.sentence), error.sentence
        assert len(error.sentence) < 300
        return
    for pixels, shards in ((1, 1), (3, 1), (4, 4), (1, 4)):
        with contextlib.suppress(FilterError):
            plan = compile_reduction_plan(reducer, width=8, pixels=pixels, shards=shards)
            run(plan.program(0), np.ones((1, 8 // shards), np.float32))
    if isinstance(reducer, Expression):
        assert len(list(walk(reducer.root))) <= MAX_NODES
        assert depth(reducer.root) <= MAX_DEPTH
        assert cost(reducer.root) <= MAX_COST
        assert not reducer.root.vector
        assert not reducer.root.boolean


@settings(max_examples=examples(500))
@given(texts)
def test_any_text_is_an_expression_or_an_expression_error(text: str) -> None:
    check(text)


@settings(max_examples=examples(150))
@given(filters(), st.data())
def test_a_filter_with_a_change_is_an_expression_or_an_expression_error(text: str, draw: st.DataObject) -> None:
    place = draw.draw(st.integers(0, len(text)))
    check(text[:place] + draw.draw(tokens | st.text(max_size=2)) + text[place + draw.draw(st.integers(0, 3)) :])


@settings(max_examples=examples(150))
@given(filters())
def test_any_filter_has_a_long_form(text: str) -> None:
    try:
        reducer = parse_reducer(text)
    except FilterError:
        return
    if len(str(reducer)) <= MAX_CHARACTERS:
        assert parse_reducer(str(reducer)) == reducer


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("histogram", "write histogram(32, -4, 4)"),
        ("histogram(3)", "write histogram(32, -4, 4)"),
        ("histogram(0, 0, 1)", "column 11: 0 bins"),
        ("histogram(257, 0, 1)", "column 11: 257 bins"),
        ("histogram(8, 1, 1)", "column 14.*is first"),
        ("histogram(8, 2, 1)", "is first"),
        ("histogram(8, -1e39, 1)", "is first"),
        ("histogram(8, 0, 1e-45)", "is first"),
        ("histogram(8, 0, 1) + 1", "write histogram"),
    ],
)
def test_histograms_that_cannot_be(text: str, sentence: str) -> None:
    with pytest.raises(FilterError, match=sentence.replace("(", r"\(").replace(")", r"\)")):
        parse_reducer(text)


def test_a_histogram_is_read() -> None:
    assert parse_reducer(" histogram( 8 , -1.5e0, +2 ) ") == Histogram(bins=8, lo=-1.5, hi=2.0)
