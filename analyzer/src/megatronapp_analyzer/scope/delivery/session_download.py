"""Downloads of recorded sessions: few at a time, and none so slow that others wait for it.

A hub cannot answer with an error once it has begun to answer. It appends an ERROR frame to what it has sent, as far as
the reader takes it, and breaks the connection: `session_file.parse` finds the frame and reports its text.
"""

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import Iterator

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from megatronapp_analyzer.scope.delivery.limits import HUB
from megatronapp_common import frames
from megatronapp_common.web.concurrency_limits import ConcurrencyLimits
from megatronapp_common.web.problems import HttpError

LOG = logging.getLogger(__name__)
MAX_SESSIONS = 4
"""Downloads at a time, of all callers."""
MAX_OF_CALLER = 2
"""Downloads at a time, of one caller."""
LEAST_BYTES_S = 128 << 10
"""A reader that takes fewer bytes in a second is disconnected."""
PATIENCE_S = 20.0
"""Seconds that a reader may take nothing; all time that it loses against the least rate is added up."""
CHUNK_BYTES = 32 << 10
"""A multiple of 8, as frames are."""
GOODBYE_S = 2.0
HINT = "Download it again over a faster connection; `megatronapp scope replay` plays the part that was received."


def download_limits() -> ConcurrencyLimits:
    """Return the limits of downloads; callers have at most MAX_OF_CALLER."""
    return ConcurrencyLimits(HUB, MAX_SESSIONS, refuse=_too_many)


def _too_many(key: str, limit: int) -> HttpError:
    text, hint = f"you download {limit} sessions at the moment", "Ask again once one of them has ended."
    if key == HUB:
        text, hint = f"{limit} sessions are being downloaded at the moment", "Ask again in a moment."
    return HttpError(429, "too-many-sessions", text, hint, retry_s=1)


@dataclasses.dataclass(slots=True)
class ReadRateMonitor:
    """Measures whether a reader keeps up: `left_s` is the time that it may still lose; it grows as bytes are taken."""

    rate: float = LEAST_BYTES_S
    patience_s: float = PATIENCE_S
    left_s: float = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.left_s = self.patience_s

    def took(self, size: int, seconds: float) -> None:
        """Add `size` bytes that the reader took in `seconds`."""
        self.left_s = min(self.patience_s, self.left_s - seconds + size / self.rate)


class SessionResponse(StreamingResponse):
    """Streams frames that are made in a thread, of data that does not change. Frees its slot at the end."""

    def __init__(self, pieces: Iterator[bytes], place: contextlib.ExitStack, headers: dict[str, str]) -> None:
        super().__init__(pieces, headers=headers, media_type="application/octet-stream")
        self._place = place

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._place:
            await super().__call__(scope, receive, send)

    async def stream_response(self, send: Send) -> None:
        """Send all, or what a slow reader takes until it is disconnected; the slot is free at once then."""
        pace = ReadRateMonitor(patience_s=PATIENCE_S)
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async for piece in self.body_iterator:
                assert isinstance(piece, bytes)
                await _send(piece, pace, send)
        except _TooSlowError:
            LOG.warning("a download of a session is ended: its reader takes less than %d bytes/s", LEAST_BYTES_S)
            self._place.close()
            await _send_too_slow(send)
            return
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class _TooSlowError(Exception):
    """The reader is slower than the least rate."""


async def _send(piece: bytes, pace: ReadRateMonitor, send: Send) -> None:
    """Send one frame. Only the time of sending is the reader's: making a frame may take long."""
    loop = asyncio.get_running_loop()
    for begin in range(0, len(piece), CHUNK_BYTES):
        chunk, began_s = piece[begin : begin + CHUNK_BYTES], loop.time()
        try:
            async with asyncio.timeout(pace.left_s):
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        except TimeoutError as error:
            raise _TooSlowError from error
        pace.took(len(chunk), loop.time() - began_s)


async def _send_too_slow(send: Send) -> None:
    text = f"the download was ended: its reader took less than {LEAST_BYTES_S >> 10} KiB in a second"
    said = frames.encode_error("too-slow", text, HINT)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(GOODBYE_S):
            await send({"type": "http.response.body", "body": said, "more_body": True})
