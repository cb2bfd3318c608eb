"""Ties a process to the life of its parent (Linux)."""

import ctypes
import os
import signal

from megatronapp_analyzer.errors import SettingsError

PR_SET_PDEATHSIG = 1
PR_GET_PDEATHSIG = 2


def die_with_parent(parent: int) -> None:
    """Have the kernel send SIGTERM when the parent ends (prctl(2)). `parent` is its id as read when this process began.

    A parent that ended in between is noticed by the changed parent id, and the signal is sent here. A signal that the
    starting process has set already (the backend's SIGKILL, which no handler delays) remains. Raises SettingsError if
    the kernel refuses.
    """
    sent = signal.SIGTERM
    libc, present = ctypes.CDLL(None, use_errno=True), ctypes.c_int(0)
    libc.prctl(PR_GET_PDEATHSIG, ctypes.byref(present), 0, 0, 0)
    if present.value:
        sent = signal.Signals(present.value)
    elif libc.prctl(PR_SET_PDEATHSIG, int(sent), 0, 0, 0):
        raise SettingsError(f"prctl(PR_SET_PDEATHSIG): {os.strerror(ctypes.get_errno())}")
    if os.getppid() != parent:
        os.kill(os.getpid(), sent)
