"""Outcomes of a long benchmark in a file of JSON lines, so that a run that was ended continues where it was.

The first line has the version of the code and the detectors; each other line has one window: what was true in it, and
for each detector what it named and when.
"""

import hashlib
import json
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any, BinaryIO, NamedTuple

from detect.protocol import NamedSubject, Verdict
from detect.runner import DetectionOutcome, WindowKey
from detect.score import Truth, Window
from detect.suite import LAYOUTS

Named = dict[int, tuple[Verdict, ...]]


class StoredOutcomes(NamedTuple):
    """Content of a file of outcomes."""

    version: str
    detectors: tuple[str, ...]
    outcomes: dict[WindowKey, DetectionOutcome]
    end: int
    """Position at which the complete lines end; 0 in an empty file."""


class OutcomeFile:
    """Outcomes of cases that have been run, each appended to a file as it ends.

    All are of one version of the code: rates over several versions would be those of none.
    """

    def __init__(self, path: pathlib.Path, version: str, detectors: Sequence[str]) -> None:
        """Read what is there. Raises ValueError where another version, or another program, has begun the file."""
        self._stream: BinaryIO = path.open("r+b" if path.exists() else "w+b")
        try:
            stored = _stored(self._stream, path)
            _check_version(stored, path, version)
        except ValueError:
            self._stream.close()
            raise
        self.outcomes = stored.outcomes
        self._stream.truncate(stored.end)  # an outcome that was being written when the run ended
        self._stream.seek(stored.end)
        if not stored.end:
            self._append({"version": version, "detectors": list(detectors)})

    def add(self, outcome: DetectionOutcome) -> None:
        """Append an outcome to the file."""
        self.outcomes[outcome.key] = outcome
        self._append(outcome_document(outcome))

    def close(self) -> None:
        """Close the file; its outcomes stay readable."""
        self._stream.close()

    def _append(self, document: dict[str, Any]) -> None:
        self._stream.write(json.dumps(document, separators=(",", ":")).encode() + b"\n")
        self._stream.flush()


def read_outcomes(path: pathlib.Path, version: str | None = None) -> StoredOutcomes:
    """Return the complete outcomes of a file, such as another part of a run, which may be going on.

    Raises ValueError where another version than the given one, or another program, has begun the file, and OSError
    without it.
    """
    with path.open("rb") as stream:
        stored = _stored(stream, path)
    if version is not None:
        _check_version(stored, path, version)
    return stored


def _check_version(stored: StoredOutcomes, path: pathlib.Path, version: str) -> None:
    if stored.end and stored.version != version:
        raise ValueError(
            f"{path} has outcomes of version {stored.version}, and the code is {version}; write another file"
        )


def _stored(stream: BinaryIO, path: pathlib.Path) -> StoredOutcomes:
    content = stream.read()
    complete = content[: content.rfind(b"\n") + 1]
    if not complete and content:
        raise ValueError(f"{path} is not a file of outcomes; write another file")
    outcomes: dict[WindowKey, DetectionOutcome] = {}
    header: dict[str, Any] = {"version": "", "detectors": []}
    try:
        for number, line in enumerate(complete.splitlines()):
            document = json.loads(line)
            if number:
                outcome = outcome_of(document)
                outcomes[outcome.key] = outcome
            else:
                header = {"version": str(document["version"]), "detectors": document["detectors"]}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a file of outcomes; write another file") from error
    return StoredOutcomes(header["version"], tuple(header["detectors"]), outcomes, len(complete))


def outcome_document(outcome: DetectionOutcome) -> dict[str, Any]:
    """Return an outcome as plain objects."""
    window = next(iter(outcome.windows.values()))
    return {
        **outcome.key._asdict(),
        "hours": window.hours,
        "truths": [_truth_document(truth) for truth in window.truths],
        "named": {name: _spells(window.named) for name, window in outcome.windows.items()},
        "secondsPerStep": {name: round(seconds, 7) for name, seconds in outcome.seconds_per_step.items()},
    }


def outcome_of(document: dict[str, Any]) -> DetectionOutcome:
    """Return the outcome of plain objects. Raises KeyError or ValueError for what is none."""
    key = WindowKey(document["row"], document["layout"], document["seed"], document["steps"])
    truths = tuple(_truth(each) for each in document["truths"])
    return DetectionOutcome(
        key=key,
        windows={
            name: Window(
                grid=LAYOUTS[key.layout],
                truths=truths,
                named=_named(spells),
                steps=key.steps,
                hours=document["hours"],
            )
            for name, spells in document["named"].items()
        },
        seconds_per_step=document["secondsPerStep"],
    )


def _truth_document(truth: Truth) -> dict[str, Any]:
    return {
        "ranks": list(truth.subject.ranks),
        "isLink": truth.subject.is_link,
        "cause": truth.cause,
        "begin": truth.begin,
        "end": truth.end,
        "noticeableFrom": truth.noticeable_from,
        "costS": truth.cost_s,
        "costFraction": truth.cost_fraction,
    }


def _truth(document: dict[str, Any]) -> Truth:
    return Truth(
        subject=NamedSubject(tuple(document["ranks"]), document["isLink"]),
        cause=document["cause"],
        begin=document["begin"],
        end=document["end"],
        noticeable_from=document["noticeableFrom"],
        cost_s=document["costS"],
        cost_fraction=document["costFraction"],
    )


def _spells(named: Named) -> list[dict[str, Any]]:
    """Return for each subject and cause its spells: first and last step with the same confidence and cost."""
    found: dict[tuple[NamedSubject, str], list[list[Any]]] = {}
    for step, verdicts in sorted(named.items()):
        for verdict in verdicts:
            spells = found.setdefault((verdict.subject, verdict.cause), [])
            if spells and spells[-1][1:] == [step - 1, verdict.confidence, verdict.cost_s]:
                spells[-1][1] = step
            else:
                spells.append([step, step, verdict.confidence, verdict.cost_s])
    return [
        {"ranks": list(subject.ranks), "isLink": subject.is_link, "cause": cause, "spells": spells}
        for (subject, cause), spells in found.items()
    ]


def _named(documents: list[dict[str, Any]]) -> Named:
    named: dict[int, list[Verdict]] = {}
    for each in documents:
        subject = NamedSubject(tuple(each["ranks"]), each["isLink"])
        for first, last, confidence, cost_s in each["spells"]:
            verdict = Verdict(subject=subject, cause=each["cause"], cost_s=cost_s, confidence=confidence)
            for step in range(first, last + 1):
                named.setdefault(step, []).append(verdict)
    return {step: tuple(verdicts) for step, verdicts in sorted(named.items())}


def version_of(folders: Iterable[pathlib.Path], options: str) -> str:
    """Return a digest of the Python and C++ files in folders, and of the options that outcomes depend on."""
    digest = hashlib.sha256(options.encode())
    for folder in folders:
        for path in sorted(path for path in folder.rglob("*") if path.suffix in {".py", ".cpp", ".hpp"}):
            digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]
