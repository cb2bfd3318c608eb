"""A connected agent as the hub sees it."""

import asyncio
import dataclasses
import logging
import time
from collections.abc import Mapping
from typing import Any

from megatronapp_common.shared_memory_space import SharedMemorySpace

LOG = logging.getLogger(__name__)
RIVAL_S = 30.0
"""Age of a connection in seconds below which a newer one is that of a second agent; refused agents try every 5 s."""


@dataclasses.dataclass(eq=False, kw_only=True, slots=True)
class AgentLink:
    """A connected agent. Commands wait in `outbox`; only the newest one matters, so that it never grows."""

    attempt: int
    worker: int
    node: str
    outbox: "asyncio.Queue[Mapping[str, Any]]" = dataclasses.field(default_factory=lambda: asyncio.Queue(1))
    since_s: float = dataclasses.field(default_factory=time.monotonic)
    replaced: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    shared_memory: SharedMemorySpace | None = None
    """Shared memory of the worker, as its agent reported it last."""

    def command(self, document: Mapping[str, Any]) -> None:
        """Send this control document next, instead of one that still waits."""
        while not self.outbox.empty():
            self.outbox.get_nowait()
        self.outbox.put_nowait(document)

    def replace(self, newer: "AgentLink") -> bool:
        """End this connection, because the same worker has a newer one; return true if that refuses this agent.

        An agent whose connection was lost replaces it once. Two agents of a worker replace each other again and again.
        """
        self.replaced.set()
        self.command({})
        is_refused = newer.since_s - self.since_s < RIVAL_S
        if is_refused:
            text = (
                "agent refused: worker %d, attempt %d, on node %s; another agent of this worker, on node %s, connected"
            )
            LOG.warning(text, self.worker, self.attempt, self.node, newer.node)
        return is_refused
