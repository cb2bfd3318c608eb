"""From words to a typed tree, by precedence climbing; nothing here can run anything.

comparison:  sum [("<" | "<=" | ">" | ">=" | "==" | "!=") sum]
sum:         product (("+" | "-") product)*
product:     sign (("*" | "/") sign)*
sign:        ("-" | "+") sign | power
power:       postfix ["**" sign]
postfix:     atom ("." name [call] | "[" subscripts "]")*
atom:        number | "data" | "(" comparison ")" | ["torch" "."] name call
"""

import dataclasses
import itertools
from collections.abc import Iterator
from types import EllipsisType

from megatronapp_common.errors import FilterError
from megatronapp_common.filters import types
from megatronapp_common.filters.lexer import SHOWN_CHARACTERS, Token, TokenKind
from megatronapp_common.filters.syntax import DataVector, Function, Node, Number, Operator, Reduce, Reduction
from megatronapp_common.filters.vocabulary import (
    AXES,
    CALLABLE,
    DATA,
    FUNCTIONS,
    INSTEAD,
    KEEP,
    POWER,
    PREFIXES,
    REDUCTIONS,
    TRUTHS,
    WHERE,
)

MAX_NESTING = 48
"""Brackets and signs around each other; twice what the tree may be deep, so that any tree can be written."""
_COMPARISON, _SUM, _PRODUCT = 1, 2, 3
_PRECEDENCE = {operator: _COMPARISON for operator in Operator if operator.compares} | {
    Operator.ADD: _SUM,
    Operator.SUBTRACT: _SUM,
    Operator.MULTIPLY: _PRODUCT,
    Operator.DIVIDE: _PRODUCT,
}
_LONGEST_INTEGER = 9
Subscript = int | slice | EllipsisType


@dataclasses.dataclass(slots=True)
class _CallArguments:
    """What stands in the brackets of a call."""

    positional: list[Node]
    keywords: dict[str, tuple[Node | bool, int]]


class Parser:
    """Reads the words of one filter."""

    def __init__(self, words: Iterator[Token]) -> None:
        self._words = words
        self._word = next(words)
        self._nesting = 0

    def parse(self) -> Node:
        """The tree of all words. Raises ExpressionError."""
        node = self._binary(_COMPARISON)
        if self._word.kind is not TokenKind.END:
            raise self._unexpected("write an operator such as + or *, or end here")
        return node

    def _binary(self, least: int) -> Node:
        left = self._sign()
        while (operator := self._operator()) is not None and _PRECEDENCE[operator] >= least:
            column = self._take().column
            right = self._binary(_PRECEDENCE[operator] + 1)
            left = types.binary(operator, left, right, column)
        return left

    def _operator(self) -> Operator | None:
        known = self._word.kind is TokenKind.MARK and self._word.text in set(_PRECEDENCE)
        return Operator(self._word.text) if known else None

    def _sign(self) -> Node:
        if not self._at("-", "+"):
            return self._power()
        sign = self._take()
        with _Nested(self, sign.column):
            operand = self._sign()
        return types.apply(Function.NEGATIVE, operand, sign.column) if sign.text == "-" else operand

    def _power(self) -> Node:
        base = self._postfix()
        if not self._at("**"):
            return base
        column = self._take().column
        with _Nested(self, column):
            return types.binary(Operator.POWER, base, self._sign(), column)

    def _postfix(self) -> Node:
        node = self._atom()
        while self._at(".", "["):
            node = self._subscripted(node) if self._at("[") else self._attribute(node)
        return node

    def _attribute(self, node: Node) -> Node:
        self._take()
        name = self._name()
        if name.text == "values" and isinstance(node, Reduce) and node.reduction in {Reduction.MAX, Reduction.MIN}:
            return node
        return self._called(name, node)

    def _atom(self) -> Node:
        word = self._word
        if word.kind is TokenKind.NUMBER:
            return types.number(float(self._take().text), word.column)
        if self._at("("):
            return self._bracketed()
        if word.kind is not TokenKind.NAME:
            raise self._unexpected("write data, a number, a function or '('")
        self._take()
        if word.text == DATA:
            return DataVector(column=word.column)
        if word.text in PREFIXES:
            self._expect(".", f"write a function behind it, as in {word.text}.sqrt(data)")
            word = self._name()
        return self._called(word, None)

    def _bracketed(self) -> Node:
        opening = self._take()
        with _Nested(self, opening.column):
            node = self._binary(_COMPARISON)
        self._expect(")", f"close the '(' of column {opening.column}")
        return node

    def _called(self, name: Token, receiver: Node | None) -> Node:
        if name.text not in CALLABLE:
            raise _unknown(name)
        if not self._at("("):
            example = f"data.{name.text}()" if receiver is not None else f"{name.text}(data)"
            raise FilterError(name.column, f"'{name.text}' is a function; write {example}")
        arguments = self._arguments()
        if receiver is not None:
            arguments.positional.insert(1 if name.text == WHERE else 0, receiver)
        return _call(name, arguments)

    def _arguments(self) -> _CallArguments:
        opening = self._take()
        found = _CallArguments([], {})
        with _Nested(self, opening.column):
            while not self._at(")"):
                self._argument(found)
                if not self._at(","):
                    break
                self._take()
        self._expect(")", f"write ',' and more, or close the '(' of column {opening.column}")
        return found

    def _argument(self, found: _CallArguments) -> None:
        word = self._word
        if word.text in AXES | KEEP:
            self._take()
            self._expect("=", f"write {word.text}={'-1' if word.text in AXES else 'False'}")
            found.keywords[word.text] = (self._value(), word.column)
        elif found.keywords:
            raise self._unexpected("what has a name comes last")
        else:
            found.positional.append(self._binary(_COMPARISON))

    def _value(self) -> Node | bool:
        if self._word.text in TRUTHS:
            return TRUTHS[self._take().text]
        return self._binary(_COMPARISON)

    def _subscripted(self, node: Node) -> Node:
        opening = self._take()
        found = [(self._word.column, self._subscript())]
        while self._at(","):
            self._take()
            found.append((self._word.column, self._subscript()))
        self._expect("]", f"only whole numbers and ':' stand here; close the '[' of column {opening.column}")
        for column, earlier in found[:-1]:
            if earlier not in (..., slice(None), slice(None, None, None)):
                raise FilterError(column, "data has one axis here; write data[..., :8] or data[:8]")
        column, last = found[-1]
        if isinstance(last, int):
            return types.element(node, last, column)
        return types.part(node, slice(None) if last is ... else last, column)

    def _subscript(self) -> Subscript:
        if self._at("..."):
            self._take()
            return ...
        start = self._integer()
        if not self._at(":"):
            if start is None:
                raise self._unexpected("write bounds such as :8, or where(data > 0, data, 0) to choose by value")
            return start
        self._take()
        stop = self._integer()
        step = None
        if self._at(":"):
            self._take()
            step = self._integer()
        return slice(start, stop, step)

    def _integer(self) -> int | None:
        negative = self._at("-")
        if negative:
            self._take()
        word = self._word
        if word.kind is TokenKind.NUMBER and word.text.isdigit() and len(word.text) <= _LONGEST_INTEGER:
            return int(self._take().text) * (-1 if negative else 1)
        if negative or word.kind is TokenKind.NUMBER:
            raise self._unexpected("write a whole number below a billion")
        return None

    def _name(self) -> Token:
        if self._word.kind is not TokenKind.NAME:
            raise self._unexpected("write the name of a function, as in data.mean()")
        return self._take()

    def _at(self, *marks: str) -> bool:
        return self._word.kind is TokenKind.MARK and self._word.text in marks

    def _take(self) -> Token:
        word = self._word
        if word.kind is not TokenKind.END:
            self._word = next(self._words)
        return word

    def _expect(self, mark: str, hint: str) -> None:
        if not self._at(mark):
            raise self._unexpected(hint)
        self._take()

    def _unexpected(self, hint: str) -> FilterError:
        word = self._word
        if word.text in INSTEAD:
            return _unknown(word)
        return FilterError(word.column, f"{word.shown()} is unexpected here; {hint}")

    def nest(self, step: int, column: int) -> None:
        """Go one bracket deeper (1) or out again (-1). Raises ExpressionError."""
        self._nesting += step
        if self._nesting > MAX_NESTING:
            raise FilterError(column, f"this nests more than {MAX_NESTING} deep; write it simpler")


class _Nested:
    """A bracket or sign around what is parsed within."""

    def __init__(self, parser: Parser, column: int) -> None:
        self._parser = parser
        self._column = column

    def __enter__(self) -> None:
        self._parser.nest(1, self._column)

    def __exit__(self, *_: object) -> None:
        self._parser.nest(-1, self._column)


def _unknown(name: Token) -> FilterError:
    if name.text in INSTEAD:
        return FilterError(name.column, f"'{name.text}' is not offered; {INSTEAD[name.text]}")
    hint = types.nearest(name.text, [DATA, *CALLABLE]) or f"; known are {', '.join([DATA, *CALLABLE])}"
    return FilterError(name.column, f"'{name.text[:SHOWN_CHARACTERS]}' is not known{hint}")


def _call(name: Token, arguments: _CallArguments) -> Node:
    if name.text in REDUCTIONS:
        return _reduced(name, arguments)
    for keyword, (_, column) in itertools.islice(arguments.keywords.items(), 1):
        raise FilterError(column, f"{name.text} knows no {keyword}; leave it out")
    count = {WHERE: 3, POWER: 2}.get(name.text, 1)
    if len(arguments.positional) != count:
        example = {WHERE: "where(data > 0, data, 0)", POWER: "data ** 2"}.get(name.text, f"{name.text}(data)")
        found = len(arguments.positional)
        raise FilterError(name.column, f"{name.text} takes {count}, and here are {found}; write {example}")
    if name.text == WHERE:
        condition, yes, no = arguments.positional
        return types.where(condition, yes, no, name.column)
    if name.text == POWER:
        base, exponent = arguments.positional
        return types.binary(Operator.POWER, base, exponent, name.column)
    return types.apply(FUNCTIONS[name.text], arguments.positional[0], name.column)


def _reduced(name: Token, arguments: _CallArguments) -> Node:
    example = f"data.{name.text}(dim=-1)"
    if not arguments.positional:
        raise FilterError(name.column, f"{name.text} of nothing; write {example}")
    for keyword, (value, column) in arguments.keywords.items():
        if keyword in AXES:
            _check_axis(value, column)
        elif value is not False:
            raise FilterError(column, f"the result is one number for each pixel; leave {keyword} out")
    operand, *axis = arguments.positional
    for value in axis[:1]:
        if not isinstance(value, Number):
            raise FilterError(value.column, "for the larger of two write where(a > b, a, b); an axis is dim=-1")
        _check_axis(value, value.column)
    if len(axis) > 1:
        raise FilterError(axis[1].column, f"{name.text} takes a vector and an axis; write {example}")
    return types.reduce(REDUCTIONS[name.text], operand, name.column)


def _check_axis(value: Node | bool, column: int) -> None:
    if not (isinstance(value, Number) and value.value == -1):
        raise FilterError(column, "data has one axis here; write dim=-1, or leave it out")
