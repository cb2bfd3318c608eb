"""Base class of all request bodies."""

from typing import Any

from pydantic import BaseModel, ConfigDict, GetJsonSchemaHandler, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema


class RequestBody(BaseModel):
    """A body of a request. Unknown fields and wrong types are refused; null for an optional field means its default."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True)

    @model_validator(mode="before")
    @classmethod
    def _null_is_default(cls, value: Any) -> Any:  # noqa: ANN401 - whatever JSON holds
        if not isinstance(value, dict):
            return value
        optional = {name for name, field in cls.model_fields.items() if not field.is_required()}
        return {name: given for name, given in value.items() if given is not None or name not in optional}

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Describe that optional fields may be null."""
        found = handler(schema)
        fields = handler.resolve_ref_schema(found)
        for name, field in fields.get("properties", {}).items():
            if name not in fields.get("required", ()) and {"type": "null"} not in field.get("anyOf", ()):
                fields["properties"][name] = _nullable(field)
        return found


def _nullable(field: JsonSchemaValue) -> JsonSchemaValue:
    """Permit null; the description of the field stays outside."""
    if field.get("type") == "null":
        return field
    about: dict[str, Any] = {key: field[key] for key in _ABOUT if key in field}
    return {"anyOf": [{key: value for key, value in field.items() if key not in about}, {"type": "null"}], **about}


_ABOUT = frozenset({"title", "description", "default"})
