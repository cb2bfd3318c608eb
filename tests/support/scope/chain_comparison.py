"""Comparisons through the whole chain: page's requests, hub, rank 0 and all ranks."""

import asyncio
from collections.abc import Mapping
from typing import Any

import numpy as np

from megatronapp.scope import connect
from megatronapp_analyzer.scope.probes.branch_store import BranchStore
from megatronapp_common.web.tokens import TokenRole, derive_token

NOTHING = {"perturbations": [{"kind": "calculation", "site": "mlp2", "action": {"type": "gaussian", "coefficient": 0}}]}
ABLATED = {"perturbations": [{"kind": "calculation", "site": "mlp2", "action": {"type": "zero"}, "layers": [1]}]}
COMPARISONS = "/api/v1/scope/comparisons"
DEADLINE_S = 120
SWEEPS = "/api/v1/scope/sweeps"
TOKENS = 5


async def ended(page: Any, path: str) -> dict[str, Any]:
    """Ask until a comparison or a sweep has ended."""
    async with asyncio.timeout(DEADLINE_S):
        while (found := (await page.get(path)).json())["state"] in {"queued", "running"}:
            await asyncio.sleep(0.05)
    assert found["state"] == "done", found
    return dict(found)


async def check_comparison(page: Any) -> None:
    """Check that coefficient 0 changes nothing, what an ablation changes, and what is refused."""
    body = {"prompt": "def f(", "tokens": TOKENS, "sampling": {"temperature": 0}}
    found = {}
    for name, recipe in (("nothing", NOTHING), ("ablated", ABLATED)):
        answer = await page.post(COMPARISONS, body | {"perturbation": recipe})
        assert answer.status_code == 201, answer.text
        found[name] = await ended(page, f"{COMPARISONS}/{answer.json()['comparison']}?heads=true")
    nothing, ablated = found["nothing"], found["ablated"]
    assert [(row["kl"], row["rank"], row["overlap"]) for row in nothing["rows"]] == [(0, 0, 10)] * TOKENS
    assert {value for layer in nothing["drift"] for value in layer} == {0}
    assert nothing["firstDivergence"] is None
    assert all(row["kl"] > 0 for row in ablated["rows"])
    assert {value for value in ablated["drift"][0]} == {0}
    assert all(value > 0 for value in ablated["drift"][1])
    assert {value for head in ablated["heads"][1] for value in head} == {0}  # heads of layer 1 read what A's read
    listed = (await page.get(COMPARISONS)).json()
    assert [known["comparison"] for known in listed] == [ablated["comparison"], nothing["comparison"]]
    scope = page.hub.hub.scope
    scope.comparisons = BranchStore("comparisons", scope.probe_client)  # as after a restart of the hub
    assert (await page.get(COMPARISONS)).json() == listed
    table = (await page.get(f"{COMPARISONS}/{ablated['comparison']}?format=csv")).text.splitlines()
    assert len(table) == 1 + TOKENS
    wrong = {"perturbations": [{**ABLATED["perturbations"][0], "layers": [99]}]}
    answer = await page.post(COMPARISONS, body | {"perturbation": wrong})
    assert answer.status_code == 422 and "perturbations.0.layers.0: there is no layer 99" in answer.text


async def check_sweep(page: Any) -> None:
    """Check the cells of a sweep against single comparisons, and that one can be cancelled."""
    body = {"prompt": "def f(", "tokens": 3, "sampling": {"temperature": 0}}
    noise = {"kind": "calculation", "site": "mlp2", "action": {"type": "gaussian", "coefficient": 1}}
    sweep = body | {"template": noise, "axes": {"layers": [0, 1], "strengths": [0, 0.5]}}
    answer = await page.post(SWEEPS, sweep)
    assert answer.status_code == 201, answer.text
    found = await ended(page, f"{SWEEPS}/{answer.json()['sweep']}")
    assert [line[0] for line in found["values"]] == [0, 0]
    assert (found["done"], found["cells"], len(found["ids"])) == (4, 4, 3)
    recipe = {"perturbations": [noise | {"layers": [1], "action": {"type": "gaussian", "coefficient": 0.5}}]}
    single = (await page.post(COMPARISONS, body | {"perturbation": recipe})).json()["comparison"]
    rows = (await ended(page, f"{COMPARISONS}/{single}"))["rows"]
    assert abs(found["values"][1][1] - sum(row["kl"] for row in rows) / 3) < 1e-6
    assert (await page.get(f"{SWEEPS}/{found['sweep']}?format=csv")).text.splitlines()[
        0
    ] == "layer,strength_0.0,strength_0.5"
    short = {"kind": "calculation", "site": "mlp2", "action": {"type": "patch", "source": {"tokens": [1]}}}
    answer = await page.post(SWEEPS, body | {"template": short, "axes": {"layers": [0], "positions": [0, 1]}})
    assert answer.status_code == 422 and "token 1 of the prompt" in answer.text
    answer = await page.post(SWEEPS, sweep | {"axes": {"layers": [0, 1], "strengths": [0.1] * 256}})
    name = answer.json()["sweep"]
    await page.delete(f"{SWEEPS}/{name}")
    async with asyncio.timeout(DEADLINE_S):
        while (state := (await page.get(f"{SWEEPS}/{name}")).json()["state"]) != "cancelled":
            assert state in {"queued", "running"}
            await asyncio.sleep(0.05)


async def check_client(page: Any) -> None:
    """Check the Python client: patches from the prompt itself and from another one, and tracing over positions."""
    token = derive_token(page.hub.secret, TokenRole.CONTROLLER)
    await asyncio.to_thread(_use_client, page.hub.url, token)


def _use_client(url: str, token: str) -> None:
    def patch(prompt: str, **fields: Any) -> dict[str, Any]:
        return {
            "kind": "calculation",
            "site": "residual",
            "action": {"type": "patch", "source": {"prompt": prompt}},
            **fields,
        }

    prompt, other = "def f(", "def g("
    seen: list[Mapping[str, Any]] = []
    with connect(url, token) as scope:
        same = scope.compare(prompt, {"perturbations": [patch(prompt)]}, tokens=3)
        assert float(same.kl.max()) < 1e-6 and float(same.drift.max()) < 1e-5
        found = scope.compare(prompt, {"perturbations": [patch(other, layers=[0])]}, tokens=3, mode="free", heads=False)
        end = found.first_divergence
        assert found.heads is None and float(found.drift[0, 0]) >= 0
        assert not np.isnan(found.kl[: None if end is None else end + 1]).any()
        traced = scope.sweep(
            prompt, patch(other), [0, 1], positions=[0, 1], tokens=2, metric="logprobChange", progress=seen.append
        )
        assert traced.values.shape == (2, 2) and not np.isnan(traced.values).any()
        assert abs(float(traced.values[1, 0])) < 1e-5  # both prompts begin alike
        assert len(traced.ids) == 2 and traced.positions == [0, 1]
