"""Quantities have the value that Kubernetes defines, and other texts are refused."""

import fractions
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatronapp_common.errors import JobError
from megatronapp_common.job import load_job, quantity_value
from megatronapp_common.job.api.quantity import QUANTITY_PATTERN


@pytest.mark.parametrize(
    ("text", "worth"),
    [
        ("0", 0),
        ("4", 4),
        ("500m", fractions.Fraction(1, 2)),
        ("16Gi", 16 * 2**30),
        ("16G", 16 * 10**9),
        ("1.5Ki", 1536),
        (".5", fractions.Fraction(1, 2)),
        ("5.", 5),
        ("5.Mi", 5 * 2**20),
        ("1e3", 1000),
        ("1E3", 1000),
        ("2e-3", fractions.Fraction(1, 500)),
        ("1E", 10**18),
        ("1k", 1000),
        ("7n", fractions.Fraction(7, 10**9)),
        ("1Ei", 2**60),
    ],
)
def test_worth(text: str, worth: fractions.Fraction) -> None:
    assert quantity_value(text) == worth


@pytest.mark.parametrize(
    "text", ["", "Gi", "4 Gi", "4gi", "-1", "+1", "1e", "1e999", "1.2.3", "0x10", "4Gib", "\u0664"]
)
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no quantity"):
        quantity_value(text)


@given(st.from_regex(re.compile(QUANTITY_PATTERN, re.ASCII), fullmatch=True))
def test_whatever_the_pattern_takes_has_a_worth(text: str) -> None:
    assert quantity_value(text) >= 0


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("4GiB", "'4GiB' is not allowed; write a quantity such as 4, 500m or 16Gi"),
        (-1, "is not allowed; write a quantity"),
        (0.5, 'write it in quotes: "0.5"'),
        (True, "is not text"),
        (None, "write one, or leave the field out"),
    ],
)
def test_a_wrong_quantity_is_named_with_its_place(build: object, value: object, message: str) -> None:
    assert callable(build)
    with pytest.raises(JobError) as refused:
        load_job(build({"spec.resources.limits": {"memory": value}}))
    assert [line.partition(": ")[0] for line in refused.value.problems] == ["spec.resources.limits.memory"]
    assert message in str(refused.value)


def test_a_whole_number_is_taken_as_its_text(build: object) -> None:
    assert callable(build)
    assert load_job(build({"spec.resources.limits": {"cpu": 8}})).spec.resources.limits == {"cpu": "8"}


@pytest.mark.parametrize("value", [0, -1, "0", "8GiB", "1.5Gi", "500m", "8G"])
def test_a_memory_cap_is_a_number_of_microbatches_or_of_bytes(build: object, value: object) -> None:
    assert callable(build)
    parallel = {"spec.parallelism.pipeline": 2, "spec.procPerNode": 2}
    for right in (8, "8", "8Gi"):
        job = load_job(build({**parallel, "spec.dpp": {"enabled": True, "memoryCap": right}}))
        assert job.spec.dpp.memory_cap == str(right)
    with pytest.raises(JobError, match="write a number of microbatches such as 8, or bytes such as 8Gi"):
        load_job(build({**parallel, "spec.dpp": {"enabled": True, "memoryCap": value}}))
