"""Refusal of query parameters that a request repeats although the operation takes one value.

FastAPI takes the last of them, so a caller would not learn that the others had no effect.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from starlette.requests import HTTPConnection

from megatronapp_common.web.problems import DOCUMENT, HttpError


async def refuse_repeated_parameters(connection: HTTPConnection) -> None:
    """Raise HttpError (422) that names repeated parameters; a dependency of all routes of a FastAPI application.

    Its OpenAPI document says which parameters an operation has, and which of them are lists, which may be repeated.
    """
    counts = Counter(name for name, _ in connection.query_params.multi_items())
    repeated = {name: count for name, count in counts.items() if count > 1}
    if not repeated or connection.scope["type"] != "http":
        return
    document, path = connection.app.openapi(), connection.scope["route"].path_format
    operation = document["paths"].get(path, {}).get(connection.scope["method"].lower(), {})
    single = {parameter["name"] for parameter in operation.get("parameters", ()) if _is_scalar(parameter)}
    problems = [
        f"{name}: must be given once, and is given {count} times"
        for name, count in sorted(repeated.items())
        if name in single
    ]
    if problems:
        raise HttpError(422, "invalid-request", "; ".join(problems), f"See {DOCUMENT} for the fields.")


def _is_scalar(parameter: Mapping[str, Any]) -> bool:
    schema = parameter["schema"]
    types = {part.get("type") for part in (schema, *schema.get("anyOf", ()))}
    return parameter["in"] == "query" and "array" not in types
