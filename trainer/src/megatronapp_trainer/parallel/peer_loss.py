"""Detection of a lost rank by the launcher's signal, which is received even while a collective hangs.

gloo raises when a peer is lost; NCCL waits, and torch keeps the main thread inside of it, where Python runs no handler.
Python's own C handler still writes the signal's number to a file descriptor (`signal.set_wakeup_fd`), on which a thread
of ours waits.
"""

import os
import signal
import socket
import threading
from collections.abc import Callable
from types import TracebackType

from megatronapp_common.names import ExitCode

PEER_LOST = signal.SIGUSR1
"""Signal of a launcher to its ranks once a rank of the gang is lost; programs that do not watch for it ignore it."""
END_AT_CHECKPOINT = signal.SIGUSR2
"""Signal of a launcher to its ranks: end once the next checkpoint is written, if the order still says so.

Other programs ignore it.
"""
SAVE = signal.SIGURG
"""Signal of a launcher to its ranks: write a checkpoint after this step, and continue; by default it is ignored."""
STDERR = 2
LINGER_S = 1.0
"""Seconds for which the main thread may end by itself, as it does if a collective raises, and answers may be sent."""


class PeerLossListener:
    """Context manager for the main thread: once a rank is lost, act, and end the process if it does not end itself.

    `act` runs in another thread, while the main thread may hang or be ending; it must not wait. The process then has
    `LINGER_S` seconds to leave the context, and exits with the code of a lost peer.
    """

    def __init__(self, act: Callable[[], None]) -> None:
        self._act = act
        self._left = threading.Event()

    def __enter__(self) -> "PeerLossListener":
        """Watch for the signal from now on."""
        self._reading, self._writing = socket.socketpair()
        self._writing.setblocking(False)
        self._previous_fd = signal.set_wakeup_fd(self._writing.fileno(), warn_on_full_buffer=False)
        self._previous = signal.signal(PEER_LOST, lambda _number, _frame: None)
        threading.Thread(target=self._watch, name="loss-watch", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop watching for the signal."""
        self._left.set()
        signal.signal(PEER_LOST, self._previous)
        signal.set_wakeup_fd(self._previous_fd)
        self._writing.close()

    def _watch(self) -> None:
        with self._reading:
            while numbers := self._reading.recv(64):
                if PEER_LOST in numbers:
                    self._end()
                    return

    def _end(self) -> None:
        try:
            self._act()
        finally:
            if not self._left.wait(LINGER_S):
                os.write(STDERR, b"error: a rank of the gang was lost, and this one would wait for it for ever\n")
                os._exit(ExitCode.PEER_LOST)
