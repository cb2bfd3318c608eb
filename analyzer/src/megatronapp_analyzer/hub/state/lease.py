"""The control lease of a training: one client controls at a time, others look on."""

import dataclasses
import secrets
import time
from collections.abc import Callable

from megatronapp_common.web.problems import HttpError

LEASE_S = 30.0
"""Time for which a lease lasts after it was taken or renewed."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LeaseHolder:
    """Client that controls the training."""

    who: str
    client: str
    """Kind of client in its own words, such as `page`."""
    expires_at: float
    """Seconds since 1970."""


class ControlLease:
    """The lease of one job, in memory: after a restart of the hub it is free.

    `clock` gives monotonic seconds, `real_time` seconds since 1970.
    """

    def __init__(
        self, *, clock: Callable[[], float] = time.monotonic, real_time: Callable[[], float] = time.time
    ) -> None:
        self._clock = clock
        self._real_time = real_time
        self._key: str | None = None
        self._who = self._client = ""
        self._expires_s = 0.0
        self.renewals = 0
        """Number that grows whenever a client shows that it controls the training."""

    @property
    def holder(self) -> LeaseHolder | None:
        """Return the client that controls the training now, or None."""
        left_s = self._expires_s - self._clock()
        if self._key is None or left_s <= 0:
            return None
        return LeaseHolder(who=self._who, client=self._client, expires_at=round(self._real_time() + left_s, 1))

    def take(self, who: str, client: str, *, force: bool) -> tuple[str, LeaseHolder | None]:
        """Give the lease to a client; returns its key and the holder that lost it by force. Raises HttpError 409."""
        holder = self.holder
        if holder is not None and not force:
            left_s = max(1, round(holder.expires_at - self._real_time()))
            raise HttpError(
                409,
                "lease-held",
                f"{holder.who} ({holder.client}) controls this training",
                f"Wait until the control is released or {left_s} s have passed, or take it over with force.",
            )
        self._key, self._who, self._client = secrets.token_hex(16), who, client
        self._extend()
        return self._key, holder

    def renew(self, key: str) -> None:
        """Extend the lease of this key, even after its end if no client has taken it. Raises HttpError 409."""
        self._check(key)
        self._extend()

    def release(self, key: str) -> None:
        """End the lease of this key. Raises HttpError 409 if another client has taken it."""
        self._check(key)
        self._key = None

    def check_holds(self, key: str) -> None:
        """Raise HttpError 409 unless the client with this key controls the training now."""
        self._check(key)
        if self.holder is None:
            raise HttpError(409, "no-lease", "the control of this client ran out", "Take the control again.")

    def _extend(self) -> None:
        self._expires_s = self._clock() + LEASE_S
        self.renewals += 1

    def _check(self, key: str) -> None:
        if self._key is not None and secrets.compare_digest(self._key.encode(), key.encode()):
            return
        holder = self.holder
        if holder is None:
            raise HttpError(409, "no-lease", "this client does not control the training", "Take the control first.")
        raise HttpError(
            409,
            "lease-lost",
            f"{holder.who} ({holder.client}) has taken the control of this training",
            "Look on, or take it over with force.",
        )
