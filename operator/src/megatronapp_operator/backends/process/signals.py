"""Synchronous waiting for signals."""

import contextlib
import os
import select
import signal
import time
from collections.abc import Iterator

WAKING = frozenset({signal.SIGCHLD})
FORCING = signal.SIGQUIT
"""Signal that stops at once. A second SIGTERM does, too, but two equal pending signals arrive as one."""
READ_BYTES = 512
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, FORCING)


class SignalPipe:
    """Signals that have arrived, in order.

    Handlers write them to a pipe, in any thread that the kernel chooses: libraries start threads when they are
    imported, and a signal that the main thread blocks would end the process by way of one of these.
    """

    def __init__(self, read_end: int) -> None:
        self._read_end = read_end
        self._waiting: list[int] = []
        """Numbers that were read, each of them once."""

    def wait(self, timeout_s: float) -> signal.Signals | None:
        """Return the next signal, or None after `timeout_s` seconds. A stop of this process counts for the time."""
        until_s = time.monotonic() + timeout_s
        while not self._waiting:
            left_s = max(0.0, until_s - time.monotonic())
            if not select.select([self._read_end], [], [], left_s)[0]:
                return None
            arrived = dict.fromkeys(os.read(self._read_end, READ_BYTES))
            self._waiting += [number for number in arrived if number in WAKING or number in STOPPING]
        return signal.Signals(self._waiting.pop(0))


@contextlib.contextmanager
def received() -> Iterator[SignalPipe]:
    """Receive the signals that the backend handles. Main thread only.

    Ignored signals stay ignored: `nohup` relies on that.
    """
    numbers = WAKING | {number for number in STOPPING if signal.getsignal(number) is not signal.SIG_IGN}
    read_end, write_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    wakeup_before = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    before = {number: signal.signal(number, _leave_to_the_pipe) for number in numbers}
    try:
        yield SignalPipe(read_end)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(wakeup_before)
        os.close(read_end)
        os.close(write_end)


def _leave_to_the_pipe(_number: int, _frame: object) -> None:
    """Do nothing: the interpreter has written the number to the pipe."""
