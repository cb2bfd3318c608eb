"""Settings of the hub, and what it knows of the job before any agent has connected."""

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
from megatronapp_common.job import load_stored_job, parse_manifest
from megatronapp_common.job.api.quantity import quantity_value
from megatronapp_common.job.arguments import obeys_orders
from megatronapp_common.job.rules.cluster import LEAST_STORE


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ControlSettings:
    """Control of the job's training, which obeys orders."""

    gpus: int = 0
    """GPUs of the job, which a pause keeps idle."""
    resume_after_s: float | None = None
    """Length after which a pause ends in which no client controls the training."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class JobIdentity:
    """Identity of the job that this hub belongs to."""

    name: str
    uid: str
    namespace: str = "default"
    spec_digest: str = ""
    traced: bool = True
    """True if the ranks record spans."""
    faults: tuple[Fault, ...] = ()
    """Faults of the manifest; the ranks have them from their arguments."""
    gpu_hour_price: float | None = None
    """Price of a GPU-hour in the manifest."""
    control: ControlSettings | None = None
    """Control of its training; None where it obeys no orders."""
    spool: SpoolLimits = dataclasses.field(default_factory=SpoolLimits)
    """Disk space for its traces."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EndedJob:
    """Outcome of an ended job whose stored pages are opened again."""

    phase: str
    progress: Progress | None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class HubSettings:
    """Settings that differ between hubs."""

    job: JobIdentity
    state_dir: pathlib.Path | None
    """Folder of stored traces, faults and verdicts; None stores nothing on disk."""
    store: StoreLimits = dataclasses.field(default_factory=StoreLimits)
    spool: SpoolLimits | None = None
    """Disk space for traces; None: what the job says."""
    restore_segments: int = 4
    """Number of the newest record segments of each attempt that are read again at the start."""
    tick_s: float = 0.25
    """Seconds between updates of pages and checks of ranks."""
    serve: Rank0Client | None = None
    """Client of the model that generates in this job; None if none does."""
    ended: EndedJob | None = None
    """Outcome of the job if it has ended: stored data is shown unchanged, and nothing is judged or written."""
    neighbours: UserJobs | None = None
    """Other jobs of this user, for the list; None lists this job alone."""


def is_loopback(host: str) -> bool:
    """Return true if a host to bind is reachable from this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_bind(host: str, *, allow_remote: bool) -> None:
    """Raise SettingsError for an address that others can reach, unless remote access is allowed."""
    if not is_loopback(host) and not allow_remote:
        raise SettingsError(f"--host {host} can be reached from other machines; use 127.0.0.1, or add --allow-remote")


def load_job_file(path: pathlib.Path, *, name: str | None, uid: str | None) -> JobIdentity:
    """Return the identity in a MegatronJob (YAML or JSON); `name` and `uid` take precedence. Raises SettingsError."""
    try:
        document = parse_manifest(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, JobError) as error:
        raise SettingsError(f"{path}: cannot read the job: {error}; give a MegatronJob by --job-file") from error
    if not isinstance(document, dict) or not isinstance(document.get("metadata"), dict):
        raise SettingsError(f"{path}: not a MegatronJob: it has no metadata")
    metadata, spec = document["metadata"], document.get("spec") or {}
    try:
        control = control_settings(document)
    except JobError as error:
        raise SettingsError(f"{path}: {error}") from error
    return JobIdentity(
        name=name or str(metadata.get("name", "")),
        uid=uid or str(metadata.get("uid", "")),
        namespace=str(metadata.get("namespace") or "default"),
        spec_digest=spec_digest(spec),
        traced=bool((spec.get("trace") or {}).get("enabled")) or "--trace" in (spec.get("args") or ()),
        faults=tuple(_manifest_fault(path, index, entry) for index, entry in enumerate(spec.get("faults") or [])),
        gpu_hour_price=_price(path, spec.get("analyzer") or {}),
        control=control,
        spool=_spool_limits(path, spec.get("analyzer") or {}),
    )


def _spool_limits(path: pathlib.Path, analyzer: dict[str, Any]) -> SpoolLimits:
    """Return limits by the size of the hub's volume.

    Half of it is for the archive, an eighth at most for the spool, and for digests and curves, and a sixteenth at most
    for captures, and for probe texts. An eighth is left for small files, and for captures that are being replaced.
    """
    given = (analyzer.get("volume") or {}).get("sizeLimit")
    if given is None:
        return SpoolLimits()
    try:
        size = int(quantity_value(str(given)))
    except ValueError as error:
        raise SettingsError(f"{path}: spec.analyzer.volume.sizeLimit: {error}") from error
    if size < quantity_value(LEAST_STORE):
        raise SettingsError(
            f"{path}: spec.analyzer.volume.sizeLimit: {given} is less than {LEAST_STORE}; write more, such as 10Gi"
        )
    plain = SpoolLimits()
    return SpoolLimits(
        segment_bytes=min(plain.segment_bytes, size // 16),  # the spool always has space for two
        total_bytes=min(plain.total_bytes, size // 8),
        sums_bytes=min(plain.sums_bytes, size // 8),
        archive_bytes=size // 2,
        captures_bytes=min(plain.captures_bytes, size // 16),
    )


def _price(path: pathlib.Path, analyzer: dict[str, Any]) -> float | None:
    price = analyzer.get("gpuHourPrice")
    if price is None:
        return None
    try:
        return float(price)
    except (TypeError, ValueError) as error:
        raise SettingsError(f"{path}: spec.analyzer.gpuHourPrice: {price!r} is no number") from error


def control_settings(document: dict[str, Any]) -> ControlSettings | None:
    """Return the control of the training of a manifest that was accepted; None where it obeys no orders.

    Raises JobError for a manifest that has control and cannot be read.
    """
    spec = document.get("spec") or {}
    by_flag = any("--training-" in str(argument) for argument in spec.get("args") or ())
    if "training" not in (spec.get("scope") or {}) and not by_flag:
        return None
    job, _ = load_stored_job(document)
    if not obeys_orders(job):
        return None
    control = None if job.spec.scope is None else job.spec.scope.training
    return ControlSettings(
        gpus=job.world.gpus, resume_after_s=None if control is None else control.resume_after_seconds
    )


def load_ended(path: pathlib.Path) -> EndedJob:
    """Return how a job ended, from its status. Raises SettingsError."""
    try:
        status = json.loads(path.read_text(encoding="utf-8"))
        page = status.get("progress")
        progress = None if page is None else Progress.model_validate(page)
        return EndedJob(phase=str(status["phase"]), progress=progress)
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise SettingsError(f"--status-file {path}: not the status of a job: {error!r}") from error


def spec_digest(spec: dict[str, Any]) -> str:
    """Return a short digest of a spec, the same for equal specs."""
    text = json.dumps(spec, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _manifest_fault(path: pathlib.Path, index: int, entry: dict[str, Any]) -> Fault:
    try:
        return Fault.model_validate({"id": f"manifest-{index}"} | entry)
    except (ValueError, TypeError) as error:
        raise SettingsError(f"{path}: spec.faults[{index}]: {error}") from error
