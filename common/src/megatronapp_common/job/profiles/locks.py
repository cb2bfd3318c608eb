"""Locked fields: paths of a spec that a profile keeps for itself."""

import dataclasses
import difflib
import re
import typing
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from megatronapp_common.job.api.spec import Spec
from megatronapp_common.job.fields import fields_by_alias, without_none
from megatronapp_common.job.profiles.field_tree import Leaf, Node, Path, leaves

_STEP = re.compile(r"\.?([A-Za-z_][A-Za-z0-9_-]*)|\[([^\[\]]+)\]")
SHOWN_CHARACTERS = 60


@dataclasses.dataclass(frozen=True, slots=True)
class Conflict:
    """A value above a profile that differs from what the profile has locked."""

    field: str
    """Path of the value, as users write it."""
    value: Any
    origin: str
    """Layer that has set the value."""
    locked: Leaf | None
    """Value of the profile at this path; None: the profile leaves it out."""


def parse_path(text: str) -> Path:
    """Return the names of a path such as `network.mode` or `env[NCCL_DEBUG]`. Raises ValueError."""
    found, end = [], 0
    for step in _STEP.finditer(text):
        dotted, bracketed = step.group().startswith("."), step.group(2) is not None
        if step.start() != end or (bracketed or dotted if end == 0 else not (bracketed or dotted)):
            break
        found.append(step.group(1) or step.group(2))
        end = step.end()
    if end != len(text) or not found:
        raise ValueError(f"{text!r} is no path of a field; write it as network.mode or env[NCCL_DEBUG]")
    return tuple(found)


def path_problem(text: str) -> str | None:
    """Return why a path leads to no field of a spec; None if it leads to one."""
    try:
        path = parse_path(text)
    except ValueError as error:
        return str(error)
    current: Any = Spec
    for place, name in enumerate(path):
        plain = without_none(current)
        if typing.get_origin(plain) is dict:
            current = typing.get_args(plain)[1]
        elif typing.get_origin(plain) is tuple:
            current = typing.get_args(plain)[0]
        elif isinstance(plain, type) and issubclass(plain, BaseModel):
            known = fields_by_alias(plain)
            if name not in known:
                nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
                right = ".".join((*path[:place], *nearest))
                hint = f"did you mean {right}?" if nearest else f"known here: {', '.join(known)}"
                return f"{text}: unknown field; {hint}"
            field = known[name]
            if place + 1 < len(path) and _is_atomic(field.annotation, field.json_schema_extra):
                return f"{text}: the list {'.'.join(path[: place + 1])} is replaced as a whole; lock all of it"
            current = field.annotation
        elif plain is not Any:
            return f"{text}: {'.'.join(path[:place])} has no fields; lock {'.'.join(path[:place])}"
    return None


def _is_atomic(annotation: Any, extra: Any) -> bool:  # noqa: ANN401 - types
    is_list = typing.get_origin(without_none(annotation)) is tuple
    return is_list and not (isinstance(extra, dict) and extra.get("x-kubernetes-list-type") in {"map", "set"})


def conflicts(below: Node, paths: tuple[Path, ...], above: Node) -> Iterator[Conflict]:
    """Yield the values of the layers `above` a profile that differ at locked paths from `below`, which ends with it."""
    known = {path: leaf for path, _, leaf in leaves(below)}
    for path, text, leaf in leaves(above):
        if any(_touches(path, lock) for lock in paths):
            locked = known.get(path)
            if locked is None or not _equal(locked.value, leaf.value):
                yield Conflict(text, leaf.value, leaf.origin, locked)


def _touches(path: Path, lock: Path) -> bool:
    """Return True if a value at `path` is at or below the locked path, or replaces a block that contains it."""
    shorter = min(len(path), len(lock))
    return path[:shorter] == lock[:shorter]


def _equal(first: Any, second: Any) -> bool:  # noqa: ANN401 - plain data
    """Compare two values; a quantity may be a number or a text."""
    has_flag = isinstance(first, bool) or isinstance(second, bool)
    if isinstance(first, str) != isinstance(second, str) and not has_flag:
        return str(first) == str(second)
    return bool(first == second)


def shown(value: Any) -> str:  # noqa: ANN401 - plain data
    """Return a value for a message."""
    if isinstance(value, dict | list):
        return "a block" if isinstance(value, dict) else "a list"
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return text if len(text) <= SHOWN_CHARACTERS else text[: SHOWN_CHARACTERS - 3] + "..."
