"""Commands of the control page to the tracer: faults, and windows."""

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

log = logging.getLogger(__name__)


class ControlDocument(Protocol):
    """Methods used of `DocumentReader`."""

    def read_new(self) -> dict[str, Any] | None:
        """Return the document if it changed.

        Raises DocumentError.
        """


class CommandReader:
    """Reads the control page at step boundaries, and passes it on."""

    def __init__(self, control: ControlDocument, takers: Iterable[Callable[[Mapping[str, Any]], None]]) -> None:
        """Take the page, and what parses and applies parts of it; each applies nothing of a part that is invalid."""
        self._control = control
        self._takers = tuple(takers)
        self._complaint = ""
        """Reason why the page was last ignored; one that stays unreadable is reported once."""

    def read(self) -> None:
        """Apply the commands of the page if it changed.

        A page or a part of it that is invalid changes nothing, and never ends the training that reads it.
        """
        try:
            document = self._control.read_new()
        except Exception as error:  # another process wrote the page
            self._complain("the control page is ignored", error)
            return
        if document is None:
            return
        valid = True
        for take in self._takers:
            try:
                take(document)
            except Exception as error:
                self._complain("a part of the control page is ignored", error)
                valid = False
        if valid:
            self._complaint = ""

    def _complain(self, what: str, error: Exception) -> None:
        if str(error) != self._complaint:
            log.warning("%s: %s", what, error)
        self._complaint = str(error)
