"""Times as Kubernetes writes them, and their inverse."""

import datetime


def rfc3339(seconds: float | None) -> str | None:
    """Seconds since the epoch as metav1.Time writes them: whole seconds."""
    return None if seconds is None else rfc3339_micro(int(seconds))


def rfc3339_micro(seconds: float | None) -> str | None:
    """The same to the microsecond, where there is a fraction: for times that a plan goes on from."""
    if seconds is None:
        return None
    moment = datetime.datetime.fromtimestamp(seconds, datetime.UTC)
    return moment.isoformat().replace("+00:00", "Z")


def seconds_of(time: str) -> float:
    """The inverse of both; of `rfc3339_micro` exact for times that are rounded to microseconds.

    Raises ValueError for a text that is no time.
    """
    return datetime.datetime.fromisoformat(time).timestamp()
