"""Outcomes of a long benchmark in a file, so that a run that was ended continues where it was."""

import hashlib
import pathlib
import pickle
from collections.abc import Iterable

from detect.runner import DetectionOutcome
from detect.suite import DetectionCase

Key = tuple[str, str, int, int]


class OutcomeFile:
    """Outcomes of cases that have been run, each appended to a file as it ends.

    All are of one version of the code: rates over several versions would be those of none.
    """

    def __init__(self, path: pathlib.Path, version: str) -> None:
        """Read what is there. Raises ValueError where another version has begun the file."""
        self._path = path
        self.outcomes: dict[Key, DetectionOutcome] = {}
        end = 0
        if path.exists():
            with path.open("rb") as stream:
                begun_by = pickle.load(stream)
                if begun_by != version:
                    raise ValueError(
                        f"{path} has outcomes of version {begun_by}, and the code is {version}; write another file"
                    )
                end = stream.tell()
                while (outcome := _next(stream)) is not None:
                    self.outcomes[key_of(outcome.case)] = outcome
                    end = stream.tell()
        self._stream = path.open("r+b" if path.exists() else "wb")
        self._stream.truncate(end)  # an outcome that was being written when the run ended
        self._stream.seek(end)
        if not end:
            pickle.dump(version, self._stream)

    def add(self, outcome: DetectionOutcome) -> None:
        """Append an outcome to the file."""
        self.outcomes[key_of(outcome.case)] = outcome
        pickle.dump(outcome, self._stream)
        self._stream.flush()

    def close(self) -> None:
        """Close the file; its outcomes stay readable."""
        self._stream.close()


def key_of(case: DetectionCase) -> Key:
    """Return what makes a case one of its row."""
    return case.row, case.layout, case.seed, case.steps


def version_of(folders: Iterable[pathlib.Path], options: str) -> str:
    """Return a digest of the Python and C++ files in folders, and of the options that outcomes depend on."""
    digest = hashlib.sha256(options.encode())
    for folder in folders:
        for path in sorted(path for path in folder.rglob("*") if path.suffix in {".py", ".cpp", ".hpp"}):
            digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


def _next(stream: object) -> DetectionOutcome | None:
    """Return the next outcome of a file; None at its end, or where it was cut."""
    try:
        outcome: DetectionOutcome = pickle.load(stream)  # type: ignore[arg-type]
    except (EOFError, pickle.UnpicklingError):
        return None
    return outcome
