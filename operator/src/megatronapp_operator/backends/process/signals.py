"""Synchronous waiting for signals, in place of handlers."""

import contextlib
import signal
from collections.abc import Iterator

WAKING = frozenset({signal.SIGCHLD})
FORCING = signal.SIGQUIT
"""Signal that stops at once. A second SIGTERM does, too, but two equal pending signals arrive as one."""
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, FORCING)
ALARM = signal.SIGALRM
SHORTEST_S = 0.001
"""Seconds of the shortest timer: one of 0 would never expire."""


@contextlib.contextmanager
def blocked() -> Iterator[frozenset[signal.Signals]]:
    """Block the signals that the backend handles; yield the set to wait for. Main thread only.

    Must be called before any other thread is started (they inherit the mask): the kernel delivers a signal to any
    thread that does not block it, which would end the process. Ignored signals stay ignored: `nohup` relies on that.
    """
    stopping = {number for number in STOPPING if signal.getsignal(number) is not signal.SIG_IGN}
    numbers = frozenset(WAKING | stopping)
    old = signal.pthread_sigmask(signal.SIG_BLOCK, numbers | {ALARM})
    try:
        yield numbers
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, old)


def wait(numbers: frozenset[signal.Signals], timeout_s: float) -> signal.Signals | None:
    """Return the next of these signals, or None after `timeout_s` seconds. The signals must be blocked.

    An alarm is the time limit: CPython's sigtimedwait returns a signal number from uninitialised memory if this process
    was stopped and the time had run out when it was continued.
    """
    signal.setitimer(signal.ITIMER_REAL, max(SHORTEST_S, timeout_s))
    found = signal.Signals(signal.sigwaitinfo(numbers | {ALARM}).si_signo)
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.sigtimedwait({ALARM}, 0)  # discard an alarm of the meantime
    return None if found is ALARM else found
