"""Ties a process to the life of its parent (Linux), reuses its memory (glibc), and says how many threads it may use."""

import argparse
import ctypes
import os
import pathlib
import signal

from megatronapp_analyzer.errors import SettingsError

PR_SET_PDEATHSIG = 1
PR_GET_PDEATHSIG = 2
M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -4, -8
"""Numbers of options of glibc's mallopt(3)."""


MOST_THREADS = 4
"""Threads beyond which a judgement of 16,384 ranks gains little: the rest of it is in one."""
THREAD_LIMIT = 1024
"""Threads that an argument may ask for: more than there is work for in the largest step."""
CPU_LIMIT = pathlib.Path("/sys/fs/cgroup/cpu.max")
"""Processor time that the container of this process may use (cgroup v2): microseconds in a period, or `max`."""


def available_threads(limit: pathlib.Path = CPU_LIMIT) -> int:
    """Return the number of processors that this process may use, at most MOST_THREADS and at least 1.

    Those of its affinity, and no more than the limit of its container allows without pauses.
    """
    count = min(len(os.sched_getaffinity(0)), MOST_THREADS)
    try:
        quota, period = limit.read_text(encoding="ascii").split()
    except FileNotFoundError:  # no container, or cgroup v1
        return count
    return count if quota == "max" else min(count, max(int(quota) // int(period), 1))


def thread_count(text: str) -> int:
    """Return the number of threads in an argument. Raises ArgumentTypeError if it is none."""
    if not text.isdecimal() or not 1 <= int(text) <= THREAD_LIMIT:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of threads; write 1 to {THREAD_LIMIT}")
    return int(text)


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
    of the processor time of a judgement. All threads use the same memory, as that of their own would be returned. The
    process does not shrink any more. Call it before other threads begin.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    options = ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, -1), (M_ARENA_MAX, 1))
    return mallopt is not None and all(mallopt(option, value) == 1 for option, value in options)
