"""Reads this worker's progress page, which one rank of the gang writes, and passes it on to worker 0."""

import asyncio
import contextlib
import logging
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from megatronapp_common.errors import DocumentError
from megatronapp_common.pages import DocumentReader

log = logging.getLogger(__name__)

INTERVAL_S = 1.0


@contextlib.contextmanager
def report_progress(path: pathlib.Path, report: Callable[[Mapping[str, Any]], None]) -> Iterator[None]:
    """Within: report the page whenever it has changed, and once more at the end. Needs a running event loop."""
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
    """False if the page cannot be read at all."""
    try:
        page = reader.read_new()
    except DocumentError as error:
        log.warning("no progress is reported: %s", error)
        return False
    if page is not None:
        report(page)
    return True
