"""Faults that were sent to the ranks, with a version that grows with every change and survives a restart."""

import json
import pathlib
from collections.abc import Callable, Iterable
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from megatronapp_analyzer.hub.ingest.spool import JsonFile
from megatronapp_common.shared_documents import MAX_JSON_BYTES
from megatronapp_common.web.models import ApiModel

MAX_FAULT_BYTES = MAX_JSON_BYTES - 4096
"""Bytes of faults in the control document, which also holds orders to the training (`training_orders`) and windows."""
MAX_ENDED = 100
"""Number of faults that are over and still shown."""


FaultKind = Literal["compute", "host", "link"]


class FaultRequest(ApiModel):
    """A fault to inject; see the control document."""

    model_config = ConfigDict(strict=True)

    rank: Annotated[int, Field(ge=0)]
    kind: FaultKind
    factor: Annotated[float, Field(gt=1, le=100)]
    from_step: Annotated[int, Field(ge=0)]
    steps: Annotated[int, Field(ge=1)]
    peer: Annotated[int | None, Field(ge=0)] = None

    @property
    def last_step(self) -> int:
        """The last step in which it acts."""
        return self.from_step + self.steps - 1


class Fault(FaultRequest):
    """A fault that was given to the ranks."""

    id: str


class FaultStore:
    """Faults in every worker's control document. `on_change` is called after each change.

    Faults of the manifest are shown, but never written to the document: the ranks have them already. Nor are those
    whose steps are over, because the document is small.
    """

    def __init__(self, path: pathlib.Path | None, manifest: Iterable[Fault] = (), *, writable: bool = True) -> None:
        self._file = JsonFile(path, writable=writable)
        self._manifest = tuple(manifest)
        stored = self._file.read() or {}
        # One more than the last run's: what that one changed last may not have reached the disk.
        self.version = int(stored.get("version", 0)) + 1
        self._faults = _by_id(stored.get("faults", ()))
        self._ended = _by_id(stored.get("ended", ()))
        self.on_change: Callable[[], None] = lambda: None

    def current(self) -> list[Fault]:
        """Return the faults of the manifest, and those that were added and not removed."""
        return [*self._manifest, *self._ended.values(), *self._faults.values()]

    def is_of_manifest(self, fault_id: str) -> bool:
        """Return true if a fault is in the manifest and so cannot be ended here."""
        return any(fault.id == fault_id for fault in self._manifest)

    def document(self) -> dict[str, Any]:
        """Return what agents write to the control document; also the header of a COMMAND frame."""
        return {"version": self.version, "faults": [fault.model_dump() for fault in self._faults.values()]}

    def add(self, request: FaultRequest, *, newest_step: int | None = None) -> Fault | None:
        """Take a fault and give it an id; None if the document is full.

        Faults that ended by `newest_step`, the newest finished one, are retired to free space.
        """
        self._retire(newest_step)
        fault = Fault(id=f"fault-{self.version + 1}", **request.model_dump())
        self._faults[fault.id] = fault
        if len(json.dumps(self.document() | {"version": self.version + 1}).encode()) > MAX_FAULT_BYTES:
            del self._faults[fault.id]
            return None
        self._changed()
        return fault

    def remove(self, fault_id: str) -> bool:
        """End a fault; False if no fault has that id."""
        if self._faults.pop(fault_id, None) is None and self._ended.pop(fault_id, None) is None:
            return False
        self._changed()
        return True

    def _retire(self, newest_step: int | None) -> None:
        if newest_step is None:
            return
        for fault in [fault for fault in self._faults.values() if fault.last_step <= newest_step]:
            self._ended[fault.id] = self._faults.pop(fault.id)
        for fault_id in list(self._ended)[:-MAX_ENDED]:
            del self._ended[fault_id]

    def _changed(self) -> None:
        self.version += 1
        ended = [fault.model_dump() for fault in self._ended.values()]
        self._file.write(self.document() | {"ended": ended})
        self.on_change()


def _by_id(entries: Iterable[dict[str, Any]]) -> dict[str, Fault]:
    return {entry["id"]: Fault.model_validate(entry) for entry in entries}
