"""Which PID namespace a process is in: numbers of processes mean nothing in another one (pid_namespaces(7))."""

import os


def pid_namespace() -> int | None:
    """Number of this process's PID namespace; None where the kernel does not say."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return None
