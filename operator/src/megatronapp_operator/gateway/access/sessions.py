"""Logins of browsers. A cookie holds a random value; the tokens of the login never leave the gateway's memory.

After a restart of the gateway users log in again; two replicas need session affinity in front of them.
"""

import dataclasses
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable

LIFE_S = 12 * 3600.0
TICKET_LIFE_S = 300.0
MAX_SESSIONS = 10_000
MAX_BYTES = 32 << 20
"""Limit of the bytes of tokens, in all sessions."""
MAX_EACH = 100
"""Limit of the sessions of one identity, so that no caller evicts the sessions of others."""
MAX_TOKENS = 16
"""Tokens of one browser: one of the cluster, or several of single jobs."""


@dataclasses.dataclass(slots=True)
class _StoredTokens:
    tokens: tuple[str, ...]
    whose: str
    until: float

    @property
    def size(self) -> int:
        """Bytes of the tokens."""
        return sum(map(len, self.tokens))


class TokenStore:
    """Tokens by random values; the oldest are dropped where they are too many."""

    def __init__(self, *, life_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._life_s = life_s
        self._clock = clock
        self._kept: OrderedDict[str, _StoredTokens] = OrderedDict()
        self._bytes = 0

    def add(self, tokens: tuple[str, ...], *, whose: str) -> str:
        """A fresh word for these tokens of an identity."""
        word = secrets.token_urlsafe(32)
        own = [older for older, kept in self._kept.items() if kept.whose == whose]
        for older in own[: max(0, len(own) - MAX_EACH + 1)]:
            self.drop(older)
        kept = _StoredTokens(tokens[:MAX_TOKENS], whose, self._clock() + self._life_s)
        self._kept[word] = kept
        self._bytes += kept.size
        while len(self._kept) > MAX_SESSIONS or self._bytes > MAX_BYTES:
            self.drop(next(iter(self._kept)))
        return word

    def get(self, word: str) -> tuple[str, ...]:
        """The tokens of a word; none if it is not known any more."""
        found = self._kept.get(word)
        if found is None:
            return ()
        if self._clock() >= found.until:
            self.drop(word)
            return ()
        return found.tokens

    def drop(self, word: str) -> None:
        """Drop the tokens of a random value."""
        kept = self._kept.pop(word, None)
        self._bytes -= 0 if kept is None else kept.size

    def take(self, word: str) -> tuple[str, ...]:
        """The tokens of a word that is good for once."""
        tokens = self.get(word)
        self.drop(word)
        return tokens


class BrowserSessions:
    """The browsers that are logged in, and tickets with which a program logs one in."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._open = TokenStore(life_s=LIFE_S, clock=clock)
        self._tickets = TokenStore(life_s=TICKET_LIFE_S, clock=clock)

    def tokens(self, word: str) -> tuple[str, ...]:
        """Return the tokens of the browser with this cookie."""
        return self._open.get(word)

    def log_in(self, tokens: tuple[str, ...], *, whose: str, before: str = "") -> str:
        """The word for a browser that showed these tokens; those that it showed before, for other jobs, stay good."""
        older = tuple(token for token in self._open.get(before) if token not in tokens)
        self._open.drop(before)
        return self._open.add((*tokens, *older), whose=whose)

    def log_out(self, word: str) -> None:
        """Log a browser out."""
        self._open.drop(word)

    def ticket(self, tokens: tuple[str, ...], *, whose: str) -> str:
        """Make a ticket for an address that will be opened soon: good for one login."""
        return self._tickets.add(tokens, whose=whose)

    def tokens_of_ticket(self, word: str) -> tuple[str, ...]:
        """Return the tokens of a ticket, which stays good."""
        return self._tickets.get(word)

    def redeem(self, word: str) -> tuple[str, ...]:
        """Return the tokens of a ticket, once."""
        return self._tickets.take(word)
