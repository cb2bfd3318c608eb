"""TLS with a certificate that is read again once its files change, and with a limit of connections."""

import asyncio
import contextlib
import dataclasses
import logging
import pathlib
import socket
import ssl
from collections.abc import AsyncIterator
from typing import Never

import uvicorn

from megatronapp_common.web.bounded_http import BoundedHttpProtocol
from megatronapp_operator.errors import BackendError
from megatronapp_operator.gateway.background import running

log = logging.getLogger(__name__)

CHECK_S = 5.0
"""Seconds between two reads of the files. The kubelet takes up to a minute to write a renewed Secret."""
HANDSHAKE_S = 10.0
"""Seconds until a handshake must be complete, and until a peer must confirm the end of a connection."""
NO_CHECK_TIME = 0x200000
"""Flag X509_V_FLAG_NO_CHECK_TIME of OpenSSL, for which the module ssl has no name."""
ACCEPT_PAUSE_S = 1.0
"""Seconds until connections are accepted again after an error, such as too many open files."""


@dataclasses.dataclass(slots=True)
class Certificate:
    """Certificate chain and key in PEM files, as in a Secret of type kubernetes.io/tls."""

    chain: pathlib.Path
    key: pathlib.Path
    context: ssl.SSLContext = dataclasses.field(init=False)
    """Context of connections that begin now. Each renewal makes another: in the same context a certificate with
    another kind of key would be added, and OpenSSL would still serve the old one to clients that prefer its kind.
    """
    validity: tuple[float, float] | None = dataclasses.field(init=False)
    """When it begins and ends to be valid, in seconds since the epoch; None: that could not be read."""
    _read: tuple[bytes, bytes] = dataclasses.field(init=False)
    _problem: str = dataclasses.field(default="", init=False)

    def __post_init__(self) -> None:
        """Read the files. Raises BackendError if one is missing or wrong."""
        try:
            self._load()
        except (OSError, ValueError) as error:
            raise BackendError(
                f"--tls-cert {self.chain} and --tls-key {self.key}: {error}; "
                "name a certificate chain and its key, in PEM"
            ) from error

    def renew(self) -> bool:
        """Read the files again if they have changed; return True if they have. Raises OSError, ValueError."""
        if self._contents() == self._read:
            return False
        self._load()
        return True

    async def follow(self) -> None:
        """Renew the certificate at intervals, until cancelled. One that cannot be read leaves the last in use."""
        while True:
            await asyncio.sleep(CHECK_S)
            try:
                if self.renew():
                    log.info("serving the renewed certificate in %s", self.chain)
                self._problem = ""
            except (OSError, ValueError) as error:
                if str(error) != self._problem:  # once, and not at every read
                    log.error("the certificate in %s is not renewed: %s", self.chain, error)
                self._problem = str(error)

    @contextlib.asynccontextmanager
    async def followed(self) -> AsyncIterator[None]:
        """Follow the files until the block ends."""
        async with running(asyncio.create_task(self.follow())):
            yield

    def _contents(self) -> tuple[bytes, bytes]:
        return self.chain.read_bytes(), self.key.read_bytes()

    def _load(self) -> None:
        contents = self._contents()
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.load_cert_chain(self.chain, self.key, password=_refuse_encryption)
        self.context, self._read = context, contents
        self.validity = self._read_validity()

    def _read_validity(self) -> tuple[float, float] | None:
        try:
            return validity_of(self.context, self.chain)
        except (OSError, ValueError) as error:
            log.warning("when the certificate in %s ends is not known: %s", self.chain, error)
            return None


def validity_of(context: ssl.SSLContext, chain: pathlib.Path) -> tuple[float, float]:
    """Return when the certificate of a server's context begins and ends to be valid, in seconds since the epoch.

    The module ssl gives the fields of a certificate only to a peer that trusts it. So a client that trusts the file
    `chain`, and no clock, shakes hands with the context in memory. Raises OSError, ValueError.
    """
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.load_verify_locations(chain)
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN | NO_CHECK_TIME
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    asking = client.wrap_bio(to_client, to_server)
    answering = context.wrap_bio(to_server, to_client, server_side=True)
    for end in (asking, answering, asking):
        with contextlib.suppress(ssl.SSLWantReadError):
            end.do_handshake()
    fields = asking.getpeercert()
    if not fields:
        raise ValueError("its fields cannot be read")
    begin, end_of = str(fields["notBefore"]), str(fields["notAfter"])
    return float(ssl.cert_time_to_seconds(begin)), float(ssl.cert_time_to_seconds(end_of))


@contextlib.asynccontextmanager
async def serving(
    server: uvicorn.Server,
    listener: socket.socket,
    certificate: Certificate,
    *,
    limit: int,
    handshake_s: float = HANDSHAKE_S,
) -> AsyncIterator[None]:
    """Serve at a listening socket over TLS, which is closed at the end; more connections than `limit` are closed.

    uvicorn would serve one certificate only, and asyncio would take any number of connections and wait a minute for
    the handshake of each, with 0.3 MiB of memory.
    """
    with listener:
        answering = asyncio.create_task(server.serve(sockets=[]))
        try:
            async with running(asyncio.create_task(_accept(server, listener, certificate, limit, handshake_s))):
                yield
        finally:
            server.should_exit = True
            await answering


async def _accept(
    server: uvicorn.Server, listener: socket.socket, certificate: Certificate, limit: int, handshake_s: float
) -> Never:
    """Accept connections until cancelled, each with the certificate of that moment."""
    loop, beginning = asyncio.get_running_loop(), set[asyncio.Task[None]]()
    listener.setblocking(False)
    try:
        while True:
            await asyncio.sleep(0)  # a connection that waits already is accepted without a turn for others
            try:
                connection, _ = await loop.sock_accept(listener)
            except ConnectionAbortedError:
                continue
            except OSError as error:
                log.error("no connection is accepted over TLS: %s", error)
                await asyncio.sleep(ACCEPT_PAUSE_S)
                continue
            if len(beginning) + len(server.server_state.connections) >= limit:
                connection.close()
                continue
            task = asyncio.create_task(_begin(server, connection, certificate.context, handshake_s))
            beginning.add(task)
            task.add_done_callback(beginning.discard)
    finally:
        for task in beginning:
            task.cancel()


async def _begin(
    server: uvicorn.Server, connection: socket.socket, context: ssl.SSLContext, handshake_s: float
) -> None:
    """Return after the handshake; the protocol answers from then on. A peer without a handshake is let go."""
    with contextlib.suppress(OSError):
        await asyncio.get_running_loop().connect_accepted_socket(
            lambda: BoundedHttpProtocol(config=server.config, server_state=server.server_state, app_state={}),
            connection,
            ssl=context,
            ssl_handshake_timeout=handshake_s,
            ssl_shutdown_timeout=handshake_s,
        )


def _refuse_encryption() -> str:
    """Refuse an encrypted key, for whose password OpenSSL would ask at the terminal."""
    raise ValueError("the key is encrypted; write it without a password")
