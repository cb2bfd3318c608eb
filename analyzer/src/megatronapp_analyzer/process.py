"""Ties a process to the life of its parent (Linux), and reuses its memory (glibc)."""

import ctypes
import os
import signal

from megatronapp_analyzer.errors import SettingsError

PR_SET_PDEATHSIG = 1
PR_GET_PDEATHSIG = 2
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
"""Numbers of options of glibc's mallopt(3)."""


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


def reuse_freed_memory() -> bool:
    """Have this process use freed memory again instead of returning it to the system; false without glibc.

    Arrays of a large step are mapped and unmapped otherwise, each time as pages that the kernel fills with zeros: half
    of the processor time of a judgement. The process does not shrink any more.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and mallopt(M_MMAP_MAX, 0) == 1 and mallopt(M_TRIM_THRESHOLD, -1) == 1
