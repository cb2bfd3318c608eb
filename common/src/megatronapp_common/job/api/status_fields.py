"""Annotations of the fields of a status: how a value is read, written, and described in the schema."""

import dataclasses
import datetime
from typing import Annotated, Any

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    PlainSerializer,
    PlainValidator,
    WithJsonSchema,
)
from pydantic.alias_generators import to_camel
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from megatronapp_common.job.api.base import StatusModel
from megatronapp_common.text.times import rfc3339, rfc3339_micro, seconds_of

CONFIG = ConfigDict(alias_generator=to_camel, allow_inf_nan=False, serialize_by_alias=True)


def _stored_time(text: Any) -> float:  # noqa: ANN401 - a field of a document
    """Parse a time that can be written again. Raises ValueError."""
    if not isinstance(text, str):
        raise ValueError("a time is a text")
    try:
        seconds = seconds_of(text)
        datetime.datetime.fromtimestamp(seconds, datetime.UTC)
    except (OSError, OverflowError) as error:
        raise ValueError(str(error)) from error
    return seconds


def _clamped(given: Any) -> Any:  # noqa: ANN401 - a field of a document
    """Return a number without its fraction, as near as a count can be; other values as they are."""
    try:
        return min(max(0, int(given)), MAX_COUNT)
    except (TypeError, ValueError, OverflowError):
        return given


@dataclasses.dataclass(frozen=True, slots=True)
class SchemaOf:
    """Annotation that gives a free map the schema of a model, which does not judge it."""

    model: type[StatusModel]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:  # noqa: ANN401
        return handler(source)

    def __get_pydantic_json_schema__(self, _: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return handler(self.model.__pydantic_core_schema__)


MAX_COUNT = 2_147_483_647
Index = Annotated[int, Field(ge=0, le=MAX_COUNT)]
"""A number of a worker or rank, which is absent if it is wrong: another number would mean another worker."""
Count = Annotated[Index, BeforeValidator(_clamped)]
"""A number of things or of an attempt; a number that is no count is read as the count next to it."""
Size = Annotated[int, Field(ge=0, le=(1 << 53) - 1)]
"""Bytes; JSON readers differ about larger integers."""
Flag = Annotated[bool, Field(strict=True)]
Name = Annotated[str, Field(max_length=253)]
"""A name or an address: at most as long as a DNS name."""
EMPTY_IS_ABSENT = BeforeValidator(lambda text: text or None)
OptionalText = Annotated[str | None, EMPTY_IS_ABSENT]
TEXT = WithJsonSchema({"type": "string"})
Time = Annotated[float, PlainValidator(_stored_time), PlainSerializer(rfc3339_micro), TEXT]
"""Exact to the microsecond, as plans read it again."""
WholeTime = Annotated[float, PlainValidator(_stored_time), PlainSerializer(rfc3339), TEXT]
"""In whole seconds, as metav1.Time."""


def is_falsy(value: object) -> bool:
    """Return True for a value that is not written."""
    return not value


def requires(*names: str) -> ConfigDict:
    """Return the setting of the fields that the API server requires; the plan and old documents may differ."""

    def set_required(schema: JsonSchemaValue) -> None:
        schema.pop("required", None)
        schema.update({"required": list(names)} if names else {})

    return ConfigDict(json_schema_extra=set_required)


class StatusType:
    """Base of the types that the plan builds. A field that a newer release wrote is ignored."""

    __slots__ = ()
    __pydantic_config__ = CONFIG
