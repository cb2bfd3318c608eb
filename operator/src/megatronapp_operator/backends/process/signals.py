"""Waiting for signals instead of being interrupted by them."""

import contextlib
import signal
from collections.abc import Iterator

WAKING = frozenset({signal.SIGCHLD})
FORCING = signal.SIGQUIT
"""Stops at once. A second SIGTERM does it, too, but two equal signals that are pending arrive as one."""
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, FORCING)
ALARM = signal.SIGALRM
SHORTEST_S = 0.001
"""A timer of 0 would never end."""


@contextlib.contextmanager
def blocked() -> Iterator[frozenset[signal.Signals]]:
    """Hold back the signals that the backend answers; gives the set to wait for. Main thread only.

    To be called before any other thread is started (they inherit the mask): a signal goes to any thread that does not
    hold it back, and would end the process there.
    What was ignored stays ignored: `nohup` means it.
    """
    stopping = {number for number in STOPPING if signal.getsignal(number) is not signal.SIG_IGN}
    numbers = frozenset(WAKING | stopping)
    old = signal.pthread_sigmask(signal.SIG_BLOCK, numbers | {ALARM})
    try:
        yield numbers
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, old)


def wait(numbers: frozenset[signal.Signals], timeout_s: float) -> signal.Signals | None:
    """The next of these signals, or None after `timeout_s` seconds. To be called where they are held back.

    An alarm is the time limit: CPython's own (sigtimedwait) gives a signal number from uninitialised memory if this
    process was stopped and the time had run out when it was continued.
    """
    signal.setitimer(signal.ITIMER_REAL, max(SHORTEST_S, timeout_s))
    found = signal.Signals(signal.sigwaitinfo(numbers | {ALARM}).si_signo)
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.sigtimedwait({ALARM}, 0)  # one that came meanwhile
    return None if found is ALARM else found
