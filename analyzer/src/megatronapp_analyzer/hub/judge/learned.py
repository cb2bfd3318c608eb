"""Verdicts of a fresh detector that catches up, and the older verdicts about the same faults.

A fault may be older than the steps that the hub still has. A fresh detector dates it later then, and so gives it
another id; its verdict continues the older one.
"""

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import Any

from megatronapp_analyzer.hub.ingest.store import StepKey
from megatronapp_analyzer.model import LINK_CAUSES, Cause, JobMoment, SubjectType, Verdict


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class OlderVerdict:
    """Part of an older verdict that a verdict about the same fault takes over."""

    id: str
    since: JobMoment
    lost_s: float
    """Seconds lost in steps that the fresh detector has not judged."""

    def continued_by(self, verdict: Verdict) -> Verdict:
        """Return the verdict of the fresh detector as a continuation of this one."""
        begin = re.compile(rf"\b(since|from) step {verdict.since.step}\b")
        return dataclasses.replace(
            verdict,
            id=self.id,
            since=self.since,
            seconds_lost=max(verdict.seconds_lost + self.lost_s, 0.0),
            sentence=begin.sub(rf"\1 step {self.since.step}", verdict.sentence),
        )


class LearnedVerdicts:
    """Newest verdicts of a detector that catches up, which are those of the past until it has."""

    def __init__(self) -> None:
        self.newest: dict[str, Verdict] = {}
        self._lost_s: dict[str, list[tuple[StepKey, float]]] = {}
        """Seconds lost by the verdict after each step at which it was reported."""

    def add(self, key: StepKey, verdicts: Iterable[Verdict]) -> None:
        """Add the verdicts on a step."""
        for verdict in verdicts:
            self.newest[verdict.id] = verdict
            self._lost_s.setdefault(verdict.id, []).append((key, verdict.seconds_lost))

    def clear(self) -> None:
        """Forget all of them."""
        self.newest.clear()
        self._lost_s.clear()

    def lost_until_s(self, id_: str, last: StepKey) -> float:
        """Return the seconds that a verdict had lost after the step `last`."""
        return next((lost_s for key, lost_s in reversed(self._lost_s[id_]) if key <= last), 0.0)

    def match(self, stale: Iterable[Mapping[str, Any]]) -> dict[str, OlderVerdict]:
        """Return which of the stale verdicts, in the form of the contract, are continued, by the id of the new one.

        Why the passes of a subject are long is seen in parts of them, of which the steps in memory may show others than
        those before: such causes may change, where no verdict has the same one.
        """
        older = [document for document in stale if document["id"] not in self.newest]
        found = {}
        new = sorted(self.newest.values(), key=lambda verdict: (verdict.since.attempt, verdict.since.step))
        for fault_of in (_fault_of, _slowness_of):
            for verdict in new:
                fault = fault_of(verdict.to_json())
                document = next((each for each in older if fault is not None and fault_of(each) == fault), None)
                if verdict.id in found or document is None or document["since"]["step"] >= verdict.since.step:
                    continue
                older.remove(document)
                found[verdict.id] = self._continue(document, verdict)
        return found

    def _continue(self, document: Mapping[str, Any], verdict: Verdict) -> OlderVerdict:
        since = JobMoment(**document["since"])
        last = (since.attempt, max([since.step, *document["evidence"]["steps"]]))
        lost_s = document["effect"]["secondsLost"] - self.lost_until_s(verdict.id, last)
        return OlderVerdict(id=document["id"], since=since, lost_s=lost_s)


def _fault_of(document: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return subject, cause and attempt; a detector ends its verdicts with the attempt."""
    subject = document["subject"]
    return subject["type"], tuple(subject["ranks"]), document["cause"], document["since"]["attempt"]


def _slowness_of(document: Mapping[str, Any]) -> tuple[Any, ...] | None:
    """Return the ranks and attempt of a verdict about long passes, whichever their cause; None for all others.

    Slow links make passes long where they are between the ranks of a group that meets inside them.
    """
    cause, subject = document["cause"], document["subject"]
    between = cause in LINK_CAUSES and subject["type"] == SubjectType.GROUP
    if cause not in (Cause.COMPUTE, Cause.MEMORY) and not between:
        return None
    return tuple(subject["ranks"]), document["since"]["attempt"]
