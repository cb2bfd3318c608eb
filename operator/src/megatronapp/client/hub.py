"""The hub of a running job."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import httpx

from megatronapp.client import frames
from megatronapp_common.text.terminal import replace_control_characters
from megatronapp_operator.cli.inject import problem_of
from megatronapp_operator.errors import HubError

if TYPE_CHECKING:
    import pandas as pd

Send = Callable[[str, Mapping[str, str]], httpx.Response]
"""Sends a GET with a path below `/api/v1/` and query parameters. Raises HubError without an answer."""
STEP_COLUMNS = {
    "attempt": "attempt",
    "step": "step",
    "startNs": "start_ns",
    "durationNs": "duration_ns",
    "complete": "complete",
}


class Hub:
    """Reader of a job's hub. Every method raises HubError if the hub refuses or does not answer."""

    def __init__(self, send: Send, *, address: str, token: str) -> None:
        self._send = send
        self.address = address
        """Address of the hub's API, also for `megatronapp.scope.connect`."""
        self.token = token
        """Bearer token for that address; treat it as a password."""

    def get(self, path: str, **query: object) -> Any:  # noqa: ANN401 - the answer of any route
        """Return the JSON document of a route below `/api/v1/` (docs/contracts.md); parameters of None are omitted.

        A parameter whose name is a keyword of Python is written with an underscore at its end: `from_=10`.
        """
        given = {name.rstrip("_"): _text(value) for name, value in query.items() if value is not None}
        answer = self._send(path.lstrip("/"), given)
        if not answer.is_success:
            raise HubError(replace_control_characters(problem_of(answer)))
        try:
            return answer.json()
        except (ValueError, RecursionError) as error:
            raise HubError(f"{path}: the answer is not JSON; is {self.address} a hub?") from error

    def verdicts(self) -> list[dict[str, Any]]:
        """Return all verdicts about slow ranks, links and hosts, newest first, with evidence, cost and state."""
        found: list[dict[str, Any]] = self.get("verdicts")
        return found

    def timeline(self, step: int | None = None, *, attempt: int | None = None) -> "pd.DataFrame":
        """Return the spans of one step over all ranks, of the newest finished step by default.

        Columns: attempt, step, rank, kind, chunk, microbatch, start_ns (since 1970), duration_ns, flags, run_queue_ns,
        bytes, peer. Values that a span does not have are <NA>. Of a step that is too large for an answer, later ranks
        are missing: `attrs["omitted"]` of the frame, and a UserWarning, then say so.
        """
        return frames.timeline_frame(self.get("timeline", step=step, attempt=attempt))

    def steps(self, first: int | None = None, last: int | None = None) -> "pd.DataFrame":
        """Return finished steps, oldest first. Columns: attempt, step, start_ns, duration_ns, complete.

        The hub has at most 20,000 of them: the newest 10,000 all, and of older ones the fewer the older they are.
        """
        return frames.rows_frame(self.get("steps", from_=first, to=last), STEP_COLUMNS)

    def history(self) -> "pd.DataFrame":
        """Return the hours whose spans are stored, oldest first, of which `timeline` reads any step.

        Columns: hour (UTC), attempt, first_step, last_step (<NA> where no step ended), records, bytes.
        """
        return frames.history_frame(self.get("history"))

    def series(self, name: str, first: int | None = None, last: int | None = None) -> "pd.DataFrame":
        """Return a curve, such as `loss` or `tokensPerSecond`. Columns: attempt, step, value.

        The hub has at most 50,000 points of it: the newest 25,000 all, and of older ones the fewer the older they are.
        """
        return frames.series_frame(self.get("metrics/series", name=name, from_=first, to=last))


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
