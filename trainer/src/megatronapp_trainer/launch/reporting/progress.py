"""Forwarding of this worker's progress document, which one rank of the gang writes, to worker 0."""

import asyncio
import contextlib
import logging
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from megatronapp_common.errors import DocumentError
from megatronapp_common.shared_documents import DocumentReader

log = logging.getLogger(__name__)

INTERVAL_S = 1.0


@contextlib.contextmanager
def report_progress(path: pathlib.Path, report: Callable[[Mapping[str, Any]], None]) -> Iterator[None]:
    """Report the document inside the context whenever it has changed, and once more on exit. Needs a running event
    loop.
    """
    reader = DocumentReader(path)
    task = asyncio.create_task(_watch(reader, report))
    try:
        yield
    finally:
        task.cancel()
        _read_document(reader, report)
        reader.close()


async def _watch(reader: DocumentReader, report: Callable[[Mapping[str, Any]], None]) -> None:
    while _read_document(reader, report):
        await asyncio.sleep(INTERVAL_S)


def _read_document(reader: DocumentReader, report: Callable[[Mapping[str, Any]], None]) -> bool:
    """Report a changed document; returns False if it can never be read."""
    try:
        progress = reader.read_new()
    except DocumentError as error:
        log.warning("no progress is reported: %s", error)
        return False
    if progress is not None:
        report(progress)
    return True
