"""Times in the format of Kubernetes, and their inverse."""

import datetime


def rfc3339(seconds: float) -> str:
    """Format seconds since the epoch like metav1.Time, in whole seconds."""
    return rfc3339_micro(int(seconds))


def rfc3339_micro(seconds: float) -> str:
    """Format seconds since the epoch to the microsecond, if there is a fraction: for times that a plan reads again."""
    moment = datetime.datetime.fromtimestamp(seconds, datetime.UTC)
    return moment.isoformat().replace("+00:00", "Z")


def seconds_of(time: str) -> float:
    """Parse a time of either format to seconds since the epoch.

    Exact for times that are rounded to microseconds. Raises ValueError for a text that is no time.
    """
    return datetime.datetime.fromisoformat(time).timestamp()
