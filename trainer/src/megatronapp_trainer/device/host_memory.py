"""How much of the host's memory a rank may still take: what the machine has, what its container may, shared by ranks.

Inside a container the machine's free memory says little: the kernel kills what goes over the limit of the control
group, and each group above has a limit of its own.
"""

import os
import pathlib

import psutil

_OWN_GROUP = pathlib.Path("/proc/self/cgroup")
_GROUPS = pathlib.Path("/sys/fs/cgroup")


def free_host_bytes() -> int:
    """An equal share for each rank of this machine or pod (LOCAL_WORLD_SIZE) of what is free there."""
    free = min(psutil.virtual_memory().available, *group_bytes(_OWN_GROUP, _GROUPS))
    return int(free) // max(1, int(os.environ.get("LOCAL_WORLD_SIZE") or 1))


def group_bytes(own: pathlib.Path, groups: pathlib.Path) -> list[int]:
    """What each control group (version 2, else 1) around a process may still take; none where none has a limit.

    `own`: /proc/PID/cgroup; `groups`: where the file system of control groups lies. Page cache that nobody uses does
    not count as taken: the kernel gives it back before it kills.
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
    """Limit minus use, of a group and those above; a container may see its own group as the root."""
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
    """What a file says; None for `max`, and where there is no such file."""
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
