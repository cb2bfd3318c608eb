"""Settings of the hub, and what it knows of the job before any agent has spoken."""

import dataclasses
import hashlib
import ipaddress
import json
import pathlib
from typing import Any

from megatronapp_analyzer.errors import SettingsError
from megatronapp_analyzer.hub.ingest.spool import SpoolLimits
from megatronapp_analyzer.hub.ingest.store import StoreLimits
from megatronapp_analyzer.hub.neighbours import UserJobs
from megatronapp_analyzer.hub.state.faults import Fault
from megatronapp_analyzer.hub.state.progress import Progress
from megatronapp_analyzer.scope.probes.rank0_client import Rank0Client
from megatronapp_common.errors import JobError
from megatronapp_common.job import parse_manifest


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class JobIdentity:
    """Which job this hub belongs to."""

    name: str
    uid: str
    namespace: str = "default"
    spec_digest: str = ""
    traced: bool = True
    """Whether the ranks record spans."""
    faults: tuple[Fault, ...] = ()
    """Faults that the manifest asks for; the ranks have them from their arguments."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EndedJob:
    """How a job ended whose stored pages are opened again."""

    phase: str
    progress: Progress | None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class HubSettings:
    """Everything that differs between hubs."""

    job: JobIdentity
    state_dir: pathlib.Path | None
    """Stored traces, faults and verdicts; None keeps nothing on disk."""
    store: StoreLimits = dataclasses.field(default_factory=StoreLimits)
    spool: SpoolLimits = dataclasses.field(default_factory=SpoolLimits)
    restore_segments: int = 4
    """Newest record segments of each attempt that are read again at the start."""
    tick_s: float = 0.25
    """How often pages are served and ranks are looked at."""
    serve: Rank0Client | None = None
    """The model that generates in this job; None: none does."""
    ended: EndedJob | None = None
    """The job has ended: what is stored is shown as it is, and nothing is judged or written."""
    neighbours: UserJobs | None = None
    """Other jobs of this user, for the list; None: it has this job alone."""


def is_loopback(host: str) -> bool:
    """Whether a host to bind is reachable from this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_bind(host: str, *, allow_remote: bool) -> None:
    """Raises SettingsError for an address that others can reach, unless that was asked for."""
    if not is_loopback(host) and not allow_remote:
        raise SettingsError(f"--host {host} can be reached from other machines; use 127.0.0.1, or add --allow-remote")


def load_job_file(path: pathlib.Path, *, name: str | None, uid: str | None) -> JobIdentity:
    """Identity from a MegatronJob (YAML or JSON). `name` and `uid` of the environment win. Raises SettingsError."""
    try:
        document = parse_manifest(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, JobError) as error:
        raise SettingsError(f"{path}: cannot read the job: {error}; give a MegatronJob by --job-file") from error
    if not isinstance(document, dict) or not isinstance(document.get("metadata"), dict):
        raise SettingsError(f"{path}: not a MegatronJob: it has no metadata")
    metadata, spec = document["metadata"], document.get("spec") or {}
    return JobIdentity(
        name=name or str(metadata.get("name", "")),
        uid=uid or str(metadata.get("uid", "")),
        namespace=str(metadata.get("namespace") or "default"),
        spec_digest=spec_digest(spec),
        traced=bool((spec.get("trace") or {}).get("enabled")) or "--trace" in (spec.get("args") or ()),
        faults=tuple(_manifest_fault(path, index, entry) for index, entry in enumerate(spec.get("faults") or [])),
    )


def load_ended(path: pathlib.Path) -> EndedJob:
    """How a job ended, from its status. Raises SettingsError."""
    try:
        status = json.loads(path.read_text(encoding="utf-8"))
        page = status.get("progress")
        progress = None if page is None else Progress.model_validate(page)
        return EndedJob(phase=str(status["phase"]), progress=progress)
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise SettingsError(f"--status-file {path}: not the status of a job: {error!r}") from error


def spec_digest(spec: dict[str, Any]) -> str:
    """Short digest of a spec, the same for equal specs."""
    text = json.dumps(spec, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _manifest_fault(path: pathlib.Path, index: int, entry: dict[str, Any]) -> Fault:
    try:
        return Fault.model_validate({"id": f"manifest-{index}"} | entry)
    except (ValueError, TypeError) as error:
        raise SettingsError(f"{path}: spec.faults[{index}]: {error}") from error
