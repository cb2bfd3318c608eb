"""Base classes of the types of the manifest."""

from typing import Any

from pydantic import BaseModel, ConfigDict
from pydantic.alias_generators import to_camel


class ManifestModel(BaseModel):
    """A block of the manifest: camelCase in YAML, snake_case in Python. Refuses unknown fields and wrong types."""

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
        """Return the value as in YAML: camelCase, without absent fields."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)


class StatusModel(ManifestModel):
    """A part of the status. A field that a newer release wrote is ignored, not refused."""

    model_config = ConfigDict(extra="ignore")
