"""Regular expressions of users: RE2, whose matching time is linear in the text."""

import functools
from typing import Any

from cel_expr_python import cel


def matches_re2(pattern: str, text: str) -> bool:
    """Return true if the pattern matches a part of the text. An invalid pattern matches nothing."""
    value = _expression().eval(data={"pattern": pattern, "text": text})
    return value.type() != cel.Type.ERROR and value.plain_value() is True


@functools.cache
def _expression() -> Any:  # noqa: ANN401 - the library has no types
    environment = cel.NewEnv(variables={"pattern": cel.Type.STRING, "text": cel.Type.STRING})
    return environment.compile("text.matches(pattern)")
