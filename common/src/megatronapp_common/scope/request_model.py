"""Base of requests to MegaScope as JSON."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, Strict
from pydantic.alias_generators import to_camel

Index = Annotated[int, Field(ge=0, lt=1 << 20)]


class RequestModel(BaseModel):
    """Base of requests: camelCase in JSON, snake_case in Python; refuses unknown fields and wrong types."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        populate_by_name=True,
        extra="forbid",
        strict=True,
        serialize_by_alias=True,
        allow_inf_nan=False,
        frozen=True,
    )


AsList = Strict(False)
"""Marker for tuples of strict models: they accept a list, because JSON has no tuples."""
