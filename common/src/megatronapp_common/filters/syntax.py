"""The tree of a vector filter: nine kinds of nodes that know their shape, and nothing that could run.

A node is a vector (one number, or truth, per element of a pixel) or a single one per pixel. What may stand where is
decided in `typed`; nodes are made there only.
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
        """The result is a truth."""
        return self not in _ARITHMETIC


_ARITHMETIC = {Operator.ADD, Operator.SUBTRACT, Operator.MULTIPLY, Operator.DIVIDE, Operator.POWER}


class Reduction(enum.StrEnum):
    """From a vector to one number."""

    MEAN = "mean"
    SUM = "sum"
    MAX = "max"
    MIN = "min"
    STD = "std"
    """Of the whole population: divided by n. Only the reducer of this name has it, no text can say it."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A part of a filter."""

    column: int = dataclasses.field(default=1, compare=False, repr=False)
    """Where it stands in the text, in characters from 1."""

    @property
    def parts(self) -> tuple["Node", ...]:
        """The nodes right below."""
        return ()

    def with_parts(self, parts: Sequence["Node"]) -> "Node":
        """The same node above others."""
        names = (field.name for field in dataclasses.fields(self) if isinstance(getattr(self, field.name), Node))
        changes: dict[str, Any] = dict(zip(names, parts, strict=True))
        return dataclasses.replace(self, **changes)

    @property
    def vector(self) -> bool:
        """There is a value for each element."""
        return any(part.vector for part in self.parts)

    @property
    def boolean(self) -> bool:
        """The values are truths, not numbers."""
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
        """Always."""
        return True


@dataclasses.dataclass(frozen=True, slots=True)
class Apply(Node):
    """A function of each element."""

    function: Function
    operand: Node

    @property
    def parts(self) -> tuple[Node, ...]:
        """The nodes right below."""
        return (self.operand,)


@dataclasses.dataclass(frozen=True, slots=True)
class Binary(Node):
    """An operator between two."""

    operator: Operator
    left: Node
    right: Node

    @property
    def parts(self) -> tuple[Node, ...]:
        """The nodes right below."""
        return (self.left, self.right)

    @property
    def boolean(self) -> bool:
        """Comparisons are."""
        return self.operator.compares


@dataclasses.dataclass(frozen=True, slots=True)
class Where(Node):
    """One of two, as a condition says, for each element."""

    condition: Node
    yes: Node
    no: Node

    @property
    def parts(self) -> tuple[Node, ...]:
        """The nodes right below."""
        return (self.condition, self.yes, self.no)


@dataclasses.dataclass(frozen=True, slots=True)
class Reduce(Node):
    """A vector made one number."""

    reduction: Reduction
    operand: Node

    @property
    def parts(self) -> tuple[Node, ...]:
        """The nodes right below."""
        return (self.operand,)

    @property
    def vector(self) -> bool:
        """Never."""
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
        """The nodes right below."""
        return (self.operand,)

    @property
    def slice(self) -> slice:
        """The same for arrays."""
        return slice(self.start, self.stop, self.step)

    @property
    def boolean(self) -> bool:
        """As its vector is."""
        return self.operand.boolean


@dataclasses.dataclass(frozen=True, slots=True)
class IndexedElement(Node):
    """One element of a vector of numbers; below 0 it counts from the end."""

    operand: Node
    index: int

    @property
    def parts(self) -> tuple[Node, ...]:
        """The nodes right below."""
        return (self.operand,)

    @property
    def slice(self) -> slice:
        """The same for arrays, as a part of length one."""
        return slice(self.index, self.index + 1 or None)

    @property
    def vector(self) -> bool:
        """Never."""
        return False


@dataclasses.dataclass(frozen=True, slots=True)
class MergedReduction(Node):
    """The result of a reduction over several shards, by its place in a plan. No text can say it."""

    index: int


def walk(node: Node) -> Iterator[Node]:
    """The node and all below it."""
    yield node
    for part in node.parts:
        yield from walk(part)


def depth(node: Node) -> int:
    """How many nodes stand one below the other, this one included."""
    return 1 + max(map(depth, node.parts), default=0)


def render(node: Node) -> str:
    """The text that is parsed to an equal node."""
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
