"""Programs that outlive their starter, and are identified by a file with their number."""

import contextlib
import os
import pathlib
import signal
import subprocess
import time

from cluster.layout import ClusterError

STOP_S = 10.0
POLL_S = 0.05
_STARTED: list["subprocess.Popen[bytes]"] = []
"""Programs started by this process. They may outlive it, of which Python would warn when it forgets them."""


def start(folder: pathlib.Path, name: str, command: list[str], environment: dict[str, str] | None = None) -> None:
    """Start a program that writes its output to NAME.log, and write its number to NAME.pid in the folder."""
    with (folder / f"{name}.log").open("ab") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=folder,
            start_new_session=True,
            env={**os.environ, **(environment or {})},
        )
    _STARTED.append(process)
    (folder / f"{name}.pid").write_text(f"{process.pid} {_birth(process.pid)}\n", encoding="utf-8")


def alive(folder: pathlib.Path, name: str) -> bool:
    """Return whether the program that was started under this name still runs."""
    return _number(folder, name) is not None


def send(folder: pathlib.Path, name: str, number: signal.Signals) -> None:
    """Send a signal. Raises ClusterError if the program does not run."""
    pid = _number(folder, name)
    if pid is None:
        raise ClusterError(f"{name} does not run: {tail(folder, name)}")
    os.kill(pid, number)


def stop(folder: pathlib.Path, name: str) -> None:
    """End a program, if it runs."""
    pid = _number(folder, name)
    deadline = time.monotonic() + STOP_S
    number = signal.SIGTERM
    while pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
            os.kill(pid, number)
        time.sleep(POLL_S)
        number = signal.SIGKILL if time.monotonic() > deadline else signal.SIGTERM
        pid = _number(folder, name)
    for process in _STARTED:
        process.poll()  # reaps ours; others belong to the process that started them
    (folder / f"{name}.pid").unlink(missing_ok=True)


def tail(folder: pathlib.Path, name: str) -> str:
    """The newest lines of its output."""
    path = folder / f"{name}.log"
    return path.read_text(encoding="utf-8", errors="replace")[-2000:] if path.exists() else ""


def _number(folder: pathlib.Path, name: str) -> int | None:
    try:
        pid, born = (folder / f"{name}.pid").read_text(encoding="utf-8").split()
    except FileNotFoundError:
        return None
    return int(pid) if _birth(int(pid)) == born else None


def _birth(pid: int) -> str:
    """Return when a process began: another one may have its number by now. Empty if it has ended."""
    try:
        stat = pathlib.Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except (FileNotFoundError, ProcessLookupError):
        return ""
    state, *fields = stat.rpartition(")")[2].split()
    return "" if state == "Z" else fields[18]
