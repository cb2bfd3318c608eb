"""Parse a vector filter into a typed tree: Python's own parser, then a whitelist.

Nothing is compiled or evaluated. `_scan` checks the text from left to right (characters, names, brackets) so that a
mistake has its column; `ast.parse` then applies Python's grammar and precedence; `_Converter` takes the nodes that it
knows and makes those of `syntax` from them.
"""

import ast
import bisect
import dataclasses
import itertools
import re
from types import EllipsisType

from megatronapp_common.errors import FilterError
from megatronapp_common.filters import types
from megatronapp_common.filters.syntax import DataVector, Function, Node, Number, Operator, Reduce, Reduction
from megatronapp_common.filters.vocabulary import (
    AXES,
    CALLABLE,
    DATA,
    FUNCTIONS,
    INSTEAD,
    INSTEAD_OF_SIGNS,
    KEEP,
    POWER,
    PREFIXES,
    REDUCTIONS,
    TRUTHS,
    VALUES,
    WHERE,
)

MAX_NESTING = 48
"""Levels of brackets, and of signs and powers; twice the depth of a tree, so that any tree can be written."""
SHOWN_CHARACTERS = 40
"""Characters of a token that a message shows."""
_TOKEN = re.compile(
    r"(?P<space>[ \t\r\n]+)"
    r"|(?P<number>(?:[0-9]+(?:\.(?!\.)[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)"
    r"|(?P<name>[A-Za-z_][A-Za-z0-9_]*)"
    r"|(?P<mark>\.\.\.|\*\*|<=|>=|==|!=|[-+*/<>()\[\],:.=])"
)
_KNOWN = {DATA, *CALLABLE, *PREFIXES, *AXES, *KEEP, *TRUTHS}
_CLOSING = {")": "(", "]": "["}
_OPERATORS: dict[type[ast.AST], Operator] = {
    ast.Add: Operator.ADD,
    ast.Sub: Operator.SUBTRACT,
    ast.Mult: Operator.MULTIPLY,
    ast.Div: Operator.DIVIDE,
    ast.Pow: Operator.POWER,
    ast.Lt: Operator.LESS,
    ast.LtE: Operator.LESS_EQUAL,
    ast.Gt: Operator.GREATER,
    ast.GtE: Operator.GREATER_EQUAL,
    ast.Eq: Operator.EQUAL,
    ast.NotEq: Operator.NOT_EQUAL,
}
_INTEGER = re.compile(r"[0-9]{1,9}")
_OPERAND_HINT = "write data, a number, a function or '('"
_OPERATOR_HINT = "write an operator such as + or *, or end here"
_BOUNDS_HINT = "write bounds such as :8, or where(data > 0, data, 0) to choose by value"
_INTEGER_HINT = "write a whole number below a billion"
Subscript = int | slice | EllipsisType


def parse_tree(text: str) -> Node:
    """Return the typed tree of a filter. Raises FilterError for any text that is none."""
    tokens = _scan(text)
    source = re.sub(r"\s", " ", text)
    indent = len(source) - len(source.lstrip())
    try:
        expression = ast.parse(source.strip(), mode="eval").body
    except SyntaxError as error:
        raise _syntax_error(tokens, (error.offset or 1) + indent) from None
    except (MemoryError, RecursionError):
        raise _nests_too_deep(1) from None
    return _Converter(tokens, indent).value(expression)


@dataclasses.dataclass(frozen=True, slots=True)
class _Token:
    kind: str
    """number, name, mark or end."""
    text: str
    column: int

    @property
    def ends_operand(self) -> bool:
        return self.kind in {"number", "name"} or self.text in {")", "]", "..."}

    def unexpected(self, hint: str) -> FilterError:
        shown = "the end of the text" if self.kind == "end" else f"'{self.text[:SHOWN_CHARACTERS]}'"
        return FilterError(self.column, f"{shown} is unexpected here; {hint}")


def _scan(text: str) -> list[_Token]:
    """Return the tokens, and one of kind `end`. Raises FilterError at the first that cannot be where it is."""
    tokens: list[_Token] = []
    brackets: list[_Bracket] = []
    at = 0
    while at < len(text):
        found = _TOKEN.match(text, at)
        if found is None or text.startswith("//", at):
            raise FilterError(at + 1, _unexpected_character(text, at))
        if found.lastgroup != "space":
            token = _Token(str(found.lastgroup), found[0], at + 1)
            _check_name(token, tokens)
            _check_bracket(token, brackets)
            tokens.append(token)
        at = found.end()
    end = _Token("end", "", len(text) + 1)
    if brackets:
        raise end.unexpected(brackets[-1].hint)
    return [*tokens, end]


def _unexpected_character(text: str, at: int) -> str:
    sign = text[at : at + 2] if text.startswith("//", at) else text[at]
    shown = repr(sign) if sign.isprintable() else f"U+{ord(sign):04X}"
    return (
        f"{shown} has no meaning here; {INSTEAD_OF_SIGNS.get(sign, 'write numbers, data, + - * / **, and functions')}"
    )


def _check_name(token: _Token, before: list[_Token]) -> None:
    if token.kind == "name" and token.text not in _KNOWN and not (token.text == VALUES and before):
        raise _unknown(token.text, token.column)
    if token.kind in {"number", "name"} and before and before[-1].ends_operand:
        raise token.unexpected(_OPERATOR_HINT)


@dataclasses.dataclass(slots=True)
class _Bracket:
    """An open bracket, and whether an argument in it has a name."""

    token: _Token
    is_named: bool = False
    begins: bool = False
    """The next token begins another argument after one that has a name."""

    @property
    def hint(self) -> str:
        return f"close the '{self.token.text}' of column {self.token.column}"


def _check_bracket(token: _Token, brackets: list[_Bracket]) -> None:
    inner = brackets[-1] if brackets else None
    if inner is not None and inner.begins:
        inner.begins = False
        if token.text not in AXES | KEEP | {")"}:
            raise token.unexpected("arguments with a name are last")
    if token.text in _CLOSING:
        if inner is None:
            raise token.unexpected(_OPERATOR_HINT)
        if inner.token.text != _CLOSING[token.text]:
            raise token.unexpected(inner.hint)
        brackets.pop()
    elif token.text in _CLOSING.values():
        brackets.append(_Bracket(token))
        if len(brackets) > MAX_NESTING:
            raise _nests_too_deep(token.column)
    elif inner is not None:
        inner.begins = token.text == "," and inner.is_named
        inner.is_named |= token.text == "="


def _syntax_error(tokens: list[_Token], column: int) -> FilterError:
    """Return the error for a text that is no Python, by the token at the column and the one before it."""
    index = max(0, bisect.bisect(tokens, column, key=lambda token: token.column) - 1)
    token, before = tokens[index], tokens[index - 1] if index else None
    if token.kind == "number" and token.text.startswith("0"):
        return token.unexpected("write it without leading zeros")
    if before is not None and before.text == ".":
        return token.unexpected("write the name of a function, as in data.mean()")
    if before is not None and before.text == "[":
        return token.unexpected(_BOUNDS_HINT)
    if before is not None and token.text == "]":
        return token.unexpected(_INTEGER_HINT)
    return token.unexpected(_OPERATOR_HINT if before is not None and before.ends_operand else _OPERAND_HINT)


def _nests_too_deep(column: int) -> FilterError:
    return FilterError(column, f"this nests more than {MAX_NESTING} deep; write it simpler")


def _unknown(name: str, column: int) -> FilterError:
    if name in INSTEAD:
        return FilterError(column, f"'{name}' is not offered; {INSTEAD[name]}")
    hint = types.nearest(name, [DATA, *CALLABLE]) or f"; known are {', '.join([DATA, *CALLABLE])}"
    return FilterError(column, f"'{name[:SHOWN_CHARACTERS]}' is not known{hint}")


@dataclasses.dataclass(frozen=True, slots=True)
class _Converter:
    """Makes nodes of `syntax` from those of `ast`; every kind that it does not name is an error."""

    tokens: list[_Token]
    indent: int

    def value(self, node: ast.expr, depth: int = 0) -> Node:
        """Convert a node. What is nested to the left (sums, methods, subscripts) takes a loop, not a frame each."""
        if depth > MAX_NESTING:
            raise _nests_too_deep(self._column(node))
        outer: list[ast.expr] = []
        while (inner := _left_of(node)) is not None:
            outer.append(node)
            node = inner
        result = self._innermost(node, depth)
        for above in reversed(outer):
            result = self._around(above, result, depth)
        return result

    def _innermost(self, node: ast.expr, depth: int) -> Node:
        match node:
            case ast.Name(id=name) if name == DATA:
                return DataVector(column=self._column(node))
            case ast.Constant(value=int() | float()) if not isinstance(node.value, bool):
                token = self._token(self._column(node))
                return types.number(float(token.text), token.column)
            case ast.Constant(value=bool()):
                raise _unknown(str(node.value), self._column(node))
            case ast.UnaryOp(op=ast.UAdd() | ast.USub(), operand=operand):
                inner = self.value(operand, depth + 1)
                is_minus = isinstance(node.op, ast.USub)
                return types.apply(Function.NEGATIVE, inner, self._column(node)) if is_minus else inner
            case ast.Call(func=ast.Name(id=name)) if name in CALLABLE:
                return self._call(name, self._column(node), node, None, depth)
            case ast.Call(func=ast.Attribute(value=ast.Name(id=prefix), attr=name)) if prefix in PREFIXES:
                return self._call(name, self._attribute_column(node.func), node, None, depth)
            case ast.Attribute(value=ast.Name(id=prefix), attr=name) if prefix in PREFIXES:
                raise self._no_call(name, self._attribute_column(node), f"{name}(data)")
            case ast.Name(id=name) if name in CALLABLE:
                raise self._no_call(name, self._column(node), f"{name}(data)")
            case _:
                raise self._unexpected(node)

    def _around(self, node: ast.expr, inner: Node, depth: int) -> Node:
        """Convert a node whose left part is `inner`."""
        match node:
            case ast.BinOp(op=ast.Pow()):
                right = self.value(node.right, depth + 1)
                return types.binary(Operator.POWER, inner, right, self._after(node.left).column)
            case ast.BinOp():
                right = self.value(node.right, depth)
                return types.binary(_OPERATORS[type(node.op)], inner, right, self._after(node.left).column)
            case ast.Compare():
                left: ast.expr = node.left
                for operator, right_node in zip(node.ops, node.comparators, strict=True):
                    right = self.value(right_node, depth)
                    inner = types.binary(_OPERATORS[type(operator)], inner, right, self._after(left).column)
                    left = right_node
                return inner
            case ast.Subscript():
                return self._subscripted(inner, node.slice)
            case ast.Call(func=ast.Attribute(attr=name)):
                return self._call(name, self._attribute_column(node.func), node, inner, depth)
            case ast.Attribute(attr=name):
                if name == VALUES and isinstance(inner, Reduce) and inner.reduction in {Reduction.MAX, Reduction.MIN}:
                    return inner
                raise self._no_call(name, self._attribute_column(node), f"data.{name}()")
            case _:
                raise AssertionError(f"{type(node).__name__} has no left part")

    def _call(self, name: str, column: int, node: ast.Call, receiver: Node | None, depth: int) -> Node:
        if name not in CALLABLE:
            raise _unknown(name, column)
        arguments = [self._argument(argument, depth) for argument in node.args]
        keywords = {str(keyword.arg): self._keyword(keyword, depth) for keyword in node.keywords}
        if receiver is not None:
            arguments.insert(1 if name == WHERE else 0, receiver)
        if name in REDUCTIONS:
            return _reduced(name, column, arguments, keywords)
        for keyword, (_, place) in itertools.islice(keywords.items(), 1):
            raise FilterError(place, f"{name} knows no {keyword}; leave it out")
        return _applied(name, column, arguments)

    def _argument(self, node: ast.expr, depth: int) -> Node:
        if isinstance(node, ast.Name) and node.id in AXES | KEEP:
            next_token = self._token(self._column(node) + len(node.id))
            raise next_token.unexpected(f"write {node.id}={'-1' if node.id in AXES else 'False'}")
        return self.value(node, depth + 1)

    def _keyword(self, keyword: ast.keyword, depth: int) -> tuple[Node | bool, int]:
        column = keyword.col_offset + self.indent + 1
        if keyword.arg is None:
            raise self._token(column).unexpected(_OPERAND_HINT)
        if keyword.arg not in AXES | KEEP:
            raise _unknown(keyword.arg, column)
        if isinstance(keyword.value, ast.Constant) and isinstance(keyword.value.value, bool):
            return keyword.value.value, column
        return self.value(keyword.value, depth + 1), column

    def _subscripted(self, inner: Node, node: ast.expr) -> Node:
        items = node.elts if isinstance(node, ast.Tuple) else [node]
        if not items:
            raise self._unexpected(node)
        found = [(self._column(item), self._subscript(item)) for item in items]
        for column, earlier in found[:-1]:
            if earlier not in (..., slice(None), slice(None, None, None)):
                raise FilterError(column, "data has one axis here; write data[..., :8] or data[:8]")
        column, last = found[-1]
        if isinstance(last, int):
            return types.element(inner, last, column)
        return types.part(inner, slice(None) if last is ... else last, column)

    def _subscript(self, node: ast.expr) -> Subscript:
        if isinstance(node, ast.Slice):
            return slice(
                *(None if bound is None else self._integer(bound) for bound in (node.lower, node.upper, node.step))
            )
        return ... if isinstance(node, ast.Constant) and node.value is ... else self._integer(node)

    def _integer(self, node: ast.expr) -> int:
        token = self._token(self._column(node))
        sign = 1
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            node, sign = node.operand, -1
            token = self._token(self._column(node))
        elif not isinstance(node, ast.Constant):
            raise token.unexpected(_BOUNDS_HINT)
        if isinstance(node, ast.Constant) and _INTEGER.fullmatch(token.text):
            return sign * int(token.text)
        raise token.unexpected(_INTEGER_HINT)

    def _no_call(self, name: str, column: int, example: str) -> FilterError:
        if name not in CALLABLE:
            return _unknown(name, column)
        return FilterError(column, f"'{name}' is a function; write {example}")

    def _unexpected(self, node: ast.expr) -> FilterError:
        """Return the error for a kind of node that filters do not have, such as a tuple or a call of a number."""
        match node:
            case ast.Name(id=name) if name in PREFIXES:
                return self._after(node).unexpected(f"write a function after it, as in {name}.sqrt(data)")
            case ast.Call(func=ast.Name(id=name)) if name in PREFIXES:
                return self._after(node.func).unexpected(f"write a function after it, as in {name}.sqrt(data)")
            case ast.Call():
                return self._after(node.func).unexpected(_OPERATOR_HINT)
            case ast.Tuple(elts=[first, *_]) | ast.NamedExpr(target=first):
                return self._after(first).unexpected(_OPERATOR_HINT)
            case _:
                return self._token(self._column(node)).unexpected(_OPERAND_HINT)

    def _column(self, node: ast.expr) -> int:
        return node.col_offset + self.indent + 1

    def _attribute_column(self, node: ast.expr) -> int:
        assert isinstance(node, ast.Attribute)
        return (node.end_col_offset or 0) - len(node.attr) + self.indent + 1

    def _token(self, column: int) -> _Token:
        """Return the token that begins at a column, or the next one."""
        return self.tokens[bisect.bisect_left(self.tokens, column, key=lambda token: token.column)]

    def _after(self, node: ast.expr) -> _Token:
        """Return the first token after a node and the brackets around it."""
        index = bisect.bisect_left(self.tokens, (node.end_col_offset or 0) + self.indent + 1, key=lambda t: t.column)
        while self.tokens[index].text == ")":
            index += 1
        return self.tokens[index]


def _left_of(node: ast.expr) -> ast.expr | None:
    """Return the left part of a node that is an operator, a method or a subscript that filters know."""
    match node:
        case ast.BinOp(op=operator) if type(operator) in _OPERATORS:
            return node.left
        case ast.Compare(ops=operators) if all(type(operator) in _OPERATORS for operator in operators):
            return node.left
        case ast.Subscript():
            return node.value
        case ast.Attribute() | ast.Call(func=ast.Attribute()):
            attribute = node.func if isinstance(node, ast.Call) else node
            assert isinstance(attribute, ast.Attribute)
            is_prefix = isinstance(attribute.value, ast.Name) and attribute.value.id in PREFIXES
            return None if is_prefix else attribute.value
        case _:
            return None


def _applied(name: str, column: int, arguments: list[Node]) -> Node:
    count = {WHERE: 3, POWER: 2}.get(name, 1)
    if len(arguments) != count:
        example = {WHERE: "where(data > 0, data, 0)", POWER: "data ** 2"}.get(name, f"{name}(data)")
        raise FilterError(column, f"{name} takes {count}, and here are {len(arguments)}; write {example}")
    if name == WHERE:
        condition, yes, no = arguments
        return types.where(condition, yes, no, column)
    if name == POWER:
        base, exponent = arguments
        return types.binary(Operator.POWER, base, exponent, column)
    return types.apply(FUNCTIONS[name], arguments[0], column)


def _reduced(name: str, column: int, arguments: list[Node], keywords: dict[str, tuple[Node | bool, int]]) -> Node:
    example = f"data.{name}(dim=-1)"
    if not arguments:
        raise FilterError(column, f"{name} of nothing; write {example}")
    for keyword, (value, place) in keywords.items():
        if keyword in AXES:
            _check_axis(value, place)
        elif value is not False:
            raise FilterError(place, f"the result is one number for each pixel; leave {keyword} out")
    operand, *axis = arguments
    for given in axis[:1]:
        if not isinstance(given, Number):
            raise FilterError(given.column, "for the larger of two write where(a > b, a, b); an axis is dim=-1")
        _check_axis(given, given.column)
    if len(axis) > 1:
        raise FilterError(axis[1].column, f"{name} takes a vector and an axis; write {example}")
    return types.reduce(REDUCTIONS[name], operand, column)


def _check_axis(value: Node | bool, column: int) -> None:
    if not (isinstance(value, Number) and value.value == -1):
        raise FilterError(column, "data has one axis here; write dim=-1, or leave it out")
