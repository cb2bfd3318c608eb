"""Fetching the trace of a job for the command line: from its hub if that answers, otherwise from the hub's disk."""

import dataclasses
import json
import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import httpx

from megatronapp_analyzer.errors import ExportError, HubError
from megatronapp_analyzer.hub.archive.stored import StoredTraces
from megatronapp_analyzer.hub.export.around import steps_around
from megatronapp_analyzer.hub.export.formats import TraceFormat, spans_of_a_slice, trace_file
from megatronapp_analyzer.hub.export.tracks import source_of
from megatronapp_analyzer.hub.state.verdicts import VerdictStore
from megatronapp_analyzer.offline.stored import hub_traces, stored_traces
from megatronapp_common.state import jobs_dir
from megatronapp_common.web.tokens import TokenRole, derive_token, read_secret

OMITTED_HEADER = "Megatronapp-Omitted"
"""Header of a hub's answer that says what is missing in it."""
NEWEST_STEPS = 50
NEWEST_SEGMENTS = 64
"""Segments that are read for the newest steps: a gigabyte of records."""
_LAST = 2**32 - 1
CONNECT_TIMEOUT_S = 2.0
ANSWER_TIMEOUT_S = 120.0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TraceRequest:
    """Selection of steps and format of a trace file."""

    first: int | None = None
    last: int | None = None
    format_: TraceFormat = TraceFormat.CHROME
    verdict: str | None = None
    """Only the part that shows this verdict."""

    @property
    def query(self) -> dict[str, str | int]:
        """Return the parameters of the hub's route."""
        values = {"from": self.first, "to": self.last, "verdict": self.verdict, "format": str(self.format_)}
        return {name: value for name, value in values.items() if value is not None}


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


def trace(folder: pathlib.Path, request: TraceRequest) -> tuple[bytes, str]:
    """Return the trace file and a description of its source. Raises ExportError or HubError."""
    content = from_hub(folder, request)
    if content is not None:
        return content.content, "from the running hub" + (f" ({content.omitted})" if content.omitted else "")
    return from_disk(folder, request), "from the stored traces"


class HubAnswer(NamedTuple):
    """A trace from a hub; `omitted` says what is missing in it."""

    content: bytes
    omitted: str | None


def has_hub(folder: pathlib.Path) -> bool:
    """Return true if a hub of the job answers. Raises HubError if that cannot be known."""
    try:
        return _answer(folder, "job", {}) is not None
    except FileNotFoundError:
        return False


def from_hub(folder: pathlib.Path, request: TraceRequest) -> HubAnswer | None:
    """Fetch the trace from the hub; None if it does not answer. Raises HubError if it refuses."""
    try:
        answer = _answer(folder, "trace", request.query)
    except FileNotFoundError:
        return None
    if answer is None:
        return None
    if answer.status_code == httpx.codes.NOT_FOUND:
        return None  # the running hub holds only the newest steps; the disk may have those asked for
    if answer.is_error:
        raise HubError(f"hub {answer.url.host}: {answer.status_code}: {answer.text[:200]}")
    return HubAnswer(answer.content, answer.headers.get(OMITTED_HEADER))


def _answer(folder: pathlib.Path, path: str, query: Mapping[str, str | int]) -> httpx.Response | None:
    """Return the answer of the job's hub; None if it does not answer.

    Raises FileNotFoundError if the job has none, and HubError if its address cannot be read.
    """
    try:
        url = json.loads((folder / "hub.json").read_text(encoding="utf-8"))["url"]
        token = derive_token(read_secret(folder / "secret"), TokenRole.VIEWER)
    except (KeyError, TypeError, ValueError) as error:
        raise HubError(f"{folder / 'hub.json'}: not the address of a hub: {error!r}; remove the file") from error
    timeout = httpx.Timeout(ANSWER_TIMEOUT_S, connect=CONNECT_TIMEOUT_S)
    headers = {"Authorization": f"Bearer {token}"}
    try:
        with httpx.Client(timeout=timeout, trust_env=False, headers=headers) as client:
            return client.get(f"{url.rstrip('/')}/api/v1/{path}", params=dict(query))
    except httpx.TransportError:
        return None


def from_disk(folder: pathlib.Path, request: TraceRequest) -> bytes:
    """Build a trace from the stored records. Raises ExportError if none are in the range."""
    stored = hub_traces(folder / "hub")
    if request.verdict is not None:
        found = VerdictStore(folder / "hub" / "verdicts.json", writable=False).find(request.verdict)
        if found is None:
            raise ExportError(f"job {folder.name} has no verdict {request.verdict!r}; its page or hub lists them")
        ingest = stored_traces(stored, steps=_steps_near(found))
        chosen = steps_around(ingest.store, found, spans_of_a_slice(request.format_))
    else:
        steps = None if request.first is None else (request.first, _LAST if request.last is None else request.last)
        ingest = stored_traces(stored, steps=steps, newest_segments=NEWEST_SEGMENTS if steps is None else None)
        chosen = ingest.store.select(request.first, request.last, newest=NEWEST_STEPS)
    if not chosen:
        raise ExportError(f"job {folder.name}: {_nothing_stored(stored, request.first, request.last)}")
    return trace_file(source_of(ingest, folder.name, chosen), request.format_)


def _steps_near(verdict: Mapping[str, Any]) -> tuple[int, int]:
    """Return the steps that a trace around a verdict may show, by the numbers of its evidence."""
    known = [verdict["since"]["step"], *verdict["evidence"]["steps"]]
    return min(known) - NEWEST_STEPS, max(known) + NEWEST_STEPS


def _nothing_stored(stored: StoredTraces, first: int | None, last: int | None) -> str:
    """Explain why the range has no trace, and which steps are stored."""
    newest = stored_traces(stored, newest_segments=NEWEST_SEGMENTS).store.select(0, None, newest=0)
    held = {step.view.step for step in newest} | set(stored.archived_steps())
    if not held:
        return "no steps are stored; was it started with analyzer.enabled and trace.enabled?"
    asked = f"{first or 0} to {'the end' if last is None else last}"
    return f"no steps {asked} are stored; take --from and --to between {min(held)} and {max(held)}"
