"""Text from a stream of tokens: whole characters only, and never the beginning of a stop text."""

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]
"""Text of some tokens, special ones included."""

_INCOMPLETE = "\ufffd"
"""Character that a decoder writes for invalid bytes; at the end of a text, for a character that is not whole yet."""
_MOST_INCOMPLETE = 64
"""Number of tokens in a row that may end in no whole character. More of them are not text."""


class TextStream:
    """Text of the tokens that are fed. `matched` is the stop text that was found; after it no text is returned."""

    def __init__(self, decode: Decode, stops: tuple[str, ...] = ()) -> None:
        self._decode = decode
        self._stops = stops
        self._window: list[int] = []
        self._context = 0
        """Number of tokens at the window's beginning whose text is all returned: that of the others depends on them."""
        self._returned = 0
        """Number of characters of the window's text that are returned."""
        self._withheld = ""
        self.matched: str | None = None

    def feed(self, token: int) -> str:
        """Return the text that has become certain with this token."""
        self._window.append(token)
        self._withheld += self._complete_characters()
        return self._release()

    def finish(self) -> str:
        """Return the text that was held back, if no stop text was found."""
        if self.matched is not None:
            return ""
        text, self._withheld = self._withheld + self._decode(self._window)[self._returned :], ""
        self._window, self._context, self._returned = [], 0, 0
        return text

    def _complete_characters(self) -> str:
        """Return text of the window that is not returned yet, but for a character at its end that is not whole."""
        whole = self._decode(self._window)
        incomplete = whole.endswith(_INCOMPLETE) and len(self._window) - self._context < _MOST_INCOMPLETE
        certain = whole[:-1] if incomplete else whole
        new = certain[self._returned :]
        self._returned = max(self._returned, len(certain))
        if not incomplete:
            self._window = self._window[self._context :]
            self._context, self._returned = len(self._window), len(self._decode(self._window))
        return new

    def _release(self) -> str:
        found = [(place, stop) for stop in self._stops if (place := self._withheld.find(stop)) >= 0]
        if found:
            place, self.matched = min(found)
            text, self._withheld = self._withheld[:place], ""
            return text
        keep = max((_overlap(self._withheld, stop) for stop in self._stops), default=0)
        split = len(self._withheld) - keep
        text, self._withheld = self._withheld[:split], self._withheld[split:]
        return text


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` that `stop` begins with."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)
