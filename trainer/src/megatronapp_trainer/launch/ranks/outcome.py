"""Termination record of a launcher: how its worker ended and why, in at most 2 KiB."""

import dataclasses
import datetime
import json
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

from megatronapp_common.names import ExitCode
from megatronapp_trainer.launch.ranks.failure_cause import Event, RankEnd, preempted, stopped_before_boundary
from megatronapp_trainer.launch.rendezvous.messages import EndNotice

MAX_BYTES = 2048
NOTICE_LOG = 1200
"""Characters of the end of a log in a notice to the other workers."""
OF_SIGNALS = range(129, 193)
"""Exit codes with which shells report that a program died by a signal; a pod that ends so would look killed itself."""
TAIL_BYTES = 4096
TAIL_LINES = 12


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LauncherOutcome:
    """End of a worker. `code` is the launcher's exit code: of `ExitCode`, or the one with which a rank ended."""

    code: int
    reason: str
    message: str = ""
    rank: int | None = None
    local_rank: int | None = None
    signal: int | None = None
    early: bool = False
    """True if the worker was asked to stop before its ranks reached a step boundary."""


STOPPED = LauncherOutcome(
    code=ExitCode.PREEMPTED, reason="Preempted", message="stopped before its ranks began", early=True
)


def complete(ends: Sequence[RankEnd]) -> LauncherOutcome:
    """Return the outcome of a worker whose ranks have all ended in order."""
    if preempted(ends):
        early = stopped_before_boundary(ends)
        message = "stopped by SIGTERM before a rank could answer it" if early else "checkpointed and stopped, as asked"
        return LauncherOutcome(code=ExitCode.PREEMPTED, reason="Preempted", message=message, early=early)
    return LauncherOutcome(code=ExitCode.OK, reason="Completed")


def failed(reason: Event, last_lines: Callable[[int], str]) -> LauncherOutcome:
    """Return the outcome of a failure, here or elsewhere. `last_lines` gives the end of a local rank's log."""
    if isinstance(reason, EndNotice):
        return LauncherOutcome(code=ExitCode.PEER_LOST, reason="PeerLost", message=_of_peer(reason))
    if reason.code == ExitCode.PEER_LOST:
        message = f"rank {reason.rank} lost a peer that no launcher has identified:\n{last_lines(reason.rank)}"
        return LauncherOutcome(
            code=ExitCode.PEER_LOST, reason="PeerLost", message=message, rank=reason.rank, local_rank=reason.local_rank
        )
    has_own = reason.signal is None and reason.code > 0 and reason.code not in OF_SIGNALS
    return LauncherOutcome(
        code=reason.code if has_own else ExitCode.OWN_FAILURE,
        reason=_reason(reason),
        message=last_lines(reason.rank),
        rank=reason.rank,
        local_rank=reason.local_rank,
        signal=reason.signal,
    )


def _reason(end: RankEnd) -> str:
    if end.signal is not None:
        return "RankKilled"
    return "Superseded" if end.code == ExitCode.SUPERSEDED else "RankFailed"


def notice_of(outcome: LauncherOutcome, worker: int) -> EndNotice:
    """Return the notice for the other workers: the reason, and the last log line of a rank that had time to log."""
    last = "" if outcome.signal is not None else outcome.message.rstrip().rpartition("\n")[2]
    how = f"signal {outcome.signal}" if outcome.signal is not None else f"exit code {int(outcome.code)}"
    where = f"worker {worker}" if outcome.rank is None else f"rank {outcome.rank} on worker {worker}"
    message = f"{where} ended with {how}" + (f": {last}" if last else "")
    return EndNotice(
        worker=worker,
        code=outcome.code,
        rank=outcome.rank,
        message=message[:500],
        early=outcome.early,
        reason=outcome.reason,
        signal=outcome.signal,
        log="" if outcome.code == ExitCode.PEER_LOST else outcome.message[-NOTICE_LOG:],
    )


def _of_peer(notice: EndNotice) -> str:
    return notice.message or f"worker {notice.worker} ended with exit code {notice.code}"


def tail(log: pathlib.Path) -> str:
    """Return the last lines of a log without control characters; empty if the log does not exist."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except FileNotFoundError:
        return ""
    lines = ["".join(letter for letter in line if letter.isprintable()) for line in text.splitlines()]
    return "\n".join([line for line in lines if line.strip()][-TAIL_LINES:])


def to_json(outcome: LauncherOutcome, *, attempt: int | None, worker: int | None, now: datetime.datetime) -> str:
    """Serialise the record. A message that is too long loses its beginning, because the cause of an error is at its
    end.
    """
    document: dict[str, Any] = {
        "attempt": attempt,
        "worker": worker,
        "code": int(outcome.code),
        "reason": outcome.reason,
        "rank": outcome.rank,
        "localRank": outcome.local_rank,
        "signal": outcome.signal,
        "message": outcome.message,
        "finishedAt": now.isoformat(timespec="milliseconds"),
    }
    while len(text := json.dumps(document)) > MAX_BYTES:
        excess = len(text) - MAX_BYTES
        document["message"] = document["message"][max(1, excess // 6) :]  # a letter takes up to 6 bytes (\uXXXX)
    return text


def write(path: pathlib.Path, text: str) -> None:
    """Write the record in place; it cannot be renamed: a pod's termination log is a mounted file. Raises OSError."""
    path.write_text(text, encoding="utf-8")
