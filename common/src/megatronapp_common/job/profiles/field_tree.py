"""Specs as trees whose values carry their origin, and the merge of such trees.

The merge follows server-side apply: maps are merged deeply, lists of type `map` by their key, lists of type `set` are
united, and all other lists are replaced as a whole. It is associative, so that layers may be merged in any grouping.
"""

import dataclasses
import json
import re
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from megatronapp_common.job.api.spec import Spec
from megatronapp_common.job.fields import fields_by_alias, model_of, without_none

Path = tuple[str, ...]
"""Names of fields, keys of maps and keys of list items, from the spec downwards."""
FieldSet = Mapping[str, Any]
"""Fields of a manager in the form of `metadata.managedFields[].fieldsV1`."""
_PLAIN = re.compile(r"[A-Za-z][A-Za-z0-9]*")
"""Key that a path may hold after a dot; all others are written in brackets."""


@dataclasses.dataclass(frozen=True, slots=True)
class Leaf:
    """A value that is replaced as a whole."""

    value: Any
    origin: str
    """Layer that has set it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Block:
    """A map, merged by its keys."""

    fields: dict[str, "Node"]


@dataclasses.dataclass(frozen=True, slots=True)
class Items:
    """A list whose items are merged by key, in the order in which they were first given."""

    items: dict[str, "Node"]
    key: str | None
    """Field that identifies an item; None for a set, whose items identify themselves."""


Node = Leaf | Block | Items


def spec_tree(spec: Mapping[str, Any], origin: str) -> Node:
    """Return the tree of a spec, or of a part of it, all of one origin. Null values are treated as absent."""
    return _node(spec, Spec, {}, origin)


def _node(value: Any, kind: Any, extra: Mapping[str, Any], origin: str) -> Node:  # noqa: ANN401 - plain data, a type
    if isinstance(value, Mapping):
        given = {str(name): item for name, item in value.items() if item is not None}
        return Block({name: _node(item, *_field(kind, name), origin) for name, item in given.items()})
    list_type = extra.get("x-kubernetes-list-type") if isinstance(value, list) else None
    if list_type == "set":
        return Items({_text(item): Leaf(item, origin) for item in value}, None)
    if list_type == "map":
        key = extra["x-kubernetes-list-map-keys"][0]
        names = [item.get(key) if isinstance(item, Mapping) else None for item in value]
        if all(isinstance(name, str) for name in names) and len(set(names)) == len(names):
            items = zip(names, value, strict=True)
            return Items({str(name): _node(item, model_of(kind), {}, origin) for name, item in items}, key)
    return Leaf(value, origin)


def _field(kind: Any, name: str) -> tuple[Any, Mapping[str, Any]]:  # noqa: ANN401 - types
    """Return the type of a field of a block and the extensions of its schema; None and nothing if it is not known."""
    plain = without_none(kind)
    if typing.get_origin(plain) is dict:
        return typing.get_args(plain)[1], {}
    if isinstance(plain, type) and issubclass(plain, BaseModel):
        field = fields_by_alias(plain).get(name)
        if field is not None:
            extra = field.json_schema_extra
            return field.annotation, extra if isinstance(extra, dict) else {}
    return None, {}


def merge(low: Node, high: Node) -> Node:
    """Return both trees in one; where both have a value, that of `high`."""
    if isinstance(low, Block) and isinstance(high, Block):
        return Block(_merged(low.fields, high.fields))
    if isinstance(low, Items) and isinstance(high, Items) and low.key == high.key:
        return Items(_merged(low.items, high.items), low.key)
    return high


def _merged(low: Mapping[str, Node], high: Mapping[str, Node]) -> dict[str, Node]:
    both = {name: merge(node, high[name]) if name in high else node for name, node in low.items()}
    return both | {name: node for name, node in high.items() if name not in low}


def plain(node: Node) -> Any:  # noqa: ANN401 - plain data
    """Return the values of a tree as plain data."""
    match node:
        case Leaf(value=value):
            return value
        case Block(fields=fields):
            return {name: plain(child) for name, child in fields.items()}
        case Items(items=items):
            return [plain(child) for child in items.values()]


def leaves(node: Node, path: Path = (), text: str = "") -> Iterator[tuple[Path, str, Leaf]]:
    """Yield all values with their paths, also as users write them: `env[NCCL_DEBUG].value`.

    The key of a list item is part of its path, and is not yielded by itself.
    """
    match node:
        case Leaf():
            yield path, text, node
        case Block(fields=fields):
            for name, child in fields.items():
                shown = f"{text}.{name}" if _PLAIN.fullmatch(name) else f"{text}[{name}]"
                yield from leaves(child, (*path, name), shown.removeprefix("."))
        case Items(items=items, key=key):
            for name, child in items.items():
                for below, shown, leaf in leaves(child, (*path, name), f"{text}[{name}]"):
                    if key is None or below != (*path, name, key):
                        yield below, shown, leaf


def overlap(node: Node, other: Node) -> Node | None:
    """Return the values of `node` whose paths `other` has, too."""
    if isinstance(node, Block) and isinstance(other, Block):
        return Block(_overlapping(node.fields, other.fields))
    if isinstance(node, Items) and isinstance(other, Items):
        return _with_keys(node, _overlapping(node.items, other.items))
    return node


def _overlapping(nodes: Mapping[str, Node], others: Mapping[str, Node]) -> dict[str, Node]:
    found = {name: overlap(child, others[name]) for name, child in nodes.items() if name in others}
    return {name: child for name, child in found.items() if child is not None}


def managed(node: Node, fields: FieldSet) -> Node | None:
    """Return the values of `node` that a field set contains; None if it contains none."""
    if not fields or set(fields) == {"."}:
        return node
    children = {_key(name): below for name, below in fields.items() if name[:2] in {"f:", "k:", "v:"}}
    if isinstance(node, Leaf):
        return node
    below = node.fields if isinstance(node, Block) else node.items
    found = {name: managed(child, children[name]) for name, child in below.items() if name in children}
    contained = {name: child for name, child in found.items() if child is not None}
    return Block(contained) if isinstance(node, Block) else _with_keys(node, contained)


def _key(name: str) -> str:
    """Return the key of a field set's entry: `f:NAME`, `k:{"name":"NAME"}` or `v:"VALUE"`."""
    kind, text = name[:2], name[2:]
    if kind == "f:":
        return text
    try:
        value = json.loads(text)
    except RecursionError:  # a client's own nesting, which no item has as its key
        return name
    return str(next(iter(value.values()))) if kind == "k:" else _text(value)


def _with_keys(whole: Items, chosen: Mapping[str, Node]) -> Items:
    """Return a part of a list, with the keys of its items, without which these could not be merged."""
    if whole.key is None:
        return Items(dict(chosen), None)
    made: dict[str, Node] = {}
    for name, child in chosen.items():
        item = whole.items[name]
        named = isinstance(child, Block) and isinstance(item, Block) and whole.key in item.fields
        made[name] = (
            Block({whole.key: item.fields[whole.key], **child.fields})
            if named and isinstance(child, Block) and isinstance(item, Block)
            else child
        )
    return Items(made, whole.key)


def without(node: Node, paths: Sequence[Path], at: Path = ()) -> Node:
    """Return the tree without the values at or below the paths."""
    if isinstance(node, Block):
        return Block(_without(node.fields, paths, at))
    return Items(_without(node.items, paths, at), node.key) if isinstance(node, Items) else node


def _without(children: Mapping[str, Node], paths: Sequence[Path], at: Path) -> dict[str, Node]:
    return {
        name: without(child, paths, (*at, name)) for name, child in children.items() if (*at, name) not in set(paths)
    }


def _text(value: Any) -> str:  # noqa: ANN401 - a scalar
    return value if isinstance(value, str) else json.dumps(value)
