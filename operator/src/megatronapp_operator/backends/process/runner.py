"""Runs of a job in this process, or in one that outlives the terminal."""

import contextlib
import io
import os
import sys
import traceback
from collections.abc import Callable, Iterator

from megatronapp_common import state
from megatronapp_common.cli import is_ours
from megatronapp_common.errors import StateError
from megatronapp_common.job.profiles.effective import LayeredJob
from megatronapp_operator.backends.process import settings_builder
from megatronapp_operator.backends.process.backend import Listener, ProcessBackend
from megatronapp_operator.backends.process.settings import ProcessCommands
from megatronapp_operator.backends.process.state import lock, registry
from megatronapp_operator.backends.process.state.paths import JobPaths
from megatronapp_operator.backends.process.stopping import stop_backend
from megatronapp_operator.errors import BackendError, JobConflictError, JobNotFoundError, OperatorError
from megatronapp_operator.plan import Action, Status
from megatronapp_operator.plan_io.spec_reader import process_spec

ACCEPTED = b"accepted"


def run_job(layered: LayeredJob, *, commands: ProcessCommands, retain_hub: bool, listener: Listener) -> Status:
    """Run a job to its end. Raises JobConflictError if a job of its name runs, or one that saves to the same folder."""
    job = layered.job
    paths, uid = JobPaths.of(job.metadata.name), registry.new_uid()
    retire(paths.name)
    paths.root.mkdir(parents=True, exist_ok=True, mode=0o700)
    with _sole_backend(paths):
        registry.require_own_checkpoints(job)
        registry.accept(paths, layered, uid=uid)
        settings = settings_builder.build_settings(job, uid=uid, paths=paths, commands=commands)
        spec = process_spec(job, uid=uid, retain_hub=retain_hub)
        backend = ProcessBackend(settings, spec, facts=settings_builder.build_facts(job), listener=listener)
        with _record_failure(paths), state.raise_state_errors():
            status = backend.run()
        registry.end(paths)
        return status


@contextlib.contextmanager
def _record_failure(paths: JobPaths) -> Iterator[None]:
    """Store the error of a backend that cannot continue (a full disk, a port in use) in the status of the job."""
    try:
        yield
    except (OperatorError, StateError, OSError) as error:
        with contextlib.suppress(OSError):  # the disk may still be full; then the job is shown as lost
            registry.fail(paths, str(error))
        raise BackendError(f"{paths.name}: the backend had to give up: {error}") from error


def retire(name: str) -> None:
    """End a backend that only keeps the pages of a finished job open: a new job replaces it."""
    try:
        job = registry.view(name)
    except JobNotFoundError:
        return
    if job.alive and job.ended:
        stop_backend(job, force=False)


@contextlib.contextmanager
def _sole_backend(paths: JobPaths) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(lock.hold(paths.lock))
        except JobConflictError as error:
            name = paths.name
            raise JobConflictError(
                f'megatronjobs.megatronapp.io "{name}" is running; stop it with "megatronapp delete {name}", '
                "or start this one in parallel with --name and a different checkpoint.save"
            ) from error
        yield


def run_detached(layered: LayeredJob, *, commands: ProcessCommands) -> None:
    """Start a backend in a separate process session and return once the job is accepted.

    Raises BackendError with the message of a backend that did not accept it.
    """
    _open_standard_streams()
    listening, telling = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(listening)
        _become_backend(layered, commands, telling)
    os.close(telling)
    os.waitpid(pid, 0)
    with os.fdopen(listening, "rb") as pipe:
        answer = pipe.read()
    if answer != ACCEPTED:
        raise BackendError(answer.decode(errors="replace") or "the backend ended before it accepted the job")


def _become_backend(layered: LayeredJob, commands: ProcessCommands, telling: int) -> None:
    """Leave session and parent in the forked process, run the job, and exit; never return."""
    code, pipe = 1, os.fdopen(telling, "wb", buffering=0)
    try:
        os.setsid()
        if os.fork() != 0:
            code = 0
            return
        _close_inherited(keep=telling)
        with state.raise_state_errors():
            _leave_terminal(JobPaths.of(layered.job.metadata.name))
            run_job(layered, commands=commands, retain_hub=True, listener=_print_once(pipe))
        code = 0
    except Exception as error:
        if not pipe.closed:
            pipe.write(str(error).encode())
        else:  # accepted already: standard error is the job's own log
            print(f"error: {error}", file=sys.stderr)
        if not is_ours(error):
            traceback.print_exc()
    finally:
        os._exit(code)


def _open_standard_streams() -> None:
    """Open 0, 1 and 2 if the caller closed them, so that no pipe of ours takes one of these numbers."""
    while (fd := os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)) <= 2:
        pass
    os.close(fd)


def _close_inherited(*, keep: int) -> None:
    """Close what the caller had open: a lock or a pipe of a script must not last as long as the job."""
    for fd in map(int, os.listdir("/proc/self/fd")):
        if fd > 2 and fd != keep:
            with contextlib.suppress(OSError):  # the descriptor that listed them is closed already
                os.close(fd)


def _leave_terminal(paths: JobPaths) -> None:
    """Redirect standard input from /dev/null, and output to the job's log."""
    paths.root.mkdir(parents=True, exist_ok=True, mode=0o700)
    log = os.open(paths.backend_log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    nowhere = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    for source, target in ((nowhere, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)  # Python has none where 1 was closed
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)


def _print_once(pipe: io.FileIO) -> Callable[[Status, tuple[Action, ...]], None]:
    """Return a listener that reports the first plan carried out: by then all processes are started."""

    def listen(_status: Status, _actions: tuple[Action, ...]) -> None:
        if not pipe.closed:
            pipe.write(ACCEPTED)
            pipe.close()

    return listen
