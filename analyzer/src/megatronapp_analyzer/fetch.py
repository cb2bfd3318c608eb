"""Fetching the trace of a job for the command line: from its hub if that answers, otherwise from the hub's disk."""

import json
import pathlib
from typing import Any

import httpx

from megatronapp_analyzer.errors import ExportError, HubError
from megatronapp_analyzer.hub import export
from megatronapp_analyzer.hub.ingest.ingest import TraceIngest
from megatronapp_analyzer.hub.ingest.spool import SpoolLimits
from megatronapp_analyzer.hub.ingest.spooled_ingest import SpooledIngest
from megatronapp_analyzer.hub.ingest.store import StoreLimits
from megatronapp_common.state import jobs_dir
from megatronapp_common.web.tokens import TokenRole, derive_token, read_secret

NEWEST_STEPS = 50
STORED_BYTES = 2 << 30
CONNECT_TIMEOUT_S = 2.0
ANSWER_TIMEOUT_S = 120.0
Document = dict[str, Any]


def job_folder(name: str) -> pathlib.Path:
    """Return the folder of a job. Raises ExportError if no such job exists."""
    folder = jobs_dir() / name
    if pathlib.PurePath(name).name != name or not _is_there(folder):
        raise ExportError(f'megatronjobs.megatronapp.io "{name}" not found; "megatronapp get" lists the jobs')
    return folder


def _is_there(folder: pathlib.Path) -> bool:
    """Return true if the folder exists. Unlike `is_dir`, raises OSError where that cannot be known."""
    try:
        folder.stat()
    except FileNotFoundError:
        return False
    return True


def trace(folder: pathlib.Path, first: int | None, last: int | None) -> tuple[Document, str]:
    """Return the trace and a description of its source. Raises ExportError or HubError."""
    document = from_hub(folder, first, last)
    if document is not None:
        return document, "from the running hub"
    return from_disk(folder, first, last), "from the stored traces"


def from_hub(folder: pathlib.Path, first: int | None, last: int | None) -> Document | None:
    """Fetch the trace from the hub; None if it does not answer. Raises HubError if it refuses."""
    try:
        url = json.loads((folder / "hub.json").read_text(encoding="utf-8"))["url"]
        token = derive_token(read_secret(folder / "secret"), TokenRole.VIEWER)
    except FileNotFoundError:
        return None
    except (KeyError, TypeError, ValueError) as error:
        raise HubError(f"{folder / 'hub.json'}: not the address of a hub: {error!r}; remove the file") from error
    bounds = {name: step for name, step in (("from", first), ("to", last)) if step is not None}
    timeout = httpx.Timeout(ANSWER_TIMEOUT_S, connect=CONNECT_TIMEOUT_S)
    headers = {"Authorization": f"Bearer {token}"}
    try:
        with httpx.Client(timeout=timeout, trust_env=False, headers=headers) as client:
            answer = client.get(f"{url.rstrip('/')}/api/v1/trace", params=bounds)
    except httpx.TransportError:
        return None
    if answer.status_code == httpx.codes.NOT_FOUND:
        return None  # the running hub holds only the newest steps; the disk may have those asked for
    if answer.is_error:
        raise HubError(f"hub {url}: {answer.status_code}: {answer.text[:200]}")
    document: Document = answer.json()
    return document


def from_disk(folder: pathlib.Path, first: int | None, last: int | None) -> Document:
    """Build a trace from the stored records. Raises ExportError if none are in the range."""
    ingest = TraceIngest(StoreLimits(full_steps=1_000_000, full_bytes=STORED_BYTES))
    spooled = SpooledIngest(ingest, folder / "hub" / "traces", SpoolLimits(), writable=False)
    spooled.restore(newest_segments=None)
    for attempt in sorted(ingest.attempts):
        spooled.end_attempt(attempt)
    chosen = ingest.store.select(first, last, newest=NEWEST_STEPS)
    if not chosen:
        raise ExportError(f"job {folder.name}: {_nothing_stored(ingest, first, last)}")
    return export.chrome_trace(export.source_of(ingest, folder.name, chosen))


def _nothing_stored(ingest: TraceIngest, first: int | None, last: int | None) -> str:
    """Explain why the range has no trace, and which steps are stored."""
    held = {step.view.step for step in ingest.store.select(0, None, newest=NEWEST_STEPS)}
    if not held:
        return "no steps are stored; was it started with analyzer.enabled and trace.enabled?"
    asked = f"{first or 0} to {'the end' if last is None else last}"
    return f"no steps {asked} are stored; take --from and --to between {min(held)} and {max(held)}"


def write_trace(path: pathlib.Path, document: Document) -> None:
    """Write the document atomically. Raises ExportError if the file cannot be written."""
    beside = path.with_name(path.name + ".part")
    try:
        with beside.open("w", encoding="utf-8") as file:
            json.dump(document, file, separators=(",", ":"))
        beside.replace(path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise ExportError(f"{path}: cannot write the trace: {error.strerror}; choose another -o FILE") from error
