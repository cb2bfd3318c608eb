"""All verdicts of the job by id, in the form of the contract, kept on disk over a restart."""

import pathlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from megatronapp_analyzer.hub.ingest.spool import JsonFile
from megatronapp_analyzer.hub.judge.learned import OlderVerdict
from megatronapp_analyzer.model import Cause, JobMoment, Verdict, VerdictState

ACTIVE = frozenset({VerdictState.SUSPECT, VerdictState.CONFIRMED, VerdictState.RECOVERING})
MAX_VERDICTS = 1000
"""Number of verdicts kept; the oldest cleared ones are dropped first."""


def sort_key(verdict: dict[str, Any]) -> tuple[float, int]:
    """Return time and step at which it began."""
    return verdict["since"]["time"], verdict["since"]["step"]


class VerdictStore:
    """Verdicts of the detector. `version` grows with every change."""

    def __init__(self, path: pathlib.Path | None, *, writable: bool = True) -> None:
        self._file = JsonFile(path, writable=writable)
        self._verdicts: dict[str, dict[str, Any]] = {}
        self._live: dict[str, Verdict] = {}
        self._older: dict[str, OlderVerdict] = {}
        """Verdicts of lost detectors that verdicts of the current one continue, by the id that it gives them."""
        self.version = 0
        self.on_new: Callable[[Verdict], None] = lambda _verdict: None
        """Is called with each verdict that the detector reports for the first time."""
        self.explain: Callable[[Verdict], Verdict] = lambda verdict: verdict
        """Adds the reason, and evidence for it, to each verdict that the detector reports."""
        for verdict in self._file.read() or []:
            known = {"stale": False, "reason": None} | verdict  # those of an older release have no reason
            if writable and verdict["state"] in ACTIVE:
                known["stale"] = True
            self._verdicts[verdict["id"]] = known

    def update(self, verdicts: Iterable[Verdict]) -> bool:
        """Take verdicts, new or changed. True if that changed anything."""
        changed = False
        for reported in verdicts:
            older = self._older.get(reported.id) or self._older_hang(reported)
            verdict = self.explain(reported if older is None else older.continued_by(reported))
            document = verdict.to_json() | {"stale": False}
            is_new = verdict.id not in self._verdicts
            self._live[verdict.id] = verdict
            changed |= self._verdicts.get(verdict.id) != document
            self._verdicts[verdict.id] = document
            if is_new:
                self.on_new(verdict)
        if changed:
            self._save()
        return changed

    def continue_older(self, older: Mapping[str, OlderVerdict]) -> None:
        """Take later verdicts with these ids as continuations of older ones, until the detector is lost."""
        self._older |= older

    def _older_hang(self, reported: Verdict) -> OlderVerdict | None:
        """Return the stale hang of the same ranks and attempt, which the verdict continues; None without."""
        if reported.cause is not Cause.HANG:
            return None
        fault = list(reported.subject.ranks), reported.since.attempt
        for document in self.stale():
            known = document["subject"]["ranks"], document["since"]["attempt"]
            if document["cause"] == Cause.HANG and known == fault:
                older = OlderVerdict(id=document["id"], since=JobMoment(**document["since"]), lost_s=0.0)
                self._older[reported.id] = older
                return older
        return None

    def suspend(self) -> None:
        """Mark active verdicts as stale: their detector is lost, and whether they hold is unknown until it is back."""
        self._live.clear()
        self._older.clear()
        stale = [verdict for verdict in self._verdicts.values() if verdict["state"] in ACTIVE]
        for verdict in stale:
            verdict["stale"] = True
        if stale:
            self._save()

    def clear_unreported(self, now_s: float, *, hangs: bool = True) -> None:
        """Clear what the detector has not reported again after a restart; `hangs`: hangs, too."""
        unreported = [verdict for id_, verdict in self._verdicts.items() if id_ not in self._live]
        self._clear([verdict for verdict in unreported if hangs or verdict["cause"] != Cause.HANG], now_s)

    def clear_all(self, now_s: float) -> None:
        """Clear all verdicts, because their detector was replaced."""
        self._clear(list(self._verdicts.values()), now_s)
        self._live.clear()
        self._older.clear()

    def _clear(self, verdicts: list[dict[str, Any]], now_s: float) -> None:
        stale = [verdict for verdict in verdicts if verdict["state"] in ACTIVE]
        for verdict in stale:
            since = verdict["since"]
            last_step = max([since["step"], *verdict["evidence"]["steps"]])
            verdict["state"], verdict["stale"] = str(VerdictState.CLEARED), False
            verdict["until"] = {"attempt": since["attempt"], "step": last_step, "time": now_s}
        if stale:
            self._save()

    def all(self) -> list[dict[str, Any]]:
        """Return all verdicts, newest first, in the form of the contract."""
        return sorted(self._verdicts.values(), key=sort_key, reverse=True)

    def find(self, id_: str) -> dict[str, Any] | None:
        """Return a verdict in the form of the contract; None if it is not known."""
        return self._verdicts.get(id_)

    def stale(self) -> list[dict[str, Any]]:
        """Return the verdicts of which it is unknown whether they hold, in the form of the contract."""
        return [verdict for verdict in self._verdicts.values() if verdict["stale"]]

    @property
    def has_stale(self) -> bool:
        """Return true if it is unknown of some verdict whether it holds."""
        return bool(self.stale())

    def active(self) -> list[Verdict]:
        """Return verdicts that are not cleared."""
        return [verdict for verdict in self._live.values() if verdict.state in ACTIVE]

    def confirmed(self) -> list[Verdict]:
        """Return verdicts that hold now."""
        return [verdict for verdict in self.active() if verdict.state == VerdictState.CONFIRMED]

    def standing(self) -> list[Verdict]:
        """Return verdicts that were reported and are not cleared: confirmed, or recovering and perhaps not for good."""
        return [verdict for verdict in self.active() if verdict.state != VerdictState.SUSPECT]

    def slowing(self) -> list[Verdict]:
        """Return verdicts that make each step longer; a hang does not, it ends them."""
        return [verdict for verdict in self.confirmed() if verdict.cause != Cause.HANG and verdict.seconds_per_step > 0]

    def hung_ranks(self) -> list[int]:
        """Return the ranks that a confirmed verdict names as hung."""
        return sorted(
            {rank for verdict in self.confirmed() if verdict.cause == Cause.HANG for rank in verdict.subject.ranks}
        )

    def _save(self) -> None:
        self.version += 1
        self._trim()
        self._file.write(self.all())

    def _trim(self) -> None:
        for verdict in self.all()[MAX_VERDICTS:]:
            if verdict["state"] == VerdictState.CLEARED:
                del self._verdicts[verdict["id"]]
                self._live.pop(verdict["id"], None)
