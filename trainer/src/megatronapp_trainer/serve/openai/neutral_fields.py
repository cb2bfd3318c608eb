"""Fields of other servers' interfaces, accepted if they request what this server does anyway."""

import dataclasses
import json
from typing import Any

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError, core_schema


@dataclasses.dataclass(frozen=True)
class AllowedValues:
    """Metadata of a field that accepts these JSON values alone; without any, null alone.

    The error of another value is `why`, with the values that may be sent.
    """

    values: tuple[Any, ...]
    why: str

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Build the validator of the allowed values."""
        return core_schema.no_info_plain_validator_function(self._check)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Describe the values in the OpenAPI document."""
        values: JsonSchemaValue = {"enum": list(self.values)} if self.values else {"type": "null"}
        return values | {"description": f"{self.why[:1].upper()}{self.why[1:]}."}

    def _check(self, given: Any) -> Any:  # noqa: ANN401 - whatever JSON holds
        if any(_equal(given, value) for value in self.values):
            return given
        allowed = " or ".join(json.dumps(value) for value in self.values)
        advice = f"send {allowed}, or leave it out" if self.values else "leave it out"
        raise PydanticCustomError(
            "only", "{words}", {"words": f"{_shown(given)} is not supported: {self.why}; {advice}"}
        )


def _equal(value: object, other: object) -> bool:
    """Compare as JSON: 1 and 1.0 are equal, 1 and true are not."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def _shown(given: object) -> str:
    if isinstance(given, list | dict):
        return "a list" if isinstance(given, list) else "an object"
    text = json.dumps(given)
    return text if len(text) <= 40 else f"{text[:40]}..."
