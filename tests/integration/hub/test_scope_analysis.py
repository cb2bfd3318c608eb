"""Analyses of a run's texts: asked of rank 0 once, bounded, exported, and stored in session files."""

from typing import Any

import numpy as np
import pytest
import scope_analysis
import scope_rank_zero
from scope_pages import RUN, RUNS, fetched, recording, shown

from megatronapp_analyzer.scope import routes_analysis
from megatronapp_analyzer.scope.core import ScopeCore
from megatronapp_analyzer.scope.delivery import session_file
from megatronapp_analyzer.scope.session_player import SessionPlayer, settings_of

pytestmark = pytest.mark.asyncio
LENS = f"{RUNS}/{RUN}/lens"


async def test_a_lens_is_computed_once_and_stored_in_the_session(
    hub: Any, fake_job: Any, until: Any, rank_zero: scope_rank_zero.RankZero
) -> None:
    async with shown(hub, fake_job, until, rank_zero) as client:
        query = f"{LENS}?sample=1&positions=2-6&layers=1-3&top=3&token=4"
        lens = (await fetched(client, query)).json()
        logs = scope_analysis.lens_logs(recording(), 1)[2:7, 1:4].transpose(1, 0, 2)
        best = np.argsort(-logs, axis=-1, kind="stable")[..., :3]
        assert (lens["layers"], lens["positions"]) == ([1, 2, 3], [2, 3, 4, 5, 6])
        assert lens["ids"] == best.tolist()
        found = np.array(lens["logprobs"])
        np.testing.assert_allclose(found, np.take_along_axis(logs, best, -1), rtol=1e-4, atol=1e-4)
        assert lens["tokenRank"] == (logs > logs[..., 4:5]).sum(-1).tolist()
        following = recording().prompts[1][3:8]
        mine = np.stack([logs[:, row, token] for row, token in enumerate(following)], -1)
        np.testing.assert_allclose(np.array(lens["targetLogprob"]), mine, rtol=1e-4, atol=1e-4)
        assert (await client.get(query)).json() == lens
        assert [path for _, path, _ in rank_zero.requests].count("analyses") == 1
        table = (await client.get(f"{query}&format=csv")).text.splitlines()
        assert len(table) == 1 + 3 * 5
        assert table[1].split(",")[:2] == ["1", "2"]
        session = session_file.parse((await client.get(f"{RUNS}/{RUN}/session")).raise_for_status().content)
        core = ScopeCore(settings_of(session))
        list(SessionPlayer(session, core).steps())
        body = {"kind": "lens", "rows": [2, 7], "layers": [1, 2, 3], "top": 3, "token": 4}
        replayed = core.runs[RUN].analyses.get(1, body, 0)
        assert replayed is not None
        assert replayed.header["tokens"] == lens["tokens"]


async def test_a_logit_is_the_sum_of_its_contributions_and_heads_have_scores(
    hub: Any, fake_job: Any, until: Any, rank_zero: scope_rank_zero.RankZero
) -> None:
    async with shown(hub, fake_job, until, rank_zero) as client:
        base = f"{RUNS}/{RUN}"
        found = (await fetched(client, f"{base}/attribution?sample=1&position=3&neurons=2")).json()
        logit = float(recording().sites[1]["logits"][3, recording().prompts[1][4]])
        assert (found["token"], found["position"]) == (recording().prompts[1][4], 3)
        assert found["logit"] == pytest.approx(logit, rel=1e-5)
        layers = np.sum([np.sum(found[name]) for name in ("heads", "attentionBias", "mlp", "mlpBias")])
        assert found["embedding"] + layers + found["constant"] == pytest.approx(logit, abs=1e-2)
        assert found["neurons"][3][1] == {"index": 1, "activation": 1, "contribution": -1}
        lines = (await fetched(client, f"{base}/attribution?sample=1&position=3&neurons=2&format=csv")).text.split()
        assert lines[0] == "component,layer,index,contribution,activation"
        assert lines[-1] == "neuron,3,1,-1,1"
        scores = (await fetched(client, f"{base}/heads?sample=1")).json()
        assert scores["scores"] == ["previous", "first", "duplicate", "induction"]
        assert scores["values"][3][2][1] == pytest.approx(0.213)
        assert scores["tokens"] == len(recording().prompts[1]) + len(recording().generated[1]) - 1
        drawn = (await fetched(client, f"{base}/heads?random=9&seed=4")).json()
        assert drawn["tokens"] == 18
        ids = [body["ids"] for _, path, body in rank_zero.requests if path == "analyses"][-1]
        assert ids[:9] == ids[9:] == routes_analysis.random_text(96, 9, 4)[:9]
        assert max(ids) < recording().shape.vocabulary
        table = (await fetched(client, f"{base}/heads?sample=1&format=csv")).text.splitlines()
        assert table[0] == "layer,head,previous,first,duplicate,induction"
        outside = await client.get(f"{base}/attribution?position=900")
        assert (outside.status_code, outside.json()["code"]) == (404, "outside")
        hub.hub.scope.core.runs[RUN].header["perturbation"] = {"recipe": {}}
        refused = await client.get(f"{base}/heads")
        assert (refused.status_code, refused.json()["code"]) == (409, "perturbed")


async def test_what_a_lens_cannot_show_is_refused_with_its_place(
    hub: Any, fake_job: Any, until: Any, rank_zero: scope_rank_zero.RankZero
) -> None:
    async with shown(hub, fake_job, until, rank_zero) as client:
        for query, status, code in (
            ("positions=0-900", 404, "outside"),
            ("layers=4", 404, "outside"),
            ("positions=3-2", 422, "invalid-request"),
            ("positions=x", 422, "invalid-request"),
            ("top=51", 422, "invalid-request"),
            ("sample=7", 404, "outside"),
        ):
            answer = await client.get(f"{LENS}?{query}")
            assert (answer.status_code, answer.json()["code"]) == (status, code), query
        probe_client = hub.hub.scope.probe_client
        serving, probe_client.client = probe_client.client, None
        answer = await client.get(f"{LENS}?sample=0")
        probe_client.client = serving
        assert (answer.status_code, answer.json()["code"]) == (404, "not-recorded")
