"""Request to a training for a checkpoint, after which it continues.

A backend writes the request into a file (`Env.SAVE_FILE`), which the launcher reads at intervals. On Kubernetes it is
the annotation `ANNOTATION_SAVE`, which the kubelet writes into a volume. Its text is `ATTEMPT TIME NODES`.
"""

import dataclasses
import pathlib
import re
from typing import Self

SEPARATOR = ","
_ATTEMPT = re.compile(r"[0-9]{1,9}")
_TIME = re.compile(r"[0-9]{1,12}")
"""Numbers that can be computed with: who may change pods may write anything into their annotations."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SaveRequest:
    """Request for a checkpoint of an attempt."""

    attempt: int
    time: int
    """When it was made, in seconds since the epoch: a later request of the same attempt has a later time."""
    nodes: tuple[str, ...] = ()
    """Nodes that are to be emptied once the checkpoint is written."""

    @property
    def text(self) -> str:
        """The request as it is written."""
        return f"{self.attempt} {self.time} {SEPARATOR.join(self.nodes)}".rstrip()

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Return the request in a text; None if it has none."""
        match text.split():
            case [attempt, time, *nodes] if _ATTEMPT.fullmatch(attempt) and _TIME.fullmatch(time) and len(nodes) <= 1:
                names = nodes[0].split(SEPARATOR) if nodes else []
                return cls(attempt=int(attempt), time=int(time), nodes=tuple(names))
        return None


def read_save_request(path: pathlib.Path, *, attempt: int) -> SaveRequest | None:
    """Return the request for a checkpoint of this attempt; None without one."""
    try:
        request = SaveRequest.parse(path.read_text(encoding="ascii", errors="replace"))
    except OSError:
        return None
    return request if request is not None and request.attempt == attempt else None
