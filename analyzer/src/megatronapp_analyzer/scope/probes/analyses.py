"""Analyses of the texts of runs: the model reads a text once more (docs/reading-a-model.md).

Results are stored with their run, and so in session files; a replay has those that were requested.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from megatronapp_analyzer.scope.probes.pending_requests import PendingRequests
from megatronapp_analyzer.scope.probes.probe_client import ProbeClient
from megatronapp_analyzer.scope.store.analysis_store import key_of
from megatronapp_analyzer.scope.store.perturbed_texts import perturbed_texts
from megatronapp_analyzer.scope.store.run import ScopeRun
from megatronapp_common.errors import FrameError
from megatronapp_common.frames import Frame, FrameType
from megatronapp_common.scope.protocol import unpack
from megatronapp_common.scope.protocol_requests import MAX_SCORED
from megatronapp_common.web.problems import HttpError

Request = Mapping[str, Any]
"""An analysis request in JSON, without the tokens of its text."""
TEXT_FIELDS = frozenset({"random", "seed"})
"""Fields of a request that say which text is analyzed; rank 0 receives its tokens instead."""


class AnalysisService:
    """Asks rank 0 for each analysis once."""

    def __init__(self, probe_client: ProbeClient) -> None:
        self._probe_client = probe_client
        self._pending = PendingRequests[Frame]()

    async def of(self, run: ScopeRun, sample: int, request: Request, ids: Sequence[int], wait_s: float) -> Frame | None:
        """Return the result of a request over a text, which is of a sample of the run; None if it takes over `wait_s`.

        Raises HttpError.
        """
        count = len(ids)
        if (known := run.analyses.get(sample, request, 0 if self._is_replay else count)) is not None:
            return known
        key = run.id, sample, key_of(request), count
        if key not in self._pending:
            self._check(count)
            self._pending.begin(key, self._request_analysis(run, sample, request, ids))
        return await self._pending.result(key, wait_s)

    @property
    def _is_replay(self) -> bool:
        return self._probe_client.client is None

    def _check(self, count: int) -> None:
        if self._is_replay:
            message = "this analysis was not requested while the session was recorded"
            raise HttpError(404, "not-recorded", message, "Take one that was; a replay has no model.")
        if count > MAX_SCORED:
            raise HttpError(413, "too-large", f"a text of {count} tokens is not analyzed", f"At most {MAX_SCORED} are.")
        self._pending.check_limit()

    async def _request_analysis(self, run: ScopeRun, sample: int, request: Request, ids: Sequence[int]) -> Frame:
        body: dict[str, Any] = {name: value for name, value in request.items() if name not in TEXT_FIELDS}
        body["ids"] = list(ids)
        if (texts := perturbed_texts(run, [sample])) is not None:
            body["perturbation"] = texts.model_dump(mode="json", exclude_none=True)
        answer = await self._probe_client.serving.analyze(body)
        try:
            unpack(answer)
        except FrameError as error:
            message = f"the model sent no analysis: {error}"
            raise HttpError(503, "model-failed", message, "See rank 0's log.") from error
        place = {"run": run.id, "sample": sample, "request": dict(request), "count": len(ids)}
        frame = Frame(FrameType.SCOPE_ANALYSIS, {**answer.header, **place}, answer.body)
        if self._probe_client.core.runs.holds(run):
            run.analyses.put(frame)
        return frame

    async def close(self) -> None:
        """Cancel all requests that are under way."""
        await self._pending.close()
