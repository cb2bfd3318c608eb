"""The tree of a vector filter: nine kinds of nodes that know their shape, and nothing executable.

A node is a vector (one number, or truth value, per element of a pixel) or a single one per pixel. `types` decides which
nodes fit together; it alone makes nodes.
"""

import dataclasses
import enum
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np


class Function(enum.StrEnum):
    """Functions of each element alone."""

    NEGATIVE = "negative"
    ABS = "abs"
    SQRT = "sqrt"
    SQUARE = "square"
    FLOAT = "float"
    """1 for true, 0 for false."""


class Operator(enum.StrEnum):
    """Operators between two numbers, or two vectors of equal length, or a vector and a number."""

    ADD = "+"
    SUBTRACT = "-"
    MULTIPLY = "*"
    DIVIDE = "/"
    POWER = "**"
    LESS = "<"
    LESS_EQUAL = "<="
    GREATER = ">"
    GREATER_EQUAL = ">="
    EQUAL = "=="
    NOT_EQUAL = "!="

    @property
    def compares(self) -> bool:
        """True if the result is a truth value."""
        return self not in _ARITHMETIC


_ARITHMETIC = {Operator.ADD, Operator.SUBTRACT, Operator.MULTIPLY, Operator.DIVIDE, Operator.POWER}


class Reduction(enum.StrEnum):
    """Reductions of a vector to one number."""

    MEAN = "mean"
    SUM = "sum"
    MAX = "max"
    MIN = "min"
    STD = "std"
    """Standard deviation of the population (divided by n). Only the reducer of this name has it, no filter."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A node of a filter's tree."""

    column: int = dataclasses.field(default=1, compare=False, repr=False)
    """Column of the node in the text, in characters from 1."""

    @property
    def parts(self) -> tuple["Node", ...]:
        return ()

    def with_parts(self, parts: Sequence["Node"]) -> "Node":
        """Return the same node with other parts."""
        names = (field.name for field in dataclasses.fields(self) if isinstance(getattr(self, field.name), Node))
        changes: dict[str, Any] = dict(zip(names, parts, strict=True))
        return dataclasses.replace(self, **changes)

    @property
    def vector(self) -> bool:
        """True if the node has a value for each element."""
        return any(part.vector for part in self.parts)

    @property
    def boolean(self) -> bool:
        """True if the values are truth values, not numbers."""
        return False


@dataclasses.dataclass(frozen=True, slots=True)
class Number(Node):
    """A constant that a 32-bit float holds exactly."""

    value: float


@dataclasses.dataclass(frozen=True, slots=True)
class DataVector(Node):
    """The vector of a pixel."""

    @property
    def vector(self) -> bool:
        return True


@dataclasses.dataclass(frozen=True, slots=True)
class Apply(Node):
    """A function of each element."""

    function: Function
    operand: Node

    @property
    def parts(self) -> tuple[Node, ...]:
        return (self.operand,)


@dataclasses.dataclass(frozen=True, slots=True)
class Binary(Node):
    """An operator between two nodes."""

    operator: Operator
    left: Node
    right: Node

    @property
    def parts(self) -> tuple[Node, ...]:
        return (self.left, self.right)

    @property
    def boolean(self) -> bool:
        return self.operator.compares


@dataclasses.dataclass(frozen=True, slots=True)
class Where(Node):
    """A selection between two nodes by a condition, for each element."""

    condition: Node
    yes: Node
    no: Node

    @property
    def parts(self) -> tuple[Node, ...]:
        return (self.condition, self.yes, self.no)


@dataclasses.dataclass(frozen=True, slots=True)
class Reduce(Node):
    """A vector reduced to one number."""

    reduction: Reduction
    operand: Node

    @property
    def parts(self) -> tuple[Node, ...]:
        return (self.operand,)

    @property
    def vector(self) -> bool:
        return False


@dataclasses.dataclass(frozen=True, slots=True)
class Slice(Node):
    """A part of a vector, with the bounds that Python's slices have. The step is positive."""

    operand: Node
    start: int | None
    stop: int | None
    step: int

    @property
    def parts(self) -> tuple[Node, ...]:
        return (self.operand,)

    @property
    def slice(self) -> slice:
        """Bounds as a slice of arrays."""
        return slice(self.start, self.stop, self.step)

    @property
    def boolean(self) -> bool:
        return self.operand.boolean


@dataclasses.dataclass(frozen=True, slots=True)
class IndexedElement(Node):
    """One element of a vector of numbers; below 0 it counts from the end."""

    operand: Node
    index: int

    @property
    def parts(self) -> tuple[Node, ...]:
        return (self.operand,)

    @property
    def slice(self) -> slice:
        """Bounds of the element as a slice of length one."""
        return slice(self.index, self.index + 1 or None)

    @property
    def vector(self) -> bool:
        return False


@dataclasses.dataclass(frozen=True, slots=True)
class MergedReduction(Node):
    """The result of a reduction over several shards, by its index in a plan; not available in filters."""

    index: int


def walk(node: Node) -> Iterator[Node]:
    """Yield the node and all nodes below it."""
    yield node
    for part in node.parts:
        yield from walk(part)


def depth(node: Node) -> int:
    """Return the depth of the tree in nodes, the root included."""
    return 1 + max(map(depth, node.parts), default=0)


def render(node: Node) -> str:
    """Return the text that is parsed to an equal node."""
    inner = [render(part) for part in node.parts]
    match node:
        case Number():
            text = str(np.float32(node.value))
            return f"({text})" if text.startswith("-") else text
        case Apply(function=Function.NEGATIVE):
            return f"(-{inner[0]})"
        case Apply():
            return f"{inner[0]}.{node.function}()"
        case Reduce(reduction=Reduction.STD):
            return "std"
        case Reduce():
            return f"{inner[0]}.{node.reduction}(dim=-1)"
        case _:
            return _render_others(node, inner)


def _render_others(node: Node, inner: list[str]) -> str:
    match node:
        case Binary():
            return f"({inner[0]} {node.operator} {inner[1]})"
        case Where():
            return f"where({', '.join(inner)})"
        case Slice():
            bounds = ":".join("" if bound is None else str(bound) for bound in (node.start, node.stop, node.step))
            return f"{inner[0]}[{bounds}]"
        case IndexedElement():
            return f"{inner[0]}[{node.index}]"
        case _:
            return "data"
