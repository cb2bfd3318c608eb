"""Logins of browsers: codes that are good once, and the cookies that they, or tokens, are exchanged for.

A session is a role, a random value, its end and a proof that this hub made it, so that a hub which starts again knows
the browsers of before; the token itself never leaves the programs that may read the job's secret.
"""

import hashlib
import hmac
import secrets
import time
from collections.abc import Callable

from megatronapp_common.web.tokens import TokenRole, is_valid_token

LIFE_S = 12 * 3600
"""Lifetime of a session in seconds."""
CODE_LIFE_S = 60.0
MAX_CODES = 256
"""Number of unused codes of one role; beyond it the oldest of that role are dropped, none of another role."""
COOKIE = "megatronapp_hub_"
USER_ROLES = (TokenRole.VIEWER, TokenRole.CONTROLLER)
"""Roles that users may have."""


def cookie_name(uid: str) -> str:
    """Return the name of the cookie; differs per job, because browsers share cookies between ports of one host."""
    return COOKIE + hashlib.sha256(uid.encode()).hexdigest()[:12]


class LoginCodes:
    """Codes that are good for one login, within a minute."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._kept: dict[TokenRole, dict[str, float]] = {}

    def make(self, role: TokenRole) -> str:
        """Return a fresh code for a role."""
        code, kept = secrets.token_urlsafe(24), self._kept.setdefault(role, {})
        kept[code] = self._clock() + CODE_LIFE_S
        while len(kept) > MAX_CODES:
            del kept[next(iter(kept))]
        return code

    def take(self, code: str) -> TokenRole | None:
        """Return the role that a code gives, if it is good; afterwards it no longer is."""
        role = next((role for role, kept in self._kept.items() if code in kept), None)
        return role if role is not None and self._clock() < self._kept[role].pop(code) else None


class LoginSessions:
    """Values for cookies. `clock` gives real time in seconds, which continues while no hub runs."""

    def __init__(self, secret: str, *, clock: Callable[[], float] = time.time) -> None:
        self._secret = bytes.fromhex(secret)
        self._clock = clock

    def make(self, role: TokenRole) -> str:
        """Return a fresh session for a role."""
        named = f"{role}.{secrets.token_urlsafe(24)}.{int(self._clock()) + LIFE_S}"
        return f"{named}.{self._proof(named)}"

    def role_of(self, session: str) -> TokenRole | None:
        """Return the role that a session gives, if a hub of this job made it and it has not expired."""
        named, _, proof = session.rpartition(".")
        if not hmac.compare_digest(self._proof(named).encode(), proof.encode("utf-8", "surrogatepass")):
            return None
        role, _, until = named.split(".")
        return TokenRole(role) if self._clock() < int(until) else None

    def _proof(self, named: str) -> str:
        """Return HMAC-SHA256 (RFC 2104) keyed with the job's secret; a prefix sets it apart from its tokens."""
        text = f"megatronapp:session:{named}".encode("utf-8", "surrogatepass")
        return hmac.new(self._secret, text, hashlib.sha256).hexdigest()


class LoginService:
    """Codes, sessions and tokens by which users log in to a hub."""

    def __init__(self, secret: str, *, uid: str) -> None:
        self._secret = secret
        self._sessions = LoginSessions(secret)
        self.codes = LoginCodes()
        self.cookie = cookie_name(uid)

    def role_of_token(self, token: str) -> TokenRole | None:
        """Return the role that a token proves."""
        return next((role for role in USER_ROLES if is_valid_token(self._secret, role, token)), None)

    def role_of_session(self, session: str) -> TokenRole | None:
        """Return the role of a browser with this cookie."""
        return self._sessions.role_of(session)

    def log_in(self, shown: str, *, takes_codes: bool = True) -> str | None:
        """Return a cookie in exchange for a token, or a code where these are taken; None for any other value."""
        role = (self.codes.take(shown) if takes_codes else None) or self.role_of_token(shown)
        return None if role is None else self._sessions.make(role)
