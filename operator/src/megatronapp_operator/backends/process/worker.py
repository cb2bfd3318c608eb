"""Processes of a worker: a launcher with its ranks, and the agent next to it."""

import errno
import os
import pathlib
import signal
import subprocess
from collections.abc import Mapping
from typing import Any

from megatronapp_common.names import RANK_TABLE_FILE, Env, ExitCode
from megatronapp_operator.backends.process import job_processes
from megatronapp_operator.backends.process.settings import ProcessSettings
from megatronapp_operator.backends.process.spawn import is_ended, spawn
from megatronapp_operator.backends.process.state.files import read_json
from megatronapp_operator.plan import Deletion, Worker, WorkerOutcome, WorkerPhase
from megatronapp_operator.plan.outcome import NOT_STARTED

AGENT_FLUSH_S = 15.0
"""Most seconds for an agent to send what it has, after its worker has ended; on a busy machine it takes some."""
AGENT_PAUSE_MAX_S = 60.0
"""Longest pause in seconds between starts of an agent that ends again and again."""
LAST_BYTES = 2000
"""Bytes at the end of a log that are read for its last line."""


class WorkerProcess:
    """One worker of one attempt. `tick` advances it; nothing here blocks.

    One that cannot be started (a full disk, no more processes) is treated as one that failed at once.
    """

    def __init__(
        self, settings: ProcessSettings, *, index: int, attempt: int, environment: Mapping[str, str], now: float
    ) -> None:
        self.index = index
        self.attempt = attempt
        self.gone = False
        """True once nothing of it is left: no process and no shared memory."""
        self.trouble: str | None = None
        """Problem that users should know; the backend reports and clears it."""
        self._settings = settings
        self._environment = environment
        self._run_dir = pathlib.Path(environment[Env.RUN_DIR])
        self._started_at = now
        self._finished_at: float | None = None
        self._outcome: WorkerOutcome | None = None
        self._deletion: Deletion | None = None
        self._launcher: subprocess.Popen[bytes] | None = None
        self._agent: subprocess.Popen[bytes] | None = None
        self._agent_starts = 0
        self._agent_due = now
        self._agent_asked = False
        try:
            self._run_dir.mkdir(parents=True, exist_ok=True)
            self._launcher = spawn(settings.commands.launcher, environment=environment, log=self.launcher_log)
        except OSError as error:
            self._finished_at, self._outcome = now, worker_not_started(error)

    @property
    def launcher_log(self) -> pathlib.Path:
        return self._run_dir / "launcher.log"

    @property
    def pids(self) -> set[int]:
        """Process ids of our own children among its processes."""
        return {process.pid for process in (self._launcher, self._agent) if process is not None}

    def delete(self, grace_s: float, now: float) -> None:
        """Request a stop within `grace_s` seconds, or kill it now (0)."""
        self._deletion = Deletion(since=now, grace_s=grace_s)
        if self._finished_at is None:
            self._signal(signal.SIGTERM if grace_s else signal.SIGKILL)

    def observe(self) -> Worker:
        """Return the worker's state for the plan."""
        return Worker(
            index=self.index,
            attempt=self.attempt,
            phase=self._phase(),
            started_at=self._started_at,
            finished_at=self._finished_at,
            outcome=self._outcome,
            deletion=self._deletion,
        )

    def rank_table(self) -> dict[str, Any] | None:
        """Return the rank table of the gang; None until it has gathered."""
        return read_json(self._run_dir / RANK_TABLE_FILE)

    def tick(self, now: float) -> None:
        """Notice ends, keep the agent alive, and clean up after the launcher."""
        if self.gone:
            return
        if self._finished_at is None:
            assert self._launcher is not None
            if is_ended(self._launcher):
                self._finish(now, self._launcher)
            else:
                self._kill_if_overdue(now)
                self._keep_agent(now)
        if self._finished_at is not None:
            self._retire_agent(now, self._finished_at)

    def _phase(self) -> WorkerPhase:
        if self._outcome is not None:
            return WorkerPhase.SUCCEEDED if self._outcome.code == ExitCode.OK else WorkerPhase.FAILED
        return WorkerPhase.RUNNING if (self._run_dir / RANK_TABLE_FILE).exists() else WorkerPhase.PENDING

    def _signal(self, number: signal.Signals) -> None:
        """Signal the launcher, which forwards it to the ranks; kill the whole group."""
        assert self._launcher is not None
        if number is signal.SIGKILL:
            os.killpg(self._launcher.pid, number)
            return
        os.kill(self._launcher.pid, number)
        os.kill(self._launcher.pid, signal.SIGCONT)  # a stopped process does not see SIGTERM

    def _kill_if_overdue(self, now: float) -> None:
        if self._deletion is not None and now >= self._deletion.since + self._deletion.grace_s:
            self._signal(signal.SIGKILL)

    def _finish(self, now: float, launcher: subprocess.Popen[bytes]) -> None:
        """Record the end of the launcher, and kill the rest of its group."""
        os.killpg(launcher.pid, signal.SIGKILL)
        code = launcher.wait()
        self._finished_at = now
        self._outcome = read_outcome(pathlib.Path(self._environment[Env.TERMINATION_LOG]), code, self.launcher_log)

    def _keep_agent(self, now: float) -> None:
        """Restart the agent with back-off; its death does not affect training."""
        if not self._settings.analyzer or now < self._agent_due:
            return
        if self._agent is not None and self._agent.poll() is None:
            return
        self._agent_starts += 1
        self._agent_due = now + min(AGENT_PAUSE_MAX_S, 2.0 ** min(self._agent_starts, 6))
        log = self._run_dir / "agent.log"
        try:
            self._agent = spawn(self._settings.commands.agent, environment=self._environment, log=log)
        except OSError as error:
            pause_s = self._agent_due - now
            self.trouble = (
                f"the agent of worker {self.index} cannot be started, next attempt in {pause_s:.0f} s: {error}"
            )

    def _retire_agent(self, now: float, finished_at: float) -> None:
        if self._agent is not None and self._agent.poll() is None:
            if not self._agent_asked:
                self._agent.terminate()
                self._agent_asked = True
            if now < finished_at + AGENT_FLUSH_S:
                return
            self._agent.kill()
            self._agent.wait()
        relatives = job_processes.ProcessSelector(uid=self._settings.uid, attempt=self.attempt, worker=self.index)
        if job_processes.send(relatives, signal.SIGKILL) == 0:
            prefix = self._environment[Env.SHM_PREFIX]
            job_processes.remove_shared_memory(self._settings.shm, f"{prefix}.")
            self.gone = True


def worker_not_started(error: OSError) -> WorkerOutcome:
    """Return the outcome of a worker whose folder, log or process could not be created."""
    code = ExitCode.STORAGE if error.errno in {errno.ENOSPC, errno.EDQUOT} else ExitCode.OWN_FAILURE
    where = f" ({error.filename})" if error.filename else ""
    return WorkerOutcome(code=code, reason=NOT_STARTED, message=f"{error.strerror or error}{where}")


def read_outcome(path: pathlib.Path, code: int, log: pathlib.Path) -> WorkerOutcome:
    """Return the launcher's own record, or one made of its exit status (negative: a signal) and its last log line."""
    record = read_json(path)
    if record is not None and code >= 0:
        return WorkerOutcome(
            code=code,
            reason=str(record.get("reason") or ""),
            message=str(record.get("message") or ""),
            rank=record.get("rank"),
            signal=record.get("signal"),
        )
    if code < 0:
        return WorkerOutcome(
            code=ExitCode.OWN_FAILURE, reason="LauncherKilled", signal=-code, message="the launcher died"
        )
    return WorkerOutcome(code=code, reason="Completed" if code == 0 else "LauncherFailed", message=last_log_line(log))


def last_log_line(log: pathlib.Path) -> str:
    """Return the last line of a log, for a message; empty without a log."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - LAST_BYTES))
            lines = file.read().decode(errors="replace").strip().splitlines()
    except FileNotFoundError:
        return ""
    return lines[-1] if lines else ""
