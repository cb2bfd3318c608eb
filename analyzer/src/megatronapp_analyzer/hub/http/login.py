"""Logins of browsers: codes that are good once, and the cookie of who has shown one, or a token.

A session is a role, a random word, its end and a proof that this hub made it, so that a hub which starts again knows
the browsers of before; the token itself never leaves the programs that may read the job's secret.
"""

import hashlib
import hmac
import secrets
import time
from collections.abc import Callable

from megatronapp_common.web.tokens import TokenRole, is_valid_token

LIFE_S = 12 * 3600
"""Of a session."""
CODE_LIFE_S = 60.0
MAX_CODES = 256
"""Of one role that wait to be used; the oldest go first, and none of another role."""
COOKIE = "megatronapp_hub_"
USER_ROLES = (TokenRole.VIEWER, TokenRole.CONTROLLER)
"""Roles that people may have."""


def cookie_name(uid: str) -> str:
    """Name of the cookie; differs per job, because browsers share cookies between ports of one host."""
    return COOKIE + hashlib.sha256(uid.encode()).hexdigest()[:12]


class LoginCodes:
    """Words that are good for one login, within a minute."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._kept: dict[TokenRole, dict[str, float]] = {}

    def make(self, role: TokenRole) -> str:
        """A fresh one."""
        code, kept = secrets.token_urlsafe(24), self._kept.setdefault(role, {})
        kept[code] = self._clock() + CODE_LIFE_S
        while len(kept) > MAX_CODES:
            del kept[next(iter(kept))]
        return code

    def take(self, code: str) -> TokenRole | None:
        """The role that it gives, if it is good; it is not any more."""
        role = next((role for role, kept in self._kept.items() if code in kept), None)
        return role if role is not None and self._clock() < self._kept[role].pop(code) else None


class LoginSessions:
    """Words for cookies. `clock` gives real time in seconds, which goes on while no hub runs."""

    def __init__(self, secret: str, *, clock: Callable[[], float] = time.time) -> None:
        self._secret = bytes.fromhex(secret)
        self._clock = clock

    def make(self, role: TokenRole) -> str:
        """A fresh one."""
        named = f"{role}.{secrets.token_urlsafe(24)}.{int(self._clock()) + LIFE_S}"
        return f"{named}.{self._proof(named)}"

    def role_of(self, session: str) -> TokenRole | None:
        """The role that it gives, if a hub of this job made it and its time is not over."""
        named, _, proof = session.rpartition(".")
        if not hmac.compare_digest(self._proof(named).encode(), proof.encode("utf-8", "surrogatepass")):
            return None
        role, _, until = named.split(".")
        return TokenRole(role) if self._clock() < int(until) else None

    def _proof(self, named: str) -> str:
        """HMAC-SHA256 (RFC 2104) keyed with the job's secret, apart from its tokens by the text before."""
        text = f"megatronapp:session:{named}".encode("utf-8", "surrogatepass")
        return hmac.new(self._secret, text, hashlib.sha256).hexdigest()


class LoginService:
    """What opens a hub to people."""

    def __init__(self, secret: str, *, uid: str) -> None:
        self._secret = secret
        self._sessions = LoginSessions(secret)
        self.codes = LoginCodes()
        self.cookie = cookie_name(uid)

    def role_of_token(self, token: str) -> TokenRole | None:
        """What who shows this token may be."""
        return next((role for role in USER_ROLES if is_valid_token(self._secret, role, token)), None)

    def role_of_session(self, session: str) -> TokenRole | None:
        """What a browser that shows this as its cookie may be."""
        return self._sessions.role_of(session)

    def log_in(self, shown: str) -> str | None:
        """The cookie of who shows a code or a token; None for anything else."""
        role = self.codes.take(shown) or self.role_of_token(shown)
        return None if role is None else self._sessions.make(role)
