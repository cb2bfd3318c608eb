"""Partial specs: some fields are wrong, but the rules between the others can be judged.

Wrong and missing fields are replaced with placeholders, so that the rest can be read as a real Spec. No rule reads a
placeholder: its path is among the unknown ones, for which no rule is judged.
"""

import copy
import itertools
import json
import typing
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from megatronapp_common.job.api.spec import Spec
from megatronapp_common.job.fields import fields_by_alias, model_of, type_at, without_none

Path = tuple[str, ...]


def partial_spec(
    document: Any,  # noqa: ANN401 - plain data
    errors: Sequence[ErrorDetails],
) -> tuple[dict[str, Any], set[Path]] | None:
    """Return a document's spec with its wrong fields replaced, and the paths of those; None if it cannot be read."""
    if not isinstance(document, Mapping) or not isinstance(document.get("spec"), dict):
        return None
    block, unknown = copy.deepcopy(document["spec"]), set[Path]()
    for error in errors:
        if error["loc"][:1] == ("spec",) and len(error["loc"]) > 1:
            unknown |= _remove_invalid_fields(block, error, document["spec"])
    _fill(block, Spec)
    try:
        return Spec.model_validate_json(json.dumps(block), by_alias=True, by_name=False).to_dict(), unknown
    except ValidationError:
        return None


def _remove_invalid_fields(block: dict[str, Any], error: ErrorDetails, written: dict[str, Any]) -> set[Path]:
    """Remove the fields of an error and return them; a list is removed as a whole."""
    path = tuple(str(part) for part in itertools.takewhile(lambda part: isinstance(part, str), error["loc"][1:]))
    *parents, name = path
    for parent in parents:
        block, written = block.get(parent, {}), written.get(parent, {})
    block.pop(name, None)
    if error["type"] != "extra_forbidden" or len(path) < len(error["loc"]) - 1:
        return {path}
    model = model_of(type_at(Spec, parents)) if parents else Spec
    # Its name is misspelt: any field of this block that was not written may be meant.
    return {(*parents, alias) for alias in fields_by_alias(model or Spec) if alias not in written}


def _fill(block: dict[str, Any], model: type[BaseModel]) -> None:
    """Set required fields that are missing to a value that the types accept."""
    for alias, field in fields_by_alias(model).items():
        nested = model_of(field.annotation)
        if nested is not None and isinstance(block.get(alias), dict):
            _fill(block[alias], nested)
        elif alias not in block and field.is_required():
            block[alias] = _placeholder_value(field.annotation)


def _placeholder_value(annotation: Any) -> Any:  # noqa: ANN401
    plain, nested = without_none(annotation), model_of(annotation)
    if nested is not None:
        block: dict[str, Any] = {}
        _fill(block, nested)
        return block
    return typing.get_args(plain)[0] if typing.get_origin(plain) is Literal else plain(1)
