"""Result of the search for a reason, and the words for numbers in its evidence."""

import dataclasses
import math

from megatronapp_analyzer.model import Reason, Verdict


@dataclasses.dataclass(frozen=True, slots=True)
class Explanation:
    """Reason of a verdict, None where the counters show none, and the evidence in plain lines."""

    reason: Reason | None = None
    lines: tuple[str, ...] = ()

    def added_to(self, verdict: Verdict) -> Verdict:
        """Return the verdict with this reason, or with its own if this is unknown, and with these lines of evidence."""
        return dataclasses.replace(
            verdict,
            reason=self.reason or verdict.reason,
            evidence_text=(*verdict.evidence_text, *self.lines),
        )


def others_text(count: int, what: str) -> str:
    """Name the peers, such as `the other 7 devices`."""
    return f"the other {what}" if count == 1 else f"the other {count} {what}s"


def is_known(*values: float) -> bool:
    """Return true if no value is NaN."""
    return not any(map(math.isnan, values))
