"""Other jobs of this user, from the folder in which the process backend keeps them (docs/contracts.md, section 8)."""

import contextlib
import dataclasses
import json
import pathlib
from typing import Any

from megatronapp_common.errors import JobError
from megatronapp_common.job import TERMINAL_PHASES, parse_manifest
from megatronapp_common.processes import is_locked

ENDED = TERMINAL_PHASES | {"Suspended"}
STANDING = frozenset({"confirmed", "recovering"})
UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError, JobError)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class NeighbourJob:
    """Another job as its folder describes it."""

    name: str
    namespace: str
    phase: str
    uid: str
    iteration: int | None
    total_iterations: int | None
    restarts: int
    findings: list[str]
    """Sentences of its verdicts that hold."""


class UserJobs:
    """Jobs of this user, read from the folder again for each list. A folder that cannot be read is no job."""

    def __init__(self, folder: pathlib.Path) -> None:
        self._folder = folder
        self._metadata: dict[pathlib.Path, tuple[int, dict[str, Any]]] = {}
        """Manifests by path, with their modification times; a manifest is read again when its time changes."""

    def entries(self, own: str) -> list[NeighbourJob]:
        """Return all jobs but that with the uid `own`, by name."""
        found = []
        with contextlib.suppress(OSError):
            for folder in sorted(self._folder.iterdir()):
                with contextlib.suppress(*UNREADABLE):
                    found.append(self._entry(folder))
        return [entry for entry in found if entry.uid != own]

    def _entry(self, folder: pathlib.Path) -> NeighbourJob:
        metadata, status = self._read_metadata(folder / "job.yaml"), _read_status(folder / "status.json")
        phase, progress = str(status.get("phase", "Pending")), status.get("progress") or {}
        if phase not in ENDED and not is_locked(folder / "backend.lock"):
            phase = "Failed"
        return NeighbourJob(
            name=folder.name,
            namespace=str(metadata.get("namespace") or "default"),
            phase=phase,
            uid=str(metadata["uid"]),
            iteration=progress.get("iteration"),
            total_iterations=progress.get("totalIterations"),
            restarts=status.get("restarts", 0),
            findings=[verdict["sentence"] for verdict in status.get("slowRanks", ()) if verdict["state"] in STANDING],
        )

    def _read_metadata(self, path: pathlib.Path) -> dict[str, Any]:
        changed = path.stat().st_mtime_ns
        known = self._metadata.get(path)
        if known is None or known[0] != changed:
            known = changed, parse_manifest(path.read_text(encoding="utf-8"))["metadata"]
            self._metadata[path] = known
        return known[1]


def _read_status(path: pathlib.Path) -> dict[str, Any]:
    try:
        document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    return document
