"""Reference of the Python client of MegaScope, from its signatures and docstrings (docs/reference-python.md)."""

import inspect
import re
import textwrap
from collections.abc import Callable
from typing import Any, cast

import megatronapp.scope as client

INTRODUCTION = """\
# Reference: megatronapp.scope

Generated from `common/src/megatronapp/scope` by `make generate`. How to begin: *From Python* in
[reading-a-model.md](reading-a-model.md).
"""


def render_client() -> str:
    """Render all public names, in the order of `__all__`."""
    parts = [INTRODUCTION, textwrap.dedent(inspect.getdoc(client) or "").split("\n\n", 1)[0]]
    for name in client.__all__:
        parts += _entry(name, getattr(client, name))
    return "\n".join(parts) + "\n"


def _entry(name: str, found: object) -> list[str]:
    kind = "class" if inspect.isclass(found) else "function"
    lines = ["", f"## {kind} {name}", "", _doc(found)]
    if kind == "function":
        return [*lines[:3], f"```python\n{_signature(name, found)}\n```", "", lines[3]]
    for member, value in vars(found).items():
        if member.startswith("_"):
            continue
        if isinstance(value, property):
            lines += ["", f"**`{member}`** -> `{_annotation(value.fget)}`: {_doc(value)}"]
        elif inspect.isfunction(value):
            lines += ["", f"```python\n{_signature(member, value)}\n```", "", _doc(value)]
    if annotations := {key: text for key, text in vars(found).get("__annotations__", {}).items() if key[0] != "_"}:
        fields = ", ".join(f"`{key}: {_type(text)}`" for key, text in annotations.items())
        lines += ["", f"Fields: {fields}"]
    return lines


def _signature(name: str, found: object) -> str:
    return _short(f"{name}{inspect.signature(cast(Callable[..., Any], found))}")


def _annotation(found: object) -> str:
    return _type(inspect.signature(cast(Callable[..., Any], found)).return_annotation)


def _type(annotation: object) -> str:
    return _short(annotation if isinstance(annotation, str) else inspect.formatannotation(annotation))


def _short(text: str) -> str:
    """Write arrays and modules as the source does."""
    text = re.sub(r"numpy\.ndarray\[[^\]]*\], numpy\.dtype\[numpy\.(\w+)\]\]", r"NDArray[\1]", text)
    return re.sub(r"(collections\.abc|typing|pathlib|megatronapp\.scope\.\w+)\.", "", text)


def _doc(found: object) -> str:
    return inspect.getdoc(found) or ""
