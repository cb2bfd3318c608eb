"""kopf's watches of jobs and profiles, in a separate thread and event loop: they forward events, and decide nothing.

Only `on.event` is used: it writes nothing to objects and adds no finalizers. kopf must not share our loop, because it
ends all tasks of its loop when it ends.
"""

import asyncio
import functools
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
from megatronapp_operator.backends.kubernetes.client.connections import SocketTracker
from megatronapp_operator.backends.kubernetes.client.resources import Object
from megatronapp_operator.controller.bounded_session import open_session
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
        self._credentials: kopf.ConnectionInfo | None = None
        """Credentials of the session that kopf uses, or that it has given up."""
        self._session: kopf.AiohttpSession | None = None
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
        heartbeat, sockets = asyncio.create_task(self._mark_alive()), SocketTracker()
        try:
            await kopf.operator(
                registry=self._registry(sockets),
                settings=self._settings(),
                standalone=True,
                clusterwide=not self._namespaces,
                namespaces=list(self._namespaces),
                stop_flag=self._stop,
            )
        finally:
            self._stop.set()  # a thread of kopf waits for it, and the loop for that thread
            heartbeat.cancel()
            if self._session is not None:
                await self._session.aiohttp_session.close()
            await sockets.close()

    async def _mark_alive(self) -> NoReturn:
        while True:
            self.turned_at = time.monotonic()
            await asyncio.sleep(LOOP_CHECK_S)

    def _registry(self, sockets: SocketTracker) -> kopf.OperatorRegistry:
        registry = kopf.OperatorRegistry()

        def handler(resource: str) -> Callable[..., None]:
            async def handle(event: kopf.RawEvent, **_: Any) -> None:  # noqa: ANN401 - kopf's arguments
                assert self._loop is not None
                self._loop.call_soon_threadsafe(self._on_event, resource, event["type"], dict(event["object"]))

            return handle  # type: ignore[return-value]

        kopf.on.event(GROUP, VERSION, PLURAL, id="jobs", registry=registry)(handler(PLURAL))
        for plural in (PLURALS[kind] for kind in self._profiles):
            kopf.on.event(GROUP, VERSION, plural, id=plural, registry=registry)(handler(plural))
        kopf.on.login(id="login", registry=registry)(functools.partial(self._login, sockets))
        return registry

    async def _login(
        self,
        sockets: SocketTracker,
        *,
        settings: kopf.OperatorSettings,
        **_: Any,  # noqa: ANN401 - kopf's arguments
    ) -> kopf.AiohttpSession | None:
        """Return a session with the credentials; None if there are none but those that were refused.

        kopf calls this again after a token has expired, and a service account's is then read again. It takes each
        session for new credentials, and would try the same token again and again.
        """
        found = self._find_credentials(settings)
        if found is None or found == self._credentials:
            return None
        self._credentials, self._session = found, open_session(found, sockets)
        return self._session

    def _find_credentials(self, settings: kopf.OperatorSettings) -> kopf.ConnectionInfo | None:
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
