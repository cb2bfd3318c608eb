"""List and watch of the pods of jobs: the store follows them, at a tenth of the cost of a watch by kopf.

The rules are those of client-go's reflector: list, watch from the version of the list on, continue from the last
version that was seen, and list again once the server has forgotten that version. A list also shows what was deleted
meanwhile.
"""

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable, Collection, Sequence
from typing import NoReturn

from megatronapp_common.names import LABEL_JOB_UID
from megatronapp_operator.backends.kubernetes.client.api import KubernetesApi, WatchLimits
from megatronapp_operator.backends.kubernetes.client.decoding import (
    LineBuffer,
    decode_pod_events,
    decode_pod_page,
)
from megatronapp_operator.backends.kubernetes.client.errors import ApiError, ExpiredError, UnavailableError
from megatronapp_operator.backends.kubernetes.client.resources import PODS
from megatronapp_operator.backends.kubernetes.pod_record import PodRecord, read_pod
from megatronapp_operator.backends.kubernetes.store import Key, ObjectStore

log = logging.getLogger(__name__)

PAUSE_S = (0.1, 30.0)
"""Pause in seconds before a watch begins again that the server has ended, doubled with each failure, and its limit."""
QUIET_FAILURES = 3
"""Failures in a row that are not logged: a server was restarted, or a proxy has ended the connection."""
BATCH = 200
"""Most events that are stored before other tasks have a turn."""


class PodWatch:
    """Watch of the pods of jobs, in a namespace or in all (None), which changes the store."""

    def __init__(
        self,
        api: KubernetesApi,
        store: ObjectStore,
        namespace: str | None,
        *,
        on_change: Callable[[Collection[Key]], None],
        limits: WatchLimits | None = None,
    ) -> None:
        """Prepare a watch; `on_change` receives the jobs whose pods a watch has changed."""
        self._api = api
        self._store = store
        self._namespace = namespace
        self._on_change = on_change
        self._limits = limits or WatchLimits()
        self._version: str | None = None
        """Resource version from which the watch continues; None: it must list first."""
        self._failures = 0
        """Failures since the last event."""

    async def list_pods(self) -> set[Key]:
        """List all pods and store them; return the jobs with changes. Raises ApiError.

        Only records are retained: the pods of a large cluster do not fit into memory at once.
        """
        found: list[PodRecord | None] = []
        version = ""
        pages = self._api.pages(PODS, self._namespace, labels=LABEL_JOB_UID, decode=decode_pod_page)
        async for page in pages:
            found += map(read_pod, page.items)
            version = page.resource_version
        changed = self._store.replace_pods(found, int(version), namespace=self._namespace)
        self._version = self._version or version
        return changed

    async def follow(self) -> NoReturn:
        """Watch until cancelled. Errors are logged, and the watch begins again after a pause."""
        while True:
            try:
                if self._version is None:
                    self._on_change(await self.list_pods())
                await self._watch(self._version or "")
            except ExpiredError:
                self._failures += 1
                self._version = None
            except ApiError as error:
                self._failures += 1
                if self._failures > QUIET_FAILURES:  # such as a version of the future, after etcd was restored
                    self._version = None
                    log.warning("the watch of pods does not continue: %s", error)
            except Exception:  # an object of an unexpected shape must not end the whole operator
                self._failures += 1
                self._version = None
                log.exception("the watch of pods failed")
            first, longest = PAUSE_S
            pause_s = min(longest, first * 2.0 ** min(self._failures, 16))
            await asyncio.sleep(pause_s * random.uniform(0.8, 1.2))

    async def _watch(self, version: str) -> None:
        """Watch until the server ends it. Raises ApiError, also if it had no event, not even a bookmark."""
        buffer, empty = LineBuffer(), True
        chunks = self._api.watch(PODS, self._namespace, labels=LABEL_JOB_UID, version=version, limits=self._limits)
        async with contextlib.aclosing(chunks):
            async for chunk in chunks:
                lines = buffer.add(chunk)
                empty = empty and not lines
                for first in range(0, len(lines), BATCH):
                    self._store_events(lines[first : first + BATCH])
                    await asyncio.sleep(0)
        if empty:  # a server or proxy that ends each watch at once must not get ten requests a second
            raise UnavailableError("the server has ended it without an event")

    def _store_events(self, lines: Sequence[bytes]) -> None:
        """Store the events of complete lines. Raises ApiError for an event of type ERROR, and stores nothing then."""
        found, store = decode_pod_events(lines), self._store
        keys = {store.drop_pod(pod) if kind == "DELETED" else store.put_pod(pod) for kind, pod in found.events}
        self._version = found.version or self._version
        self._failures = 0
        self._on_change({key for key in keys if key is not None})
