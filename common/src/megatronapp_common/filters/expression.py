"""Vector filters that users type: a text becomes a typed tree, or an error with its column.

The language is a small part of what torch users write, so that `data.mean(dim=-1)` works unchanged
(docs/expressions.md). Python's parser reads it and a whitelist decides what it may contain; nothing of it is compiled
or evaluated by Python. Its cost is bounded before it runs.
"""

import dataclasses

from megatronapp_common.errors import FilterError
from megatronapp_common.filters import syntax
from megatronapp_common.filters.parser import parse_tree
from megatronapp_common.filters.syntax import Apply, Binary, DataVector, Function, IndexedElement, Node, Operator, Where

MAX_CHARACTERS = 500
MAX_NODES = 64
MAX_DEPTH = 24
"""Largest depth of a tree, in nodes."""
MAX_COST = 64
"""Operations for each element, a simple one counted as 1."""
_COSTS = {Function.SQRT: 2, Operator.DIVIDE: 2, Operator.POWER: 8}


@dataclasses.dataclass(frozen=True, slots=True)
class Expression:
    """A filter that can be computed: its tree is one number for each pixel."""

    root: Node

    def __str__(self) -> str:
        """Return its text in the long form, which is parsed to an equal expression."""
        return syntax.render(self.root)


def parse(text: str) -> Expression:
    """Parse a filter. Raises FilterError, and no other error, for an invalid text."""
    if len(text) > MAX_CHARACTERS:
        raise FilterError(
            MAX_CHARACTERS + 1, f"a filter has at most {MAX_CHARACTERS} characters, this one {len(text)}; shorten it"
        )
    if not text.strip():
        raise FilterError(1, "nothing is written here; write data.mean(dim=-1)")
    root = parse_tree(text)
    _check_limits(root)
    _check_result(root)
    return Expression(root)


def cost(node: Node) -> int:
    """Return the number of operations for each element of data."""
    return sum(_cost(part) for part in syntax.walk(node))


def _cost(node: Node) -> int:
    if not any(part.vector for part in node.parts) or isinstance(node, IndexedElement):
        return 0
    match node:
        case Apply():
            return _COSTS.get(node.function, 1)
        case Binary():
            return _COSTS.get(node.operator, 1)
        case Where():
            return 2
        case _:
            return 1


def _check_limits(root: Node) -> None:
    nodes = list(syntax.walk(root))
    if len(nodes) > MAX_NODES:
        raise FilterError(root.column, f"this has {len(nodes)} parts, and at most {MAX_NODES} are taken; shorten it")
    if (deepest := syntax.depth(root)) > MAX_DEPTH:
        raise FilterError(root.column, f"this is {deepest} parts deep, and {MAX_DEPTH} are taken; write it flatter")
    if (total := cost(root)) > MAX_COST:
        raise FilterError(
            root.column, f"this costs {total} operations for each element, and {MAX_COST} are taken; use fewer powers"
        )


def _check_result(root: Node) -> None:
    if not any(isinstance(node, DataVector) for node in syntax.walk(root)):
        raise FilterError(root.column, "this does not read data; write data.mean(dim=-1)")
    if root.vector:
        raise FilterError(root.column, "this is one value for each element; end it with .mean(dim=-1)")
    if root.boolean:
        raise FilterError(root.column, "this is true or false; write where(condition, 1, 0)")
