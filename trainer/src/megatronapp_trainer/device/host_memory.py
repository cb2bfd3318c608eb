"""Host memory that a rank may still allocate: what the node has free, what its container may use, divided by ranks.

Inside a container the node's free memory says little: the kernel kills what exceeds the limit of the control group, and
each parent group has a separate limit.
"""

import os
import pathlib

import psutil

_OWN_GROUP = pathlib.Path("/proc/self/cgroup")
_GROUPS = pathlib.Path("/sys/fs/cgroup")


def free_host_bytes() -> int:
    """Return an equal part of the free memory for each rank of this node or pod (LOCAL_WORLD_SIZE), in bytes."""
    free = min(psutil.virtual_memory().available, *group_bytes(_OWN_GROUP, _GROUPS))
    return int(free) // max(1, int(os.environ.get("LOCAL_WORLD_SIZE") or 1))


def group_bytes(own: pathlib.Path, groups: pathlib.Path) -> list[int]:
    """Return the bytes that each control group (version 2, or 1) around a process may still use; empty without a limit.

    `own`: /proc/PID/cgroup; `groups`: root of the file system of control groups. Unused page cache is counted as free:
    the kernel reclaims it before it kills.
    """
    try:
        lines = [line.split(":", 2) for line in own.read_text(encoding="utf-8").splitlines()]
    except OSError:
        return []
    found: list[int] = []
    for _, controllers, path in (line for line in lines if len(line) == 3):
        if controllers == "":
            found += _left(groups, path, ("memory.max", "memory.current", "inactive_file"))
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            found += _left(groups / "memory", path, names)
    return found


def _left(root: pathlib.Path, path: str, names: tuple[str, str, str]) -> list[int]:
    """Return limit minus use, of a group and its parents; a container may see its own group as the root."""
    limit_name, usage_name, cache_name = names
    below = root / path.lstrip("/")
    found = []
    for folder in (below, *below.parents):
        if not folder.is_relative_to(root):
            break
        limit, usage = _number(folder / limit_name), _number(folder / usage_name)
        if limit is not None and usage is not None:
            found.append(max(0, limit - usage + _cached(folder / "memory.stat", cache_name)))
    return found


def _number(path: pathlib.Path) -> int | None:
    """Read the number in a file; None for `max`, and if the file does not exist."""
    try:
        return int(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _cached(path: pathlib.Path, name: str) -> int:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.split()[:1] == [name]), 0)
