"""PID namespace of this process: process ids are invalid in another one (pid_namespaces(7))."""

import os


def pid_namespace() -> int | None:
    """Return the number of this process's PID namespace; None where the kernel does not report it."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return None
