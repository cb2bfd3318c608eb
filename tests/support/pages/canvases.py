"""Pictures of the page: what a canvas shows is read once it is drawn, and again until it is what is waited for."""

import threading
import time
from collections.abc import Callable
from typing import TypeVar

import playwright.sync_api as pw
import pytest

PATIENCE_S = 120.0
POLL_S = 0.05
PICTURE = "canvas => 'drawn' in canvas.dataset ? canvas.toDataURL() : null"
OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"

T = TypeVar("T")


def wait_for(what: str, probe: Callable[[], T | None], deadline_s: float = PATIENCE_S) -> T:
    """The first answer of `probe` that is true. Fails with what was waited for."""
    end = time.monotonic() + deadline_s
    pause = threading.Event()
    while True:
        if found := probe():
            return found
        if time.monotonic() >= end:
            pytest.fail(f"waited {deadline_s:g} s for {what}")
        pause.wait(POLL_S)


def expect_drawn(at: pw.Page | pw.Locator) -> None:
    """Wait until no canvas below waits for a frame."""
    pw.expect(at.locator("canvas:not([data-drawn])")).to_have_count(0)


def picture(canvas: pw.Locator, *, other_than: str | None = None) -> str:
    """Return what is drawn, once it differs: input may reach the page after the call that sent it has returned."""

    def probe() -> str | None:
        shown: str | None = canvas.evaluate(PICTURE)
        return None if shown == other_than else shown

    return wait_for("a picture" if other_than is None else "another picture", probe)


def expect_picture(canvas: pw.Locator, picture: str) -> None:
    """Wait until this is drawn."""
    wait_for("an earlier picture", lambda: canvas.evaluate(PICTURE) == picture)


def view(canvas: pw.Locator, *, other_than: str | None = None) -> str:
    """Return the name of what is drawn, once it differs."""
    found: list[str | None] = []

    def probe() -> bool:
        found[:] = [canvas.get_attribute("data-drawn")]
        return found[0] is not None and found[0] != other_than

    wait_for("a drawn picture" if other_than is None else f"another picture than {other_than}", probe)
    return str(found[0])


def expect_to_fit(page: pw.Page, what: str) -> None:
    """Wait until nothing is wider than the window: canvases follow its size in the next frame."""
    expect_drawn(page)
    wait_for(f"{what} to be no wider than the window", lambda: int(page.evaluate(OVERFLOW)) <= 0)
