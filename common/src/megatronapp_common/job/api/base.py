"""What all types of the manifest have in common."""

from typing import Any

from pydantic import BaseModel, ConfigDict
from pydantic.alias_generators import to_camel


class ManifestModel(BaseModel):
    """camelCase in YAML, snake_case in Python; unknown fields and values of a wrong type are refused."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        populate_by_name=True,
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        protected_namespaces=(),
    )

    def to_dict(self) -> dict[str, Any]:
        """The value as in YAML: camelCase, absent fields left out."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)


class StatusModel(ManifestModel):
    """A part of the status. A field that a newer release wrote is kept out, not refused."""

    model_config = ConfigDict(extra="ignore")
