"""Any manifest gives a job or a JobError, never another error."""

import contextlib
import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pytest_workers import examples

from megatronapp_common.errors import JobError
from megatronapp_common.job import MegatronJob, load_job, megatron_arguments
from megatronapp_common.job.crd import custom_resource_definition
from megatronapp_common.job.fields import walk
from megatronapp_common.job.problems import PATTERNS

PATHS = [path for path, _ in walk(MegatronJob) if "[]" not in path and not path.startswith("status")]
HAVE_REQUIRED_FIELDS = ("recompute.", "volume.", "topology.", "elastic.")
"""Blocks that may be omitted, but not half of them."""
WHOLE = [path for path in PATHS if not any(block in path for block in HAVE_REQUIRED_FIELDS)]
scalars = st.none() | st.booleans() | st.integers(-5, 5000) | st.integers() | st.floats() | st.text(max_size=10)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3)
)
LINE = re.compile(r"(the document|[A-Za-z][\w.\[\], ]*|.*): .+", re.DOTALL)


@settings(max_examples=examples(400))
@given(changes=st.dictionaries(st.sampled_from(PATHS), values, max_size=4))
def test_any_value_in_any_field(build: Any, changes: dict[str, Any]) -> None:
    try:
        document = build(changes)
    except (TypeError, AttributeError):  # a field below one that is no block any more
        return
    try:
        job = load_job(document)
    except JobError as error:
        assert error.problems
        assert all(LINE.fullmatch(line) for line in error.problems)
        return
    assert all(isinstance(argument, str) for argument in megatron_arguments(job))
    assert job.world.world_size >= 1


@settings(max_examples=examples(300))
@given(changed=st.sets(st.sampled_from(WHOLE), min_size=1, max_size=4))
def test_a_wrong_field_makes_no_other_field_wrong(build: Any, changed: set[str]) -> None:
    """Put a list in a list, which is right nowhere; rules between fields must not judge what is in its place."""
    try:
        document = build({path: [[]] for path in sorted(changed)})
    except (TypeError, AttributeError):
        return
    with pytest.raises(JobError) as refused:
        load_job(document)
    for line in refused.value.problems:
        assert any(line.startswith(path) for path in changed), line


@given(st.text(max_size=200))
def test_any_text(text: str) -> None:
    with contextlib.suppress(JobError):
        load_job(text)


@given(values)
def test_any_document(document: Any) -> None:
    with contextlib.suppress(JobError):
        load_job(yaml.safe_dump(document))


def patterns(schema: dict[str, Any]) -> Iterator[str]:
    if "pattern" in schema:
        yield schema["pattern"]
    for child in [*schema.get("properties", {}).values(), *([schema["items"]] if "items" in schema else [])]:
        yield from patterns(child)


def test_every_pattern_has_a_description() -> None:
    schema = custom_resource_definition()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    assert set(patterns(schema)) <= set(PATTERNS)
