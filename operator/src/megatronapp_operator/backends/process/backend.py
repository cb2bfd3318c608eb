"""The backend of one job: observe, plan, store the status, act, wait; until nothing is left to do."""

import contextlib
import dataclasses
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

from megatronapp_common.job import status_document
from megatronapp_common.shared_memory_space import SharedMemorySpace
from megatronapp_common.web import tokens
from megatronapp_operator.backends.process import job_processes, signals, spawn
from megatronapp_operator.backends.process.gang import Gang
from megatronapp_operator.backends.process.hub import HubProcess
from megatronapp_operator.backends.process.ports import ReservedPort
from megatronapp_operator.backends.process.settings import ProcessSettings
from megatronapp_operator.backends.process.state import files
from megatronapp_operator.backends.process.state.paths import shm_prefix
from megatronapp_operator.backends.process.state.writer import StateWriter
from megatronapp_operator.plan import (
    TERMINAL_PHASES,
    Action,
    CreateWorker,
    DeleteHub,
    DeleteWorker,
    EnsureHub,
    EnsureSecret,
    EventType,
    JobSpec,
    JobState,
    Observed,
    Phase,
    RecordEvent,
    Status,
    StopRequest,
    plan,
)
from megatronapp_operator.plan_io import hub_summary

TICK_S = 0.5
"""Seconds between reads of progress and checks of the deadlines of processes."""

FINAL_STATUS_RETRY_S = 120.0
"""Seconds for which the end of a job retries to write its last state to a full disk."""

Listener = Callable[[Status, tuple[Action, ...]], None]
"""Callback for every new status and the actions for it."""


class ProcessBackend:
    """Backend that runs one job in this process, in its main thread."""

    def __init__(self, settings: ProcessSettings, spec: JobSpec, *, facts: dict[str, Any], listener: Listener) -> None:
        self._settings = settings
        self._job = JobState(spec=spec)
        self._facts = facts
        self._listener = listener
        self._state = StateWriter(settings.paths)
        self._gang = Gang(settings)
        self._hub: HubProcess | None = None
        self._api: ReservedPort | None = None
        """Port of the API of a served model; kept over the attempts."""
        self._guardian: spawn.GuardianProcess | None = None
        self._last_now = 0.0

    def run(self) -> Status:
        """Run the job to its end. Signals stop it: the first with a checkpoint, the second at once."""
        spawn.become_subreaper()
        self._hold_api()
        with signals.received() as arrived, self._cleaned_up():
            while True:
                wake_at = self._step()
                if self._finished():
                    self._write_to_the_end(arrived)
                    return self._job.status
                number = arrived.wait(min(TICK_S, wake_at - self._now()))
                if number is not None and number is not signal.SIGCHLD:
                    self._stop(number)

    def _hold_api(self) -> None:
        """Reserve the port of a served model, and store its address. Raises BackendError if the port is in use."""
        if self._settings.serve is None:
            return
        self._api = ReservedPort(*self._settings.serve, secrets=True)
        files.write_json(self._settings.paths.serve, {"url": self._api.url})

    def _write_to_the_end(self, arrived: signals.SignalPipe) -> None:
        """Store how the job ended; retry for a while on a full disk, or until the next signal."""
        self._store()
        if self._state.unwritable:
            self._state.warn(f"retrying for {FINAL_STATUS_RETRY_S:g} s to write the last state; Ctrl-C ends the wait")
        until = time.monotonic() + FINAL_STATUS_RETRY_S
        while self._state.unwritable and time.monotonic() < until:
            number = arrived.wait(TICK_S)
            if number is not None and number is not signal.SIGCHLD:
                break
            self._store()
        if self._state.unwritable:
            self._state.warn("the last state was not written: the state shown of this job is older than its end")

    @contextlib.contextmanager
    def _cleaned_up(self) -> Iterator[None]:
        """Remove all processes and shared memory of the job on every exit."""
        self._guardian = spawn.GuardianProcess(self._settings.uid, self._settings.shm)
        try:
            yield
        finally:
            self._sweep()
            job_processes.remove_shared_memory(self._settings.shm, shm_prefix(self._settings.uid))
            if self._hub is not None:
                self._hub.close()
            self._gang.close()
            if self._api is not None:
                self._api.close()
            self._guardian.close()

    def _sweep(self) -> None:
        """Kill what is left, and report processes that cannot be killed (such as one inside a broken driver)."""
        mine = job_processes.ProcessSelector(uid=self._settings.uid)
        if job_processes.sweep(mine):
            return
        pids = ", ".join(map(str, job_processes.find(mine)))
        message = f"these processes could not be ended and may still hold memory, ports and GPUs: {pids}"
        self._state.warn(message)
        self._state.record(RecordEvent(type=EventType.WARNING, reason="ProcessesLeft", message=message), self._now())

    def _step(self) -> float:
        """Observe and plan once; return when to do it again at the latest."""
        now = self._now()
        self._tick(now)
        made = plan(self._job, self._observe(), now)
        changed = made.status != self._job.status
        self._job = dataclasses.replace(self._job, status=made.status)
        if changed or self._state.unwritable:
            self._store()
        for action in made.actions:
            self._act(action, now)
        if changed or made.actions:
            self._listener(made.status, made.actions)
        if any(not isinstance(action, RecordEvent) for action in made.actions):
            return now
        return now + TICK_S if made.wake_at is None else made.wake_at

    def _now(self) -> float:
        """Return the real time in seconds, never before that of the last call: the plan requires it."""
        self._last_now = max(self._last_now, time.time())
        return self._last_now

    def _tick(self, now: float) -> None:
        for problem in self._gang.tick(now, attempt=self._job.status.attempt):
            self._warn("AgentNotStarted", problem, now)
        if self._hub is not None:
            self._hub.tick(now)
        assert self._guardian is not None
        self._guardian.keep()
        hub = set() if self._hub is None else self._hub.pids
        spawn.reap_orphans(self._gang.pids | hub | {self._guardian.pid})

    def _observe(self) -> Observed:
        summary = self._hub.summary if self._hub is not None else None
        current = summary is not None and summary.attempt == self._job.status.attempt
        return Observed(
            secret=self._settings.paths.secret.exists(),
            hub=self._hub.observe() if self._hub is not None else None,
            workers=self._gang.observe(),
            progress=hub_summary.newest([summary.progress if summary else None, *self._gang.progress()]),
            slow_ranks=summary.slow_ranks if summary else None,
            hung_ranks=summary.hung_ranks if summary and current else None,
            full_shared_memory=self._full_shared_memory(),
            controls=summary.controls if summary else (),
        )

    def _full_shared_memory(self) -> tuple[str, ...] | None:
        """Measure shared memory here, also without a hub: all workers of this machine use the same folder."""
        space = SharedMemorySpace.measure(self._settings.shm)
        return None if space is None else (str(space),) * space.full

    def _act(self, action: Action, now: float) -> None:
        match action:
            case EnsureSecret():
                files.write_text(self._settings.paths.secret, tokens.new_secret() + "\n")
            case EnsureHub():
                self._start_hub(now)
            case DeleteHub():
                if self._hub is not None:
                    self._hub.delete(now)
            case CreateWorker():
                self._gang.create(
                    action, hub_url=self._hub.url if self._hub is not None else "", api=self._api, now=now
                )
            case DeleteWorker():
                self._gang.delete(action, now)
            case RecordEvent():
                self._state.record(action, now)

    def _warn(self, reason: str, message: str, now: float) -> None:
        """Record and print an Event of the backend itself, about a failure that is no part of the training."""
        event = RecordEvent(type=EventType.WARNING, reason=reason, message=message)
        self._state.record(event, now)
        self._listener(self._job.status, (event,))

    def _start_hub(self, now: float) -> None:
        if self._hub is None:
            url = None if self._api is None else self._api.url
            secret = tokens.read_secret(self._settings.paths.secret)
            self._hub = HubProcess(self._settings, secret=secret, serve_url=url)
        try:
            self._hub.start()
        except OSError as error:
            self._hub.give_up_start(now)
            self._warn("HubNotStarted", f"the hub cannot be started and is retried later: {error}", now)

    def _stop(self, number: signal.Signals) -> None:
        """Request a stop: the first signal asks for a checkpoint, the second does not wait for it."""
        force = self._job.stop is not None or number is signals.FORCING
        stop = self._job.stop or StopRequest(reason="Interrupted", message=f"stopped by {number.name}")
        self._job = dataclasses.replace(self._job, stop=dataclasses.replace(stop, force=force))

    def _finished(self) -> bool:
        stopped = self._job.stop is not None and self._job.status.phase is Phase.SUSPENDED
        ended = stopped or self._job.status.phase in TERMINAL_PHASES
        if not ended or not self._gang.gone:
            return False
        return self._hub is None or self._hub.ended_at is not None

    def _store(self) -> None:
        hub = None if self._hub is None or self._hub.ended_at is not None else self._hub
        status = dataclasses.replace(
            self._job.status,
            **self._facts,
            rank_table=self._gang.rank_table(),
            hub_url=None if hub is None else hub.url,
            serve_url=None if self._api is None else self._api.url,
        )
        self._state.write_status(status_document(status))
