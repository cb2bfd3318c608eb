"""kopf's watches of jobs and profiles, in a separate thread and event loop: they forward events, and decide nothing.

Only `on.event` is used: it writes nothing to objects and adds no finalizers. kopf must not share our loop, because it
ends all tasks of its loop when it ends.
"""

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, NoReturn

import kopf

from megatronapp_common.job.api.profile import ProfileKind
from megatronapp_common.job.crd import PLURAL
from megatronapp_common.job.profiles.definition import PLURALS
from megatronapp_common.names import GROUP, VERSION
from megatronapp_operator.backends.kubernetes.client.resources import Object
from megatronapp_operator.controller.storages import NullDiffBaseStorage, NullProgressStorage

log = logging.getLogger(__name__)

WatchCallback = Callable[[str, str | None, Object], None]
"""Receives resource, type of event (None: the object existed when the watch began), and object."""
STOP_S = 10.0
"""Seconds for the watches to end."""
SERVER_TIMEOUT_S = 290
"""Seconds after which the server ends a watch, which is then renewed."""
CONNECT_TIMEOUT_S = 10
PAGE = 500
"""Objects of one page of a list."""
LOOP_CHECK_S = 1.0
"""Seconds between signs of life of the watches' loop."""


class Watches:
    """Watches of jobs and of profiles; `pod_watch` follows pods. `on_event` is called in the thread of `loop`."""

    def __init__(self, kubeconfig: str | None, namespaces: Sequence[str], on_event: WatchCallback) -> None:
        """Prepare watches; `kubeconfig` as for `api.connect`, no namespaces: all."""
        self._kubeconfig = kubeconfig
        self._namespaces = namespaces
        self._on_event = on_event
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watches", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._profiles: Collection[ProfileKind] = ()
        self.turned_at = time.monotonic()
        """When the loop of the watches last turned, on the monotonic clock."""
        self.error: BaseException | None = None
        """Error that ended the watches."""

    @property
    def alive(self) -> bool:
        """True while the watches run."""
        return self._thread.is_alive()

    def start(self, loop: asyncio.AbstractEventLoop, *, profiles: Collection[ProfileKind]) -> None:
        """Start the thread; events are delivered to `loop`. `profiles`: kinds to watch, which can be listed."""
        self._loop = loop
        self._profiles = profiles
        self.turned_at = time.monotonic()
        self._thread.start()

    def stop(self) -> None:
        """End the watches, within ten seconds."""
        self._stop.set()
        if self._loop is not None:  # if None, they were never started
            self._thread.join(STOP_S)

    def _run(self) -> None:
        try:
            asyncio.run(self._operate())
        except BaseException as error:
            self.error = error
            log.exception("the watches have ended")

    async def _operate(self) -> None:
        heartbeat = asyncio.create_task(self._mark_alive())
        try:
            await kopf.operator(
                registry=self._registry(),
                settings=self._settings(),
                standalone=True,
                clusterwide=not self._namespaces,
                namespaces=list(self._namespaces),
                stop_flag=self._stop,
            )
        finally:
            heartbeat.cancel()

    async def _mark_alive(self) -> NoReturn:
        while True:
            self.turned_at = time.monotonic()
            await asyncio.sleep(LOOP_CHECK_S)

    def _registry(self) -> kopf.OperatorRegistry:
        registry = kopf.OperatorRegistry()

        def handler(resource: str) -> Callable[..., None]:
            async def handle(event: kopf.RawEvent, **_: Any) -> None:  # noqa: ANN401 - kopf's arguments
                assert self._loop is not None
                self._loop.call_soon_threadsafe(self._on_event, resource, event["type"], dict(event["object"]))

            return handle  # type: ignore[return-value]

        kopf.on.event(GROUP, VERSION, PLURAL, id="jobs", registry=registry)(handler(PLURAL))
        for plural in (PLURALS[kind] for kind in self._profiles):
            kopf.on.event(GROUP, VERSION, plural, id=plural, registry=registry)(handler(plural))
        kopf.on.login(id="login", registry=registry)(self._login)
        return registry

    def _login(self, *, settings: kopf.OperatorSettings, **_: Any) -> kopf.ConnectionInfo | None:  # noqa: ANN401 - kopf's arguments
        """Return the credentials.

        kopf calls this again after a token has expired, and a service account's is then read again.
        """
        if self._kubeconfig is not None:
            os.environ["KUBECONFIG"] = self._kubeconfig
            return kopf.login_with_kubeconfig(settings=settings)
        return kopf.login_with_service_account(settings=settings) or kopf.login_with_kubeconfig(settings=settings)

    def _settings(self) -> kopf.OperatorSettings:
        settings = kopf.OperatorSettings()
        settings.watching.server_timeout = SERVER_TIMEOUT_S
        settings.watching.connect_timeout = CONNECT_TIMEOUT_S
        settings.watching.chunk_size = PAGE
        settings.persistence.diffbase_storage = NullDiffBaseStorage()
        settings.persistence.progress_storage = NullProgressStorage()
        settings.posting.enabled = False
        settings.scanning.disabled = True
        return settings
