"""Scores of a prompt's tokens: rank 0 is asked once, and all pages and session files get them."""

from typing import Any

import numpy as np
import pytest
import scope_rank_zero
from scope_pages import RUN, RUNS, fetched, receive, recording, shown, viewer

from megatronapp_analyzer.scope.probes import scores
from megatronapp_common import frames
from megatronapp_common.frames import FrameType
from megatronapp_common.scope.protocol import unpack

pytestmark = pytest.mark.asyncio


async def test_tokens_of_a_prompt_are_scored_once_and_shown_to_all_pages(
    hub: Any, fake_job: Any, until: Any, rank_zero: scope_rank_zero.RankZero, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scores, "ROWS", 3)
    async with shown(hub, fake_job, until, rank_zero) as client, viewer(hub) as page:
        await receive(page)
        prompt = recording().prompts[1]
        scored = (await fetched(client, f"{RUNS}/{RUN}/scores?sample=1")).json()
        logits = recording().sites[1]["logits"][: len(prompt) - 1].astype(np.float64)
        logs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
        surprise = -logs[np.arange(len(prompt) - 1), prompt[1:]]
        assert scored["positions"] == list(range(1, len(prompt)))
        assert scored["surprise"] == pytest.approx(surprise, abs=1e-5)
        assert scored["entropy"] == pytest.approx(-(np.exp(logs) * logs).sum(-1), abs=1e-5)
        assert (await client.get(f"{RUNS}/{RUN}/scores?sample=1")).json() == scored
        assert [path for _, path, _ in rank_zero.requests].count("scores") == 1
        await check_overviews(page, surprise)
        session = (await client.get(f"{RUNS}/{RUN}/session")).raise_for_status().content
        score_frames = [frame for frame in frames.split(session) if "topTexts" in frame.header]
        assert sum(frame.type == FrameType.SCOPE_OVERVIEW for frame in score_frames) == -(-len(surprise) // 3)
        assert (await client.get(f"{RUNS}/{RUN}/scores?sample=2")).json()["code"] == "outside"


async def check_overviews(page: Any, surprise: np.ndarray) -> None:
    """Frames of three rows each bring all of them, without a stride."""
    found: dict[int, float] = {}
    while len(found) < len(surprise):
        frame = await receive(page)
        if frame.type == FrameType.SCOPE_OVERVIEW:
            tensors = {tensor.name: tensor.data for tensor in unpack(frame)}
            assert "stride" not in frame.header and len(tensors["top.id"]) == len(frame.header["topTexts"]) <= 3
            found |= zip(frame.header["positions"], tensors["surprise"].tolist(), strict=True)
    assert [found[place] for place in sorted(found)] == pytest.approx(surprise, abs=1e-5)


async def test_a_refusal_of_scores_is_returned_and_the_request_repeated(
    hub: Any, fake_job: Any, until: Any, rank_zero: scope_rank_zero.RankZero
) -> None:
    async with shown(hub, fake_job, until, rank_zero) as client:
        rank_zero.refuse = (503, {"code": "restarting", "message": "gone for a while", "hint": ""})
        answer = await fetched(client, f"{RUNS}/{RUN}/scores")
        assert (answer.status_code, answer.json()["message"]) == (503, "gone for a while")
        rank_zero.refuse = None
        assert (
            len((await fetched(client, f"{RUNS}/{RUN}/scores")).json()["surprise"]) == len(recording().prompts[0]) - 1
        )
