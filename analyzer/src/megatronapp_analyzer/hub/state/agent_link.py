"""A connected agent as the hub sees it."""

import asyncio
import dataclasses
from collections.abc import Mapping
from typing import Any

from megatronapp_common.shared_memory_space import SharedMemorySpace


@dataclasses.dataclass(eq=False, kw_only=True, slots=True)
class AgentLink:
    """A connected agent. Commands wait in `outbox`; only the newest one matters, so that it never grows."""

    attempt: int
    worker: int
    node: str
    outbox: "asyncio.Queue[Mapping[str, Any]]" = dataclasses.field(default_factory=lambda: asyncio.Queue(1))
    replaced: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    shared_memory: SharedMemorySpace | None = None
    """Shared memory of the worker, as its agent reported it last."""

    def command(self, page: Mapping[str, Any]) -> None:
        """Send this control document next, instead of one that still waits."""
        while not self.outbox.empty():
            self.outbox.get_nowait()
        self.outbox.put_nowait(page)

    def replace(self) -> None:
        """End this connection, because the same worker has a newer one."""
        self.replaced.set()
        self.command({})
