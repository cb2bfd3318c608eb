"""TLS with a certificate that is read again once its files change."""

import asyncio
import contextlib
import dataclasses
import logging
import pathlib
import ssl
from collections.abc import AsyncIterator

from megatronapp_operator.errors import BackendError

log = logging.getLogger(__name__)

CHECK_S = 5.0
"""Seconds between two reads of the files. The kubelet takes up to a minute to write a renewed Secret."""


@dataclasses.dataclass(slots=True)
class Certificate:
    """Certificate chain and key in PEM files, as in a Secret of type kubernetes.io/tls."""

    chain: pathlib.Path
    key: pathlib.Path
    context: ssl.SSLContext = dataclasses.field(init=False)
    """Context of the server: connections that begin after a renewal get the new certificate."""
    _read: tuple[bytes, bytes] = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        """Read the files. Raises BackendError if one is missing or wrong."""
        self.context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            self._read = self._load()
        except (OSError, ValueError) as error:
            raise BackendError(
                f"--tls-cert {self.chain} and --tls-key {self.key}: {error}; "
                "name a certificate chain and its key, in PEM"
            ) from error

    def renew(self) -> bool:
        """Read the files again if they have changed; return True if they have. Raises OSError, ValueError."""
        if self._contents() == self._read:
            return False
        self._read = self._load()
        return True

    async def follow(self) -> None:
        """Renew the certificate at intervals, until cancelled. One that cannot be read leaves the last in use."""
        while True:
            await asyncio.sleep(CHECK_S)
            try:
                if self.renew():
                    log.info("serving the renewed certificate in %s", self.chain)
            except (OSError, ValueError) as error:
                log.error("the certificate in %s is not renewed: %s", self.chain, error)

    @contextlib.asynccontextmanager
    async def followed(self) -> AsyncIterator[None]:
        """Follow the files until the block ends."""
        task = asyncio.create_task(self.follow())
        try:
            yield
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    def _contents(self) -> tuple[bytes, bytes]:
        return self.chain.read_bytes(), self.key.read_bytes()

    def _load(self) -> tuple[bytes, bytes]:
        """Load the files, first into another context: a key that does not fit would spoil the one in use."""
        contents = self._contents()
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(self.chain, self.key)
        self.context.load_cert_chain(self.chain, self.key)
        return contents
