"""The backend of one job: observe, plan, store the status, act, wait; until nothing is left to do."""

import contextlib
import dataclasses
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from megatronapp_common.job import status_document
from megatronapp_common.names import Env, ShmFile
from megatronapp_common.pages import DocumentReader
from megatronapp_common.room import SharedMemorySpace
from megatronapp_common.text.times import rfc3339
from megatronapp_common.web import tokens
from megatronapp_operator.backends.process import job_processes, signals, spawn
from megatronapp_operator.backends.process.hub import HubProcess
from megatronapp_operator.backends.process.ports import ReservedPort
from megatronapp_operator.backends.process.settings import ProcessSettings, worker_address, worker_environment
from megatronapp_operator.backends.process.state import files
from megatronapp_operator.backends.process.state.paths import shm_prefix
from megatronapp_operator.backends.process.worker import WorkerProcess
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

GUARDIAN_END_S = 5.0
"""Seconds for the guardian to end after its pipe was closed."""

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
        self._workers: dict[int, WorkerProcess] = {}
        self._pages: dict[int, DocumentReader] = {}
        self._hub: HubProcess | None = None
        self._coordinator: ReservedPort | None = None
        self._api: ReservedPort | None = None
        """Port of the API of a served model; kept over the attempts."""
        self._guardian: subprocess.Popen[bytes] | None = None
        self._last_now = 0.0
        self._unwritable: set[pathlib.Path] = set()
        """Files of the state whose last write failed."""
        self._unwritten_events: list[dict[str, Any]] = []
        """Events that are not yet in their file."""

    def run(self) -> Status:
        """Run the job to its end. Signals stop it: the first with a checkpoint, the second at once."""
        spawn.become_subreaper()
        self._hold_api()
        with signals.blocked() as numbers, self._cleaned_up():
            while True:
                wake_at = self._step()
                if self._finished():
                    self._write_to_the_end(numbers)
                    return self._job.status
                number = signals.wait(numbers, min(TICK_S, wake_at - self._now()))
                if number is not None and number is not signal.SIGCHLD:
                    self._stop(number)

    def _hold_api(self) -> None:
        """Reserve the port of a served model, and store its address. Raises BackendError if the port is in use."""
        if self._settings.serve is None:
            return
        self._api = ReservedPort(*self._settings.serve)
        files.write_json(self._settings.paths.serve, {"url": self._api_url(self._api)})

    @staticmethod
    def _api_url(held: ReservedPort) -> str:
        return f"http://{'127.0.0.1' if held.address == '0.0.0.0' else held.address}:{held.number}"

    def _write_to_the_end(self, numbers: frozenset[signal.Signals]) -> None:
        """Store how the job ended; retry for a while on a full disk, or until the next signal."""
        self._store()
        if self._unwritable:
            self._print_warning(
                f"retrying for {FINAL_STATUS_RETRY_S:g} s to write the last state; Ctrl-C ends the wait"
            )
        until = time.monotonic() + FINAL_STATUS_RETRY_S
        while self._unwritable and time.monotonic() < until:
            number = signals.wait(numbers, TICK_S)
            if number is not None and number is not signal.SIGCHLD:
                break
            self._store()
        if self._unwritable:
            self._print_warning("the last state was not written: the state shown of this job is older than its end")

    @contextlib.contextmanager
    def _cleaned_up(self) -> Iterator[None]:
        """Remove all processes and shared memory of the job on every exit."""
        self._guardian = spawn.start_guardian(self._settings.uid, self._settings.shm)
        try:
            yield
        finally:
            self._sweep()
            job_processes.remove_shared_memory(self._settings.shm, shm_prefix(self._settings.uid))
            if self._hub is not None:
                self._hub.close()
            self._release_gang()
            if self._api is not None:
                self._api.close()
            self._release_guardian()

    def _sweep(self) -> None:
        """Kill what is left, and report processes that cannot be killed (such as one inside a broken driver)."""
        mine = job_processes.ProcessSelector(uid=self._settings.uid)
        if job_processes.sweep(mine):
            return
        pids = ", ".join(map(str, job_processes.find(mine)))
        message = f"these processes could not be ended and may still hold memory, ports and GPUs: {pids}"
        self._print_warning(message)
        self._record(RecordEvent(type=EventType.WARNING, reason="ProcessesLeft", message=message), self._now())

    def _step(self) -> float:
        """Observe and plan once; return when to do it again at the latest."""
        now = self._now()
        self._tick(now)
        made = plan(self._job, self._observe(), now)
        changed = made.status != self._job.status
        self._job = dataclasses.replace(self._job, status=made.status)
        if changed or self._unwritable:
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
        for worker in self._workers.values():
            worker.tick(now)
            if worker.trouble is not None:
                self._warn("AgentNotStarted", worker.trouble, now)
                worker.trouble = None
        for index in [index for index, worker in self._workers.items() if self._forgotten(worker)]:
            del self._workers[index]
        if self._hub is not None:
            self._hub.tick(now)
        own = {pid for worker in self._workers.values() for pid in worker.pids}
        own |= self._hub.pids if self._hub is not None else set()
        self._keep_guardian()
        assert self._guardian is not None
        spawn.reap_orphans(own | {self._guardian.pid})

    def _forgotten(self, worker: WorkerProcess) -> bool:
        """Return True for a worker of an older attempt that has ended.

        The ends of current workers decide over the job.
        """
        stale = worker.attempt != self._job.status.attempt
        return stale and worker.gone and worker.observe().deletion is not None

    def _keep_guardian(self) -> None:
        if self._guardian is not None and self._guardian.poll() is not None:
            self._release_guardian()
            self._guardian = spawn.start_guardian(self._settings.uid, self._settings.shm)

    def _release_guardian(self) -> None:
        assert self._guardian is not None and self._guardian.stdin is not None
        self._guardian.stdin.close()
        try:
            self._guardian.wait(GUARDIAN_END_S)
        except subprocess.TimeoutExpired:  # it was stopped by a signal
            self._guardian.kill()
            self._guardian.wait()

    def _observe(self) -> Observed:
        told = self._hub.summary if self._hub is not None else None
        pages = [hub_summary.read_page(page) for page in self._pages.values()]
        current = told is not None and told.attempt == self._job.status.attempt
        return Observed(
            secret=self._settings.paths.secret.exists(),
            hub=self._hub.observe() if self._hub is not None else None,
            workers=tuple(worker.observe() for worker in self._workers.values()),
            progress=hub_summary.newest([told.progress if told else None, *pages]),
            slow_ranks=told.slow_ranks if told else None,
            hung_ranks=told.hung_ranks if told and current else None,
            full_shared_memory=self._full_shared_memory(),
            controls=told.controls if told else (),
        )

    def _full_shared_memory(self) -> tuple[str, ...] | None:
        """Measure shared memory here, also without a hub: all workers of this machine use the same folder."""
        room = SharedMemorySpace.measure(self._settings.shm)
        return None if room is None else (str(room),) * room.full

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
                self._create(action, now)
            case DeleteWorker():
                self._workers[action.index].delete(action.grace_s, now)
            case RecordEvent():
                self._record(action, now)

    def _record(self, event: RecordEvent, now: float) -> None:
        words = {"type": event.type.value, "reason": event.reason, "message": event.message}
        self._unwritten_events.append({"time": rfc3339(now), **words})
        self._write_events()

    def _write_events(self) -> None:
        """Write Events to their file, also those that a full disk has delayed."""
        with self._kept_alive_on_a_full_disk(self._settings.paths.events):
            files.append_json(self._settings.paths.events, self._unwritten_events)
            self._unwritten_events.clear()

    def _warn(self, reason: str, message: str, now: float) -> None:
        """Record and print an Event of the backend itself, about a failure that is no part of the training."""
        event = RecordEvent(type=EventType.WARNING, reason=reason, message=message)
        self._record(event, now)
        self._listener(self._job.status, (event,))

    def _start_hub(self, now: float) -> None:
        if self._hub is None:
            url = None if self._api is None else self._api_url(self._api)
            secret = tokens.read_secret(self._settings.paths.secret)
            self._hub = HubProcess(self._settings, secret=secret, serve_url=url)
        try:
            self._hub.start()
        except OSError as error:
            self._hub.give_up_start(now)
            self._warn("HubNotStarted", f"the hub cannot be started and is retried later: {error}", now)

    def _create(self, action: CreateWorker, now: float) -> None:
        if not self._workers:
            self._release_gang()
            self._coordinator = ReservedPort(worker_address(0))
        assert self._coordinator is not None
        environment = worker_environment(
            self._settings,
            index=action.index,
            attempt=action.attempt,
            coordinator=f"{self._coordinator.address}:{self._coordinator.number}",
            hub_url=self._hub.url if self._hub is not None else "",
            serve="" if self._api is None else f"{self._api.address}:{self._api.number}",
        )
        page = self._settings.shm / f"{environment[Env.SHM_PREFIX]}.{ShmFile.PROGRESS}"
        self._pages[action.index] = DocumentReader(page)
        self._workers[action.index] = WorkerProcess(
            self._settings, index=action.index, attempt=action.attempt, environment=environment, now=now
        )

    def _release_gang(self) -> None:
        """Release what belongs to one attempt."""
        for page in self._pages.values():
            page.close()
        self._pages.clear()
        if self._coordinator is not None:
            self._coordinator.close()
            self._coordinator = None

    def _stop(self, number: signal.Signals) -> None:
        """Request a stop: the first signal asks for a checkpoint, the second does not wait for it."""
        force = self._job.stop is not None or number is signals.FORCING
        stop = self._job.stop or StopRequest(reason="Interrupted", message=f"stopped by {number.name}")
        self._job = dataclasses.replace(self._job, stop=dataclasses.replace(stop, force=force))

    def _finished(self) -> bool:
        stopped = self._job.stop is not None and self._job.status.phase is Phase.SUSPENDED
        ended = stopped or self._job.status.phase in TERMINAL_PHASES
        if not ended or not all(one.gone for one in self._workers.values()):
            return False
        return self._hub is None or self._hub.ended_at is not None

    def _store(self) -> None:
        hub = None if self._hub is None or self._hub.ended_at is not None else self._hub
        status = dataclasses.replace(
            self._job.status,
            **self._facts,
            rank_table=self._workers[0].rank_table() if 0 in self._workers else None,
            hub_url=None if hub is None else hub.url,
            serve_url=None if self._api is None else self._api_url(self._api),
        )
        with self._kept_alive_on_a_full_disk(self._settings.paths.status):
            files.write_json(self._settings.paths.status, status_document(status))
        if self._unwritten_events:
            self._write_events()

    @contextlib.contextmanager
    def _kept_alive_on_a_full_disk(self, path: pathlib.Path) -> Iterator[None]:
        """Survive a full disk: an outdated state is no reason to end the training.

        The next reconcile writes it again, once there is space; after the end of the job, see _write_to_the_end.
        """
        try:
            yield
        except OSError as error:
            if path not in self._unwritable:
                self._print_warning(f"the state cannot be written: {error}")
            self._unwritable.add(path)
        else:
            self._unwritable.discard(path)

    def _print_warning(self, message: str) -> None:
        """Print to standard error, which may be a file on the full disk."""
        with contextlib.suppress(OSError):
            print(f"warning: {self._settings.paths.root}: {message}", file=sys.stderr, flush=True)
