"""Errors of pydantic in the words that clients read."""

import json
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from megatronapp_common.field_errors import describe, place_of


class Inner(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    size: Annotated[int, Field(ge=1, le=4)] = 1


class Settings(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    name: Annotated[str, Field(min_length=2, max_length=4, pattern="^a")]
    share: Annotated[float, Field(gt=0, lt=1)] = 0.5
    flag: bool = False
    kind: Literal["one", "two"] = "one"
    nothing: None = None
    rows: Annotated[list[int], Field(min_length=1, max_length=2)] = [1]
    inner: Inner = Inner()
    checked: int = 0

    @field_validator("checked")
    @classmethod
    def _even(cls, value: int) -> int:
        if value % 2:
            raise ValueError("must be even")
        return value


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": None}, "name: must be a string"),
        ({"name": "a"}, "name: must have at least 2 characters"),
        ({"name": "abcde"}, "name: must have at most 4 characters"),
        ({"name": "bb"}, "name: must match ^a"),
        ({"share": 0}, "share: must be above 0"),
        ({"share": 1}, "share: must be below 1"),
        ({"share": True}, "share: must be a number"),
        ({"share": float("inf")}, "share: must be a finite number"),
        ({"flag": 1}, "flag: must be true or false"),
        ({"kind": "six"}, "kind: must be 'one' or 'two'"),
        ({"nothing": 1}, "nothing: must be null, or not given"),
        ({"rows": []}, "rows: must have at least 1 elements, and has 0"),
        ({"rows": [1, 2, 3]}, "rows: must have at most 2 elements"),
        ({"rows": ["1"]}, "rows.0: must be a whole number"),
        ({"rows": 3}, "rows: must be a list"),
        ({"inner": 3}, "inner: must be an object"),
        ({"inner": {"size": 0}}, "inner.size: must be 1 or more"),
        ({"inner": {"size": 5, "x": 1}}, "inner.size: must be 4 or less; inner.x: there is no such field"),
        ({"checked": 3}, "checked: must be even"),
    ],
)
def test_each_error_names_its_field_and_what_to_write(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError) as caught:
        Settings.model_validate({"name": "abc"} | change)
    assert describe(caught.value.errors()) == message


def test_a_missing_field_and_a_body_that_is_none() -> None:
    with pytest.raises(ValidationError) as caught:
        Settings.model_validate({})
    assert describe(caught.value.errors()) == "name: must be given"
    with pytest.raises(ValidationError) as caught:
        Settings.model_validate([])
    assert describe(caught.value.errors()) == "the body: must be an object"


def test_the_source_of_a_field_and_tags_of_unions_are_no_part_of_its_place() -> None:
    error = {"loc": ("body", "prompt", "<text>", 3), "type": "string_type", "msg": "..."}
    assert place_of(error, tags={"<text>"}) == "prompt.3"


def test_broken_json_is_reported_with_its_position() -> None:
    try:
        json.loads('{"a": }')
    except json.JSONDecodeError as slip:
        error = {"loc": ("body", slip.pos), "type": "json_invalid", "msg": "", "ctx": {"error": slip.msg}}
    assert describe([error]) == "the body: is not valid JSON: Expecting value (character 6)"
    assert place_of(error) == ""


def test_many_errors_are_counted() -> None:
    errors = [{"loc": ("body", "a", place), "type": "int_type", "msg": ""} for place in range(20)]
    assert describe(errors).endswith("a.7: must be a whole number; and 12 more")


def test_an_unknown_kind_of_error_has_its_original_message() -> None:
    assert describe([{"loc": ("query", "when"), "type": "new_kind", "msg": "Not right"}]) == "when: Not right"
