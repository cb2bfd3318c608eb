"""The Python client against a real hub: numbers as arrays, errors with their codes, sessions without a hub."""

import asyncio
import contextlib
import importlib.util
import io
import pathlib
from typing import Any

import numpy as np
import pytest
import scope_analysis
import scope_rank_zero
from scope_pages import RUN, recording, shown

from megatronapp.scope import BranchSummary, ScopeError, ScopeHub, connect, open_session
from megatronapp_common.web.tokens import TokenRole, derive_token

pytestmark = pytest.mark.asyncio
EXAMPLE = pathlib.Path(__file__).parents[3] / "examples" / "scope_client.py"


async def test_numbers_of_a_run_are_arrays_and_stay_in_its_session(
    hub: Any, fake_job: Any, until: Any, rank_zero: scope_rank_zero.RankZero, tmp_path: pathlib.Path
) -> None:
    token = derive_token(hub.secret, TokenRole.CONTROLLER)
    async with shown(hub, fake_job, until, rank_zero):
        await asyncio.to_thread(read_run, hub.url, token, tmp_path / "one.scope")
        printed = await asyncio.to_thread(run_example, hub.url, token)
    assert "layer 3 predicts" in printed
    assert "to the token before" in printed


def read_run(url: str, token: str, file: pathlib.Path) -> None:
    with connect(url, token) as scope:
        check_numbers(scope)
        run = scope.run(RUN)
        session = open_session(run.save_session(file))
        assert session.texts == run.texts
        assert session.ids(1) == run.ids(1)
        exact = recording().sites[1]["attention"][2, 3]
        np.testing.assert_array_equal(session.attention(2, 3, sample=1), exact)
        with pytest.raises(ScopeError, match="was not recorded"):
            session.values("mlp_in", layer=0)
        with pytest.raises(ScopeError, match="there is no layer 9") as outside:
            run.attention(9, 0)
        assert (outside.value.code, outside.value.status) == ("outside", 404)
    with pytest.raises(ScopeError) as refused:
        connect(url, "0" * 64)
    assert refused.value.status == 401


def check_numbers(scope: ScopeHub) -> None:
    assert scope.model["layers"] == recording().shape.layers
    run = scope.generate("any", tokens=4, wait=False).wait()
    assert run.id == RUN
    assert [known.id for known in scope.runs()] == [RUN]
    sites = recording().sites[1]
    np.testing.assert_array_equal(run.attention(2, 3, sample=1), sites["attention"][2, 3])
    np.testing.assert_array_equal(run.values("q", layer=1, head=2, sample=1, position=4), sites["q"][4:5, 1, 2])
    lens = run.lens(positions=(2, 6), layers=(1, 3), top=3, token=4, sample=1)
    logs = scope_analysis.lens_logs(recording(), 1)[2:7, 1:4].transpose(1, 0, 2)
    assert lens.ids[..., 0].tolist() == logs.argmax(-1).tolist()
    assert lens.token_rank is not None
    assert lens.token_rank.tolist() == (logs > logs[..., 4:5]).sum(-1).tolist()
    assert len(lens.top_texts) == 3
    found = run.attribution(position=3, sample=1)
    assert found.logit == pytest.approx(float(sites["logits"][3, found.token]), rel=1e-5)
    assert found.heads.shape == (4, 4)
    assert run.head_scores(sample=1)["first"][3, 2] == pytest.approx(0.321)
    assert len(run.surprise(1)) == len(recording().prompts[1]) - 1
    assert [len(candidates) for candidates in run.candidates(1)] == [10] * 4


def run_example(url: str, token: str) -> str:
    spec = importlib.util.spec_from_file_location("scope_client", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        module.main(url, token)
    return printed.getvalue()


async def test_comparisons_and_sweeps_are_listed_and_cancelled(
    hub: Any, fake_job: Any, until: Any, rank_zero: scope_rank_zero.RankZero
) -> None:
    token = derive_token(hub.secret, TokenRole.CONTROLLER)
    async with shown(hub, fake_job, until, rank_zero):
        await asyncio.to_thread(cancel_branches, hub.url, token, rank_zero)


def cancel_branches(url: str, token: str, rank_zero: scope_rank_zero.RankZero) -> None:
    noise = {"kind": "calculation", "site": "mlp2", "action": {"type": "gaussian", "coefficient": 1}}
    with connect(url, token) as scope:
        rank_zero.branches_state = "running"
        comparison = scope.compare("a", {"perturbations": [noise]}, tokens=1, wait=False)
        assert (comparison.state, comparison.kl.tolist()) == ("running", [0.25])
        assert scope.comparisons() == [BranchSummary(id=comparison.id, state="running", prompt="a", done=1, total=1)]
        with pytest.raises(TimeoutError, match=comparison.id):
            scope.compare("a", {"perturbations": [noise]}, tokens=1, timeout_s=0)
        assert scope.cancel_comparison(comparison.id).state == "cancelled"
        assert ("DELETE", f"comparisons/{comparison.id}", None) in rank_zero.requests
        rank_zero.branches_state = "running"
        sweep = scope.sweep("a", noise, [0], strengths=[0.5], wait=False)
        assert [entry.state for entry in scope.sweeps()] == ["running"]
        cancelled = scope.cancel_sweep(sweep.id)
        assert (cancelled.state, cancelled.values.tolist()) == ("cancelled", [[0.25]])
        assert ("DELETE", f"sweeps/{sweep.id}", None) in rank_zero.requests
        with pytest.raises(ScopeError) as unknown:
            scope.read_sweep("0" * 12)
        assert unknown.value.status == 404


async def test_other_distributions_can_add_packages_below_megatronapp() -> None:
    import megatronapp

    assert megatronapp.__file__ is None
