"""Forwarding of a local port to a pod of a Service, through the API server.

Each connection is a separate WebSocket (subprotocol v4.channel.k8s.io), whose messages begin with the number of a
channel. `kubernetes.stream.portforward` uses the same protocol; ADR 0020 says why it is not used.
"""

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import errno
import socket
import sys
import threading
from collections.abc import Callable, Iterator

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus, WebSocketException
from websockets.typing import Subprotocol

from megatronapp_common.names import GATEWAY_PORT
from megatronapp_common.web import loopback
from megatronapp_operator.backends.kubernetes.client.errors import ForbiddenError, UnavailableError, api_error_for
from megatronapp_operator.backends.kubernetes.client.resources import PODS, Object
from megatronapp_operator.cli.cluster.connection import REQUEST_S, Cluster
from megatronapp_operator.cli.cluster.daemon_thread import start_in_daemon_thread
from megatronapp_operator.cli.cluster.official_client import USER_AGENT, parse_status
from megatronapp_operator.errors import OperatorError

PROTOCOL = Subprotocol("v4.channel.k8s.io")
DATA, ERROR = 0, 1
"""Channels of the first port of a connection."""
CHUNK = 1 << 16
"""Most bytes of a message to the pod."""
CLOSE_S = 1.0
"""Seconds for the end of a connection to be confirmed."""
RIGHTS = "request the rights that `gateway.users` of the chart gives: get and create on pods/portforward"
IDLE_S = 60.0
"""Seconds without data from the pod after which a connection is closed whose local side has ended."""
TRIES = 4
"""Attempts to get a local port that is free at both 127.0.0.1 and [::1]."""


@dataclasses.dataclass(frozen=True, slots=True)
class ForwardedPort:
    """Local port that leads to the Service."""

    port: int
    named: bool
    """True if names below `localhost` lead only to this port, and no other process has its number on [::1]."""


@contextlib.contextmanager
def forward_port(cluster: Cluster, service: Object) -> Iterator[ForwardedPort]:
    """Forward a port, on 127.0.0.1 only if no port is free on all addresses of names below `localhost`.

    The port is kept while no pod of the Service can be reached. Raises OperatorError if none can at the beginning.
    """
    forwarder = _Forwarder(cluster, service)
    # A thread with its own event loop, because a caller, such as a cell of a notebook, may run in one already.
    thread = threading.Thread(target=lambda: asyncio.run(forwarder.run()), name="port-forward", daemon=True)
    thread.start()
    try:
        try:
            port = forwarder.opened.result()
        except (OperatorError, OSError) as error:
            problem = f"the port of the gateway cannot be forwarded: {error}"
            forbidden = isinstance(error, ForbiddenError)
            raise OperatorError(problem + ("; " + RIGHTS if forbidden else "")) from error
        yield port
    finally:
        forwarder.stop()
        thread.join()


def _listen() -> tuple[list[socket.socket], bool]:
    """Listen at one port of all addresses; if none is free, at 127.0.0.1 alone and return False."""
    addresses = loopback.addresses()
    for _ in range(TRIES):
        with contextlib.ExitStack() as stack:
            listeners: list[socket.socket] = []
            for address in addresses:
                place = address, listeners[0].getsockname()[1] if listeners else 0
                try:
                    listener = socket.create_server(place, family=loopback.family_of(address))
                except OSError as error:
                    if error.errno != errno.EADDRINUSE:
                        raise
                    break
                listeners.append(stack.enter_context(listener))
            else:
                stack.pop_all()
                return listeners, True
    return [socket.create_server((loopback.V4, 0))], False


class _Forwarder:
    """Forwarder of connections to one pod of a Service, and to another one after its end.

    Logins of browsers are kept by one replica of the gateway, so that all connections lead to the same pod.
    """

    def __init__(self, cluster: Cluster, service: Object) -> None:
        self._cluster = cluster
        self._service = service
        self._pod_port: str | None = None
        """Path of the pod's port on the API server; None: to be found."""
        self._problem = ""
        """Last printed problem with reaching a pod."""
        self._tasks: set[asyncio.Task[None]] = set()
        self.opened: concurrent.futures.Future[ForwardedPort] = concurrent.futures.Future()
        """The port, once it is open, or the error that prevents it."""
        self._started: concurrent.futures.Future[Callable[[], object]] = concurrent.futures.Future()
        """Function that cancels `run` from another thread, set once it runs."""

    async def run(self) -> None:
        """Open the port and forward its connections until `stop` is called."""
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        self._started.set_result(lambda: loop.call_soon_threadsafe(task.cancel))
        try:
            await self.check()
            listeners, named = _listen()
        except BaseException as error:
            self.opened.set_exception(error)
            return
        self.opened.set_result(ForwardedPort(listeners[0].getsockname()[1], named))
        with contextlib.suppress(asyncio.CancelledError):
            await self.serve(listeners)

    def stop(self) -> None:
        """End `run`, from another thread, also while it opens the port."""
        with contextlib.suppress(RuntimeError):  # its loop is closed: it has ended
            self._started.result()()

    async def check(self) -> None:
        """Raise OperatorError if a port cannot be forwarded now."""
        await (await self._connect()).close()

    async def serve(self, listeners: list[socket.socket]) -> None:
        """Forward connections until cancelled."""
        async with contextlib.AsyncExitStack() as stack:
            for listener in listeners:
                server = await asyncio.start_server(self._accept, sock=listener)
                stack.callback(server.close)
            await asyncio.get_running_loop().create_future()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # Python 3.11 prints a traceback for each task of start_server itself that is cancelled at the end.
        task = asyncio.create_task(self._forward(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        problem, received = "", asyncio.Event()
        ends = [writer.get_extra_info(name)[:2] for name in ("peername", "sockname")]
        if loopback.is_another_user(*ends):  # which can read the login in the command line of the user's browser
            print("warning: a connection of another user of this computer was refused", file=sys.stderr)
            writer.close()
            return
        try:
            async with await self._connect() as stream, asyncio.TaskGroup() as group:
                sending = group.create_task(_send(reader, stream, received))
                problem = await _receive(stream, writer, received)
                sending.cancel()
        except* OperatorError as errors:
            problem = str(errors.exceptions[0])
        except* (OSError, WebSocketException):
            pass  # one side has closed the connection
        finally:
            writer.close()
        if problem:
            self._pod_port = None
            if problem != self._problem:
                print(f"warning: the gateway cannot be reached: {problem}", file=sys.stderr)
        self._problem = problem

    async def _connect(self) -> ClientConnection:
        """Open a connection to the pod's port. Raises OperatorError."""
        if self._pod_port is not None:
            with contextlib.suppress(OperatorError):  # the pod may have ended
                return await self._open(self._pod_port)
        self._pod_port = await asyncio.wrap_future(start_in_daemon_thread(self._find_pod_port))
        return await self._open(self._pod_port)

    async def _open(self, path: str) -> ClientConnection:
        client = self._cluster.client
        authorization = await asyncio.wrap_future(start_in_daemon_thread(client.authorization))  # may run a plugin
        try:
            return await connect(
                client.settings.host.replace("http", "ws", 1) + path,
                subprotocols=[PROTOCOL],
                additional_headers={} if authorization is None else {"Authorization": authorization},
                user_agent_header=USER_AGENT,
                compression=None,
                proxy=client.proxy(),
                open_timeout=REQUEST_S,
                ping_timeout=None,
                close_timeout=CLOSE_S,
                max_size=None,
                **client.tls(),
            )
        except InvalidStatus as error:
            status, body = error.response.status_code, bytes(error.response.body or b"")
            raise api_error_for(status, parse_status(body), f"GET {path}") from error
        except (OSError, WebSocketException) as error:
            raise UnavailableError(f"GET {path}: {error or type(error).__name__}") from error

    def _find_pod_port(self) -> str:
        """Return the path of the port of a running pod, preferably of a ready one. Raises OperatorError."""
        metadata, spec = self._service["metadata"], self._service["spec"]
        place = f"Service {metadata['namespace']}/{metadata['name']}"
        if not spec.get("selector"):
            raise OperatorError(f"{place} selects no pods")
        selector = ",".join(f"{key}={value}" for key, value in spec["selector"].items())
        pods = self._cluster.list_objects(PODS, metadata["namespace"], labelSelector=selector)
        running = [pod for pod in pods if pod["status"].get("phase") == "Running" and not _is_deleted(pod)]
        if not running:
            raise OperatorError(f"no pod of {place} is running")
        pod = min(running, key=lambda each: (not _is_ready(each), each["metadata"]["name"]))
        port = page_port(spec)
        path = PODS.path(metadata["namespace"], pod["metadata"]["name"], "portforward")
        return f"{path}?ports={_target_port(pod, port)}"


def page_port(spec: Object) -> Object:
    """Return the port of a Service for pages without TLS, since the API server encrypts what is forwarded.

    It is called http; the Service of an older chart has no other port.
    """
    ports = spec.get("ports") or [{"port": GATEWAY_PORT}]
    found: Object = next((port for port in ports if port.get("name") == "http"), ports[0])
    return found


async def _send(reader: asyncio.StreamReader, stream: ClientConnection, received: asyncio.Event) -> None:
    """Send what the local side writes. After its end the pod can still answer: the protocol cannot report an end."""
    while data := await reader.read(CHUNK):
        await stream.send(bytes([DATA]) + data)
    received.set()
    while received.is_set():
        received.clear()
        await asyncio.sleep(IDLE_S)
    await stream.close()


async def _receive(stream: ClientConnection, writer: asyncio.StreamWriter, received: asyncio.Event) -> str:
    """Write what the pod sends, until the connection ends; return the error that the kubelet reports, or ""."""
    channels = set()
    with contextlib.suppress(ConnectionClosed):
        while True:
            message = await stream.recv(decode=False)
            received.set()
            if message[0] not in channels:
                channels.add(message[0])  # the first message of each channel repeats the port
            elif message[0] == ERROR:
                return message[1:].decode(errors="replace")
            else:
                writer.write(message[1:])
                await writer.drain()
    return ""


def _is_deleted(pod: Object) -> bool:
    return pod["metadata"].get("deletionTimestamp") is not None


def _is_ready(pod: Object) -> bool:
    conditions = pod["status"].get("conditions", ())
    return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)


def _target_port(pod: Object, port: Object) -> int:
    """Return the number of a Service's port at a pod."""
    target = port.get("targetPort") or port["port"]
    if isinstance(target, int):
        return target
    named = (each for container in pod["spec"]["containers"] for each in container.get("ports", ()))
    numbers = [int(each["containerPort"]) for each in named if each.get("name") == target]
    if not numbers:
        raise OperatorError(f"pod {pod['metadata']['name']} has no port {target!r}")
    return numbers[0]
