"""Registry of this user's jobs: accept, read, and repair what a killed backend left."""

import contextlib
import dataclasses
import itertools
import os
import pathlib
import re
import time
import uuid
from collections.abc import Mapping
from typing import Any

import yaml

from megatronapp_common.job import TERMINAL_PHASES, MegatronJob, manifest_text, place_of
from megatronapp_common.job.api.metadata import NAME_PATTERN
from megatronapp_common.job.profiles.effective import LayeredJob
from megatronapp_common.processes import is_locked
from megatronapp_common.state import jobs_dir
from megatronapp_common.text.times import rfc3339
from megatronapp_operator.backends.process import job_processes
from megatronapp_operator.backends.process.state import files, lock
from megatronapp_operator.backends.process.state.paths import JobPaths, shm_dir, shm_prefix
from megatronapp_operator.errors import JobConflictError, JobNotFoundError

ENDED_PHASES = TERMINAL_PHASES | {"Suspended"}
"""Phases without a backend. On this machine a job is suspended by stopping it; the same `run` resumes it."""
LOST = "BackendLost"
FAILED = "BackendFailed"
LOST_MESSAGE = "the backend ended unexpectedly (killed, or the machine went down); start the job again to resume it"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JobView:
    """View of a job for the command line."""

    paths: JobPaths
    document: dict[str, Any]
    """MegatronJob as JSON, status included."""
    alive: bool
    """True while its backend runs."""

    @property
    def name(self) -> str:
        return self.paths.name

    @property
    def status(self) -> dict[str, Any]:
        status: dict[str, Any] = self.document["status"]
        return status

    @property
    def phase(self) -> str:
        return str(self.status.get("phase", "Pending"))

    @property
    def ended(self) -> bool:
        """True if the job has ended or was stopped; its pages may still be open."""
        return self.phase in ENDED_PHASES


def new_uid() -> str:
    """Return a fresh unique id, short enough for file names."""
    return uuid.uuid4().hex[:12]


def require_own_checkpoints(job: MegatronJob) -> None:
    """Raise JobConflictError if another running job saves to the folder that this job saves to.

    The newer job would take the folder over, and the older one would lose everything that it trains from then on.
    """
    saves = _saves(job.to_dict()["spec"])
    if saves is None:
        return
    for other in views():
        if other.name == job.metadata.name or not other.alive or other.ended:
            continue
        if pathlib.Path(saves).resolve() == _save_folder(other):
            raise JobConflictError(
                f'{place_of(job, "--save")}: {saves} belongs to the running job "{other.name}", which could not '
                f'save any more; use another folder, or stop that job with "megatronapp delete {other.name}"'
            )


def _saves(spec: Mapping[str, Any]) -> str | None:
    """Return where a job saves: the last `--save` of its args, which wins, or `checkpoint.save`."""
    found: str | None = spec.get("checkpoint", {}).get("save")
    arguments = spec.get("args", [])
    for argument, following in itertools.zip_longest(arguments, arguments[1:]):
        flag, equals, value = argument.partition("=")
        if flag == "--save":
            found = value if equals else following
    return found


def _save_folder(job: JobView) -> pathlib.Path | None:
    """Return the folder that a running job saves to; relative paths start where its backend was started."""
    saves = _saves(job.document["spec"])
    backend = files.read_json(job.paths.backend)
    if saves is None or backend is None:
        return None
    try:
        start = pathlib.Path(f"/proc/{backend['pid']}/cwd").readlink()
    except OSError:  # it has just ended
        return None
    return start.joinpath(saves).resolve()


def accept(paths: JobPaths, layered: LayeredJob, *, uid: str) -> None:
    """Store a new job, replacing a finished one of the same name. The caller holds the lock."""
    clean_up(paths)
    for entry in paths.root.iterdir():
        if entry not in {paths.lock, paths.backend_log}:
            files.remove_tree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
    document = layered.job.to_dict()
    document.pop("status", None)
    document["metadata"] |= {"uid": uid, "generation": 1, "creationTimestamp": rfc3339(time.time())}
    files.write_json(paths.layers, layered.to_dict())
    files.write_text(paths.manifest, manifest_text(document))
    files.write_json(paths.backend, {"pid": os.getpid(), "uid": uid, "startedAt": rfc3339(time.time())})


def end(paths: JobPaths) -> None:
    """Remove the files of a backend that ends in order and no longer listens. The caller holds the lock."""
    paths.backend.unlink()
    _forget_addresses(paths)


def clean_up(paths: JobPaths) -> None:
    """Kill and remove what a backend that did not end in order has left. The caller holds the lock."""
    left = files.read_json(paths.backend)
    if left is None:
        return
    job_processes.sweep(job_processes.ProcessSelector(uid=left["uid"]))
    job_processes.remove_shared_memory(shm_dir(), shm_prefix(left["uid"]))
    paths.backend.unlink()
    _forget_addresses(paths)


def _forget_addresses(paths: JobPaths) -> None:
    paths.hub.unlink(missing_ok=True)
    paths.serve.unlink(missing_ok=True)


def view(name: str) -> JobView:
    """Return the job of this name, with its state corrected if the backend died.

    Raises JobNotFoundError, also for a path: it may lead to a folder that has a job.yaml but is no job's.
    """
    paths = JobPaths.of(name)
    missing = JobNotFoundError(f'megatronjobs.megatronapp.io "{name}" not found; "megatronapp get" lists the jobs')
    if re.fullmatch(NAME_PATTERN, name) is None:
        raise missing
    try:
        paths.manifest.stat()
    except FileNotFoundError as error:
        raise missing from error
    alive = is_locked(paths.lock)
    if not alive and (paths.backend.exists() or _phase(paths) not in ENDED_PHASES):
        with contextlib.suppress(JobConflictError), lock.hold(paths.lock):  # held: another process starts it right now
            _settle(paths)
        alive = is_locked(paths.lock)
    return _read(paths, alive=alive)


def views() -> list[JobView]:
    """Return all jobs, by name."""
    found = []
    for root in sorted(_roots()):
        with contextlib.suppress(JobNotFoundError):  # deleted in the meantime
            found.append(view(root.name))
    return found


def _roots() -> list[pathlib.Path]:
    try:
        return [root for root in jobs_dir().iterdir() if (root / "job.yaml").exists()]
    except FileNotFoundError:
        return []


def _phase(paths: JobPaths) -> str:
    return str((files.read_json(paths.status) or {}).get("phase", "Pending"))


def _read(paths: JobPaths, *, alive: bool) -> JobView:
    try:
        document = yaml.safe_load(paths.manifest.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise JobNotFoundError(f'megatronjobs.megatronapp.io "{paths.name}" was deleted') from error
    status = files.read_json(paths.status) or {"phase": "Pending"}
    return JobView(paths=paths, document={**document, "status": status}, alive=alive)


def _settle(paths: JobPaths) -> None:
    """Clean up after a dead backend, and store the end of the job in its status."""
    clean_up(paths)
    status = files.read_json(paths.status) or {}
    if status.get("phase") not in ENDED_PHASES:
        files.write_json(paths.status, lost_status(status, now=time.time()))


def fail(paths: JobPaths, message: str) -> None:
    """Store in the status that the backend itself cannot continue. The caller holds the lock."""
    status = files.read_json(paths.status) or {}
    if status.get("phase") not in ENDED_PHASES:
        files.write_json(paths.status, lost_status(status, now=time.time(), reason=FAILED, message=message))
    end(paths)


def lost_status(
    status: dict[str, Any], *, now: float, reason: str = LOST, message: str = LOST_MESSAGE
) -> dict[str, Any]:
    """Return the status of a job whose backend was killed: failed, for a reason that is not the job's."""
    moment = rfc3339(now)
    conditions = [dict(condition) for condition in status.get("conditions", ()) if condition["type"] != "Failed"]
    for condition in conditions:
        if condition["type"] in {"Running", "Restarting", "Stalled"} and condition["status"] == "True":
            condition |= {"status": "False", "reason": reason, "message": message, "lastTransitionTime": moment}
    failed = {"type": "Failed", "status": "True", "reason": reason, "message": message, "lastTransitionTime": moment}
    replicas = status.get("replicaStatuses", {}) | {"pending": 0, "running": 0, "ready": 0}
    changes = {
        "phase": "Failed",
        "conditions": [*conditions, failed],
        "completionTime": moment,
        "replicaStatuses": replicas,
    }
    return {key: value for key, value in status.items() if key not in {"hubUrl", "serveUrl"}} | changes
