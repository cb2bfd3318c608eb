"""One connection between two launchers: greeting, then sealed lines."""

import asyncio
import contextlib
from typing import Any, Self

from megatronapp_trainer.errors import MessageError, RefusedError
from megatronapp_trainer.launch.config import address
from megatronapp_trainer.launch.rendezvous import messages

GREETING_S = 10.0
CLOSE_S = 1.0


class SecureChannel:
    """A greeted connection; network errors are raised as OSError or EOFError (the other side has closed)."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, session: messages.ChannelCipher | None = None
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._session = session

    @classmethod
    async def greet(
        cls, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, token: str, side: messages.Side
    ) -> Self:
        """Exchange greetings.

        Raises MessageError if the other side is not a launcher, TimeoutError if it is silent.
        """
        address.keep_alive(writer.get_extra_info("socket"))
        nonce = messages.new_nonce()
        writer.write(messages.greeting(nonce))
        async with asyncio.timeout(GREETING_S):
            other = messages.parse_greeting(await _greeting_line(reader))
        coordinator, worker = (nonce, other) if side == "coordinator" else (other, nonce)
        session = messages.ChannelCipher(token, side=side, coordinator_nonce=coordinator, worker_nonce=worker)
        return cls(reader, writer, session)

    @property
    def greeted(self) -> bool:
        """Return True if lines can be sealed."""
        return self._session is not None

    async def receive(self) -> dict[str, Any]:
        """Receive the next message.

        Raises EOFError at the end, MessageError or RefusedError instead of a message.
        """
        assert self._session is not None
        return self._session.open(await _line(self._reader))

    def send(self, document: dict[str, Any]) -> None:
        """Queue a message; if the connection has ended, the message is dropped, and `receive` raises the error."""
        assert self._session is not None
        self._writer.write(self._session.seal(document))

    def refuse(self, error: RefusedError) -> None:
        """Queue a refusal, sealed if the other side has proved that it knows the token."""
        document = messages.refusal_to_json(error)
        if self._session is not None and self._session.trusted:
            self.send(document)
        else:
            self._writer.write(messages.encode(document))

    async def close(self) -> None:
        """Send what is queued, if the other side takes it within a second, and close."""
        try:
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(CLOSE_S):
                    await self._writer.drain()
        finally:  # also if we are cancelled
            self._writer.close()
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await self._writer.wait_closed()


async def _greeting_line(reader: asyncio.StreamReader) -> bytes:
    line = bytearray()
    while not line.endswith(b"\n"):
        if len(line) == messages.MAX_GREETING_BYTES:
            raise MessageError(f"a greeting of more than {messages.MAX_GREETING_BYTES} bytes")
        byte = await reader.read(1)
        if not byte:
            raise EOFError("the other side has closed the connection")
        line += byte
    return bytes(line)


async def _line(reader: asyncio.StreamReader) -> bytes:
    try:
        line = await reader.readline()
    except ValueError as error:
        raise MessageError(f"a line of more than {messages.MAX_LINE_BYTES} bytes") from error
    if not line.endswith(b"\n"):
        raise EOFError("the other side has closed the connection")
    return line
