"""Surprise, entropy and candidates of a prompt's tokens: the model reads the prompt once more where a page asks.

Pages get them as frames SCOPE_OVERVIEW, as they get other numbers of prompts; so they are in session files, too.
"""

import dataclasses
from collections.abc import Iterator, Sequence

from megatronapp_analyzer.errors import ProtocolError
from megatronapp_analyzer.scope.parts.wire_models import StepHeader, read
from megatronapp_analyzer.scope.probes.pending_requests import PendingRequests
from megatronapp_analyzer.scope.probes.probe_client import ProbeClient
from megatronapp_analyzer.scope.store.perturbed_texts import perturbed_texts
from megatronapp_analyzer.scope.store.run import PromptScores, ScopeRun
from megatronapp_common.errors import FrameError
from megatronapp_common.frames import Frame, FrameType
from megatronapp_common.scope.protocol import Tensor, build_frame, unpack
from megatronapp_common.scope.protocol_requests import MAX_SCORED, ScoreRequest
from megatronapp_common.web.problems import HttpError

NAMES = ("top.id", "top.p", "top.logit", "partition", "surprise", "entropy")
ROWS = 128
"""Rows of a frame: with 100 candidates and their texts it is within the limit of a message."""


class ScoreService:
    """Asks rank 0 for each prompt once."""

    def __init__(self, probe_client: ProbeClient) -> None:
        self._probe_client = probe_client
        self._pending = PendingRequests[PromptScores]()

    async def of(self, run: ScopeRun, sample: int, wait_s: float) -> PromptScores | None:
        """Return the scores of a prompt; None if they have not arrived within `wait_s`. Raises HttpError."""
        if (known := run.scores.get(sample)) is not None:
            return known
        key = run.id, sample
        if key not in self._pending:
            self._pending.begin(key, self._request_scores(run, sample, self._request(run, sample)))
        return await self._pending.result(key, wait_s)

    def _request(self, run: ScopeRun, sample: int) -> ScoreRequest:
        ids, capture = run.prompt_ids(sample), run.header.get("capture") or {}
        if self._probe_client.client is None:
            words = "scores are asked of a model, and a replay has none"
            raise HttpError(
                404, "not-recorded", words, "OVERVIEW frames of the session hold those that were asked for."
            )
        if not 2 <= len(ids) <= MAX_SCORED:
            words = f"a prompt of {len(ids)} tokens has no scores"
            raise HttpError(404, "outside", words, f"One of 2 to {MAX_SCORED} tokens has.")
        self._pending.check_limit()
        return ScoreRequest(
            ids=tuple(ids),
            candidates=min(100, capture.get("candidates") or 20),
            perturbation=perturbed_texts(run, [sample]),
        )

    async def _request_scores(self, run: ScopeRun, sample: int, asked: ScoreRequest) -> PromptScores:
        frame = await self._probe_client.serving.scores(asked)
        try:
            said, tensors = read(StepHeader, "TOKENS", frame.header), checked(frame, len(asked.ids) - 1)
        except (ProtocolError, FrameError) as error:
            raise HttpError(503, "model-failed", f"the model sent no scores: {error}", "See rank 0's log.") from error
        found = scores_of(tensors)
        if self._probe_client.core.runs.holds(run):
            for part in overviews(run.id, sample, tensors, said.top_texts):
                self._probe_client.core.feed.publish_frame(run, part)
            run.scores[sample] = found
        return found

    async def close(self) -> None:
        """Cancel all requests that are under way."""
        await self._pending.close()


def checked(frame: Frame, rows: int) -> list[Tensor]:
    """Return the tensors that pages know, with one row for each token but the first. Raises FrameError."""
    found = {tensor.name: tensor for tensor in unpack(frame)}
    if not set(NAMES) <= set(found) or any(len(found[name].data) != rows for name in NAMES):
        raise FrameError(f"{len(frame.header.get('rows', []))} rows of {', '.join(found)}, not {rows} of all scores")
    return [found[name] for name in NAMES]


def overviews(
    run: str, sample: int, tensors: Sequence[Tensor], texts: Sequence[Sequence[str]] | None
) -> Iterator[Frame]:
    """Frames that hold some rows each. They have no stride: that of the other numbers holds."""
    for first in range(0, len(tensors[0].data), ROWS):
        part = [dataclasses.replace(tensor, data=tensor.data[first : first + ROWS]) for tensor in tensors]
        header = {"run": run, "sample": sample, "positions": list(range(first, first + len(part[0].data)))}
        if texts is not None:
            header["topTexts"] = [list(row) for row in texts[first : first + ROWS]]
        yield build_frame(FrameType.SCOPE_OVERVIEW, header, part)


def scores_of(tensors: Sequence[Tensor]) -> PromptScores:
    """The columns that are kept as long as the run; the candidates, many times as large, are held by the ring."""
    found = {tensor.name: tensor.data for tensor in tensors}
    return PromptScores(surprise=found["surprise"].copy(), entropy=found["entropy"].copy())
