"""From the text of a vector filter to its words."""

import dataclasses
import enum
import re
from collections.abc import Iterator

from megatronapp_common.errors import FilterError

_TOKEN = re.compile(
    r"(?P<space>[ \t\r\n]+)"
    r"|(?P<number>(?:[0-9]+(?:\.(?!\.)[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)"
    r"|(?P<name>[A-Za-z_][A-Za-z0-9_]*)"
    r"|(?P<mark>\.\.\.|\*\*|<=|>=|==|!=|[-+*/<>()\[\],:.=])"
)
_INSTEAD = {
    "//": "divide with /",
    "%": "there is no remainder",
    "@": "there is no matrix here; multiply elements with *",
    "^": "write ** for a power",
    "&": "put one where into another: where(a > 0, where(b > 0, x, y), y)",
    "|": "put one where into another: where(a > 0, x, where(b > 0, x, y))",
    "~": "turn the comparison round: <= for >",
    "!": "write != for 'is not'",
    ";": "write one formula",
    "'": "there are no texts here; write numbers and data",
    '"': "there are no texts here; write numbers and data",
    "\u2212": "write - for minus",
    "\u00d7": "write * for times",
    "\u00b2": "write ** 2",
    "\u2264": "write <=",
    "\u2265": "write >=",
}


SHOWN_CHARACTERS = 40


class TokenKind(enum.Enum):
    """What a word is."""

    NUMBER = "number"
    NAME = "name"
    MARK = "mark"
    END = "end"


@dataclasses.dataclass(frozen=True, slots=True)
class Token:
    """One word of a filter."""

    kind: TokenKind
    text: str
    column: int

    def shown(self) -> str:
        """For a sentence to people."""
        return "the end of the text" if self.kind is TokenKind.END else f"'{self.text[:SHOWN_CHARACTERS]}'"


def tokenize(text: str) -> Iterator[Token]:
    """The words, and one of kind END behind them. Raises ExpressionError."""
    at = 0
    while at < len(text):
        found = _TOKEN.match(text, at)
        if found is None or text.startswith("//", at):
            raise FilterError(at + 1, _unexpected_character_message(text, at))
        if found.lastgroup != "space":
            yield Token(TokenKind(found.lastgroup), found[0], at + 1)
        at = found.end()
    yield Token(TokenKind.END, "", len(text) + 1)


def _unexpected_character_message(text: str, at: int) -> str:
    sign = text[at : at + 2] if text.startswith("//", at) else text[at]
    shown = repr(sign) if sign.isprintable() else f"U+{ord(sign):04X}"
    return f"{shown} has no meaning here; {_INSTEAD.get(sign, 'write numbers, data, + - * / **, and functions')}"
