"""Ranks of different workers, whose control pages have windows from different steps on."""

import os
import pathlib
from typing import Any

from megatronapp_common.shared_documents import DocumentWriter

Pages = list[dict[int, list[dict[str, Any]]]]
"""By rank, the windows that its worker's page has from before a step on."""


def window(from_step: int, granularity: str, ranks: list[int] | None = None) -> dict[str, Any]:
    """Return a window of two steps."""
    return {"fromStep": from_step, "steps": 2, "granularity": granularity, "ranks": ranks}


def install(pages: Pages) -> list[int]:
    """Give this rank a separate folder of shared memory with a page, which is written before its steps.

    Returns a list that gets a 0 at the beginning of each step, to count in.
    """
    from megatronapp_trainer.scan.observer import ScanObserver

    rank = int(os.environ["RANK"])
    folder = pathlib.Path(os.environ["MEGATRONAPP_SHM_DIR"]) / f"worker{rank}"
    folder.mkdir()
    os.environ["MEGATRONAPP_SHM_DIR"] = str(folder)
    page = DocumentWriter(folder / f"{os.environ['MEGATRONAPP_SHM_PREFIX']}.control")
    begin = ScanObserver.step_begin
    counts: list[int] = []

    def begin_with_page(observer: ScanObserver, step: int) -> None:
        if step in pages[rank]:
            page.write({"windows": pages[rank][step]})
        counts.append(0)
        begin(observer, step)

    replaced: Any = ScanObserver
    replaced.step_begin = begin_with_page
    return counts
