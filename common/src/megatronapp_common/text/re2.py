"""Regular expressions that users write: RE2, so that none can take longer than its text is long."""

import functools
from typing import Any

from cel_expr_python import cel


def matches_re2(pattern: str, text: str) -> bool:
    """Whether the pattern fits a part of the text. A pattern that is no expression fits nothing."""
    value = _expression().eval(data={"pattern": pattern, "text": text})
    return value.type() != cel.Type.ERROR and value.plain_value() is True


@functools.cache
def _expression() -> Any:  # noqa: ANN401 - the library has no types
    environment = cel.NewEnv(variables={"pattern": cel.Type.STRING, "text": cel.Type.STRING})
    return environment.compile("text.matches(pattern)")
