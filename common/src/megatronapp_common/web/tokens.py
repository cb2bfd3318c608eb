"""Tokens of a job: derived from its one secret, so that only one value has to be stored."""

import enum
import hashlib
import hmac
import pathlib
import secrets

SECRET_BYTES = 32


class TokenRole(enum.StrEnum):
    """Roles that a token may prove."""

    GATHER = "gather"
    AGENT = "agent"
    VIEWER = "viewer"
    CONTROLLER = "controller"
    """Role that sees what a viewer sees, and may generate, pin and cancel."""
    SERVE = "serve"
    """Role of the hub in front of rank 0."""


def new_secret() -> str:
    """Return a fresh secret as 64 hex digits."""
    return secrets.token_hex(SECRET_BYTES)


def job_secret(key: str, uid: str) -> str:
    """Return the secret of the job with this uid, derived from an installation's key (64 hex digits), in hex."""
    return hmac.new(bytes.fromhex(key), f"megatronapp:job:{uid}".encode(), hashlib.sha256).hexdigest()


def derive_token(secret: str, role: TokenRole) -> str:
    """Return the token of `role`: HMAC-SHA256 (RFC 2104) keyed with the secret, in hex."""
    return hmac.new(bytes.fromhex(secret), f"megatronapp:{role}".encode(), hashlib.sha256).hexdigest()


def is_valid_token(secret: str, role: TokenRole, token: str) -> bool:
    """Return true if `token` proves `role`; takes the same time for every wrong token."""
    return hmac.compare_digest(derive_token(secret, role).encode(), token.encode("utf-8", "surrogatepass"))


def read_secret(path: pathlib.Path) -> str:
    """Return the secret in a file, without its line end."""
    return path.read_text(encoding="ascii").strip()
