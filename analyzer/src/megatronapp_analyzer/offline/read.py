"""Reading recorded traces of any known tool from files and folders."""

import gzip
import json
import pathlib
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from megatronapp_analyzer.errors import ImportTraceError, ProtocolError
from megatronapp_analyzer.hub.ingest.ring_metadata import parse_ring
from megatronapp_analyzer.offline import megatronapp_files
from megatronapp_analyzer.offline.exported_files import read_exported
from megatronapp_analyzer.offline.job import RecordedJob
from megatronapp_analyzer.offline.kineto_files import is_kineto, read_kineto

MOST_BYTES = 2 << 30
"""Size that a file has at most, uncompressed."""
_READ_BYTES = 1 << 20
_MOST_NS = 1 << 62
_READABLE = (
    "files of MegatronApp's ranks (benchmark-data-D-pipeline-P-tensor-T.json), the file of its aggregator, a "
    "trace of PyTorch's profiler of each rank, or Chrome JSON of megatronapp trace export"
)


def read_traces(paths: Sequence[pathlib.Path], *, except_for: pathlib.Path | None = None) -> RecordedJob:
    """Read the traces of one job, each path a file or a folder with files. Raises ImportTraceError.

    The file `except_for`, such as one that is to be written, is skipped in folders.
    """
    files = [file for path in paths for file in _files(path, except_for)]
    of_ranks = [file for file in files if megatronapp_files.NAME.fullmatch(file.name)]
    chosen = of_ranks or files  # the aggregator writes its own file into the folder of those of the ranks
    documents = {str(file): _load(file) for file in chosen}
    try:
        job = megatronapp_files.read_rank_files(documents) if of_ranks else _read_documents(documents)
        if not 0 <= job.real_offset_ns < _MOST_NS:
            raise ValueError(f"the trace begins {job.real_offset_ns} ns after 1970")
        for rank in job.ranks:
            ring = parse_ring(0, job.ring_header(rank))
            members = [member for group in ring.comms.values() for member in group.members]
            if members and not 0 <= min(members) <= max(members) < job.world:
                raise ValueError(f"rank {rank.rank} communicates with rank {max(members)}, of {job.world}")
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, ProtocolError) as error:
        more = f" or {len(chosen) - 1} more files" if len(chosen) > 1 else ""
        raise ImportTraceError(
            f"{chosen[0]}{more}: an event lacks something or has it in another form: {type(error).__name__}: {error}"
        ) from error
    return job


def _read_documents(documents: Mapping[str, Any]) -> RecordedJob:
    """Read files that are no files of MegatronApp's ranks: their content by name. Raises ImportTraceError."""
    if all(map(is_kineto, documents.values())):
        return read_kineto(documents)
    (name, document), *others = documents.items()
    if others:
        raise ImportTraceError(f"{name} and {len(others)} more files are not of one job; give {_READABLE}")
    events = document.get("traceEvents") if isinstance(document, dict) else document
    if not isinstance(events, list):
        raise ImportTraceError(f"{name} is no trace: it has no list of events; give {_READABLE}")
    if isinstance(document, dict) and "originRealTimeNs" in document.get("metadata", {}):
        return read_exported(document, name)
    if any(isinstance(event, dict) and "g_rk" in (event.get("args") or {}) for event in events):
        return megatronapp_files.read_aggregated(events, name)
    raise ImportTraceError(f"{name}: its events are of no tool that is known; give {_READABLE}")


def _files(path: pathlib.Path, except_for: pathlib.Path | None) -> list[pathlib.Path]:
    if not path.is_dir():
        return [path]
    skipped = None if except_for is None else except_for.resolve()
    found = sorted(
        file for pattern in ("*.json", "*.json.gz") for file in path.glob(pattern) if file.resolve() != skipped
    )
    if not found:
        raise ImportTraceError(f"{path} has no *.json and no *.json.gz; give {_READABLE}")
    return found


def _load(path: pathlib.Path) -> Any:  # noqa: ANN401 - JSON
    try:
        return json.loads(_content(path))
    except OSError as error:  # also of gzip
        raise ImportTraceError(f"{path} cannot be read: {error.strerror or error}") from error
    except (EOFError, zlib.error) as error:
        raise ImportTraceError(f"{path} cannot be read, it is damaged: {error}; copy it again") from error
    except (ValueError, RecursionError) as error:
        raise ImportTraceError(f"{path} is no JSON: {error}; give {_READABLE}") from error


def _content(path: pathlib.Path) -> bytearray:
    """Return the bytes of a file, uncompressed. Raises ImportTraceError if there are more than MOST_BYTES."""
    content = bytearray()
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        while block := file.read(_READ_BYTES):
            content += block
            if len(content) > MOST_BYTES:
                raise ImportTraceError(
                    f"{path} has more than {MOST_BYTES} bytes, uncompressed; give a trace of fewer steps"
                )
    return content
