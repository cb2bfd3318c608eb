"""A replayed session as the browser tests open it, and files that its panels save."""

import dataclasses
import pathlib
import urllib.parse
from typing import Any

import playwright.sync_api as pw
import scope_session


@dataclasses.dataclass(frozen=True)
class ReplayedHub:
    """A session that is served, and the numbers that it was made of."""

    url: str
    token: str
    recording: scope_session.Recording

    def view(self, view: str, **selection: Any) -> str:
        """Address of a panel."""
        return f"{self.url}/?{urllib.parse.urlencode({'page': 'scope', 'view': view, **selection})}"

    def open(self, page: pw.Page, view: str, **selection: Any) -> None:
        """Show a panel with all that the session has."""
        page.goto(self.view(view, **selection))
        pw.expect(page.get_by_test_id("run-state")).to_contain_text("Done: 8 new tokens")
        pw.expect(page.get_by_test_id("tokens")).to_be_visible()


def saved(page: pw.Page, card: str, name: str) -> bytes:
    """The file that a button of a panel saves."""
    with page.expect_download() as download:
        page.get_by_role("region", name=card).get_by_role("button", name=name).click()
    return pathlib.Path(download.value.path()).read_bytes()
