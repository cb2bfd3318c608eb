"""Control of a running training at the hub: the lease, orders, and what the ranks report of them."""

import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from shared_tls import SHARED_TLS

from megatronapp_analyzer.hub.settings import ControlSettings
from megatronapp_analyzer.hub.state.lease import LEASE_S, ControlLease
from megatronapp_analyzer.hub.state.progress import ControlProgress
from megatronapp_analyzer.hub.state.training_orders import TrainingOrders
from megatronapp_common.control.orders import Order, OrderKind
from megatronapp_common.frames import FrameType
from megatronapp_common.web.problems import HttpError
from megatronapp_common.web.tokens import TokenRole, derive_token

CONTROL = ControlSettings(gpus=16, resume_after_s=600.0)


@pytest.fixture
def steered(tmp_path: Path, serve: Any) -> Iterator[Any]:
    with serve(tmp_path / "state", control=CONTROL) as running:
        yield running


@pytest_asyncio.fixture
async def controller(steered: Any) -> AsyncIterator[httpx.AsyncClient]:
    headers = {"Authorization": f"Bearer {derive_token(steered.secret, TokenRole.CONTROLLER)}"}
    async with httpx.AsyncClient(
        base_url=f"{steered.url}/api/v1", headers=headers, timeout=180, verify=SHARED_TLS
    ) as client:
        yield client


def progress(state: str, step: int, *decided: tuple[int, int], attempt: int = 0, **control: Any) -> dict[str, Any]:
    """Progress document of ranks in a state; `decided`: numbers of orders with the steps from which they hold."""
    orders = [{"number": number, "step": at, "refusal": None} for number, at in decided]
    fields = {"state": state, "stepsLeft": 0, "pausedSince": None, "pausedSeconds": 0.0, "saves": False}
    page_state = "paused" if state == "paused" else "training"
    return {
        "attempt": attempt,
        "iteration": step,
        "totalIterations": 100,
        "state": page_state,
        "control": fields | {"orders": orders} | control,
    }


async def lease_of(controller: httpx.AsyncClient, **request: Any) -> str:
    answer = await controller.post("/training/lease", json={"action": "take", "client": "page"} | request)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["key"])


async def refused(client: httpx.AsyncClient, path: str, document: dict[str, Any], code: str) -> dict[str, Any]:
    answer = await client.post(path, json=document)
    assert (answer.status_code, answer.json()["code"]) == (409, code), answer.text
    found: dict[str, Any] = answer.json()
    return found


async def ordered(agent: Any) -> dict[str, Any]:
    """The next control document with orders that an agent is sent."""
    while True:
        frame = await agent.receive()
        if frame.type == FrameType.COMMAND and frame.header["training"]["orders"]:
            return dict(frame.header["training"])


@pytest.mark.asyncio
async def test_an_order_reaches_the_ranks_and_their_decision_is_shown(
    steered: Any, controller: httpx.AsyncClient, fake_job: Any, until: Any
) -> None:
    job = fake_job(data=1)

    async def state() -> dict[str, Any]:
        found: dict[str, Any] = (await controller.get("/training")).json()
        return found

    async def reaches(name: str) -> None:
        async def there() -> bool:
            return bool((await state())["state"] == name)

        await until(there)

    async with steered.agent(job, 0) as agent:
        await agent.hello()
        await agent.rings()
        key = await lease_of(controller)
        await refused(controller, "/training/orders", {"lease": key, "kind": "pause"}, "not-training")
        await agent.status(progress=progress("running", 7))
        await reaches("running")
        assert (
            "pause it first"
            in (
                await refused(
                    controller, "/training/orders", {"lease": key, "kind": "step", "steps": 2}, "order-refused"
                )
            )["hint"].lower()
        )
        await refused(controller, "/training/orders", {"lease": key, "kind": "stop"}, "nothing-saved")
        pause = {"lease": key, "kind": "pause", "id": "first"}
        given = (await controller.post("/training/orders", json=pause)).raise_for_status().json()
        assert (given["id"], given["fromStep"]) == ("first", None)
        assert (await controller.post("/training/orders", json=pause)).json() == given, "given once"
        page = await ordered(agent)
        assert page["orders"] == [{"number": 1, "kind": "pause"}]
        assert page["attempt"] == 0 and page["renewals"] >= 1
        assert (await state())["state"] == "pausing"
        since = "2026-01-01T00:00:00+00:00"
        await agent.status(progress=progress("paused", 9, (1, 9), pausedSince=since, resumeAfterSeconds=60.0))
        await reaches("paused")
        found = await state()
        assert [order["fromStep"] for order in found["orders"]] == [9]
        assert (found["gpus"], found["resumeAfterSeconds"], found["step"]) == (16, 60.0, 9), "of the ranks"
        assert (await steered.get("/api/v1/job"))["training"]["lease"]["client"] == "page"
        actions = [action["what"] for action in (await steered.get("/api/v1/summary"))["actions"]]
        assert actions == ["ordered the training to pause", "paused the training after 9 steps"]
        resume = (await controller.post("/training/orders", json={"lease": key, "kind": "resume"})).json()
        assert (await ordered(agent))["orders"] == [{"number": 2, "kind": "resume"}]
        await agent.status(progress=progress("paused", 9, (1, 9)), closed=True)
        await reaches("starting")  # the ranks may come again: the job has not ended
        await refused(controller, "/training/orders", {"lease": key, "kind": "resume"}, "not-training")
    async with steered.agent(fake_job(data=1, attempt=1), 0) as agent:
        await agent.hello()
        await agent.rings()
        await agent.status(progress=progress("paused", 0, attempt=1))
        await reaches("paused")
        (void,) = [order for order in (await state())["orders"] if order["id"] == resume["id"]]
        assert "restarted" in void["refusal"], "an order is not given to the next life of the gang"


@pytest.mark.asyncio
async def test_an_incomplete_capture_is_shown_after_the_end_without_tracing(
    steered: Any, fake_job: Any, until: Any
) -> None:
    async with steered.agent(fake_job(data=1), 0) as agent:
        await agent.hello()
        header = {"rank": 0, "ranks": 2, "attempt": 0}
        await agent.send(FrameType.TRAINING_RANK, header | {"every": 5})
        await agent.send(FrameType.TRAINING_STATISTICS, header | {"step": 5, "rows": []})
        await agent.send(FrameType.BYE, {"reason": "done"})

    async def shown() -> bool:
        steps = (await steered.get("/api/v1/training/captures"))["steps"]
        return [(step["step"], step["missing"]) for step in steps] == [(5, [1])]

    await until(shown)


@pytest.mark.asyncio
async def test_a_single_client_controls(steered: Any, controller: httpx.AsyncClient, fake_job: Any) -> None:
    async with steered.client() as viewer:
        assert (await viewer.get("/api/v1/training")).json()["lease"] is None
        take = {"action": "take", "client": "page"}
        for path, sent in (("lease", take), ("orders", {"lease": "x", "kind": "pause"})):
            answer = await viewer.post(f"/api/v1/training/{path}", json=sent)
            assert answer.status_code == 403
    first = await lease_of(controller)
    await refused(controller, "/training/lease", {"action": "take", "client": "command line"}, "lease-held")
    second = await lease_of(controller, client="command line", force=True)
    await refused(controller, "/training/lease", {"action": "renew", "key": first}, "lease-lost")
    await refused(controller, "/training/orders", {"lease": first, "kind": "pause"}, "lease-lost")
    actions = (await steered.get("/api/v1/summary"))["actions"]
    assert actions[-1]["what"] == "took the control of the training from controller token"
    assert (await controller.post("/training/lease", json={"action": "release", "key": second})).json()["lease"] is None
    await lease_of(controller)
    leases: list[dict[str, Any]] = [
        {"action": "renew"},
        {"action": "release", "key": "k", "force": True},
        {"action": "give"},
    ]
    for document in leases:
        assert (await controller.post("/training/lease", json=document)).status_code == 422
    orders: list[dict[str, Any]] = [{"lease": "k", "kind": "step"}, {"lease": "k", "kind": "pause", "steps": 1}]
    orders.append({"lease": "k", "kind": "pause", "every": 5})
    for document in orders:
        assert (await controller.post("/training/orders", json=document)).status_code == 422


@pytest.mark.asyncio
async def test_a_perturbation_is_ordered_with_its_recipe(
    steered: Any, controller: httpx.AsyncClient, fake_job: Any, until: Any
) -> None:
    change = {"kind": "storage", "parameter": "mlp.linear_fc1", "action": {"type": "gaussian", "coefficient": 0.5}}
    recipe = {"seed": 3, "perturbations": [change]}
    async with steered.agent(fake_job(data=2), 0) as agent:
        await agent.hello()
        await agent.rings()
        await agent.status(progress=progress("running", 7))

        async def state() -> dict[str, Any]:
            found: dict[str, Any] = (await controller.get("/training")).json()
            return found

        async def runs() -> bool:
            return bool((await state())["state"] == "running")

        await until(runs)
        order = {"lease": await lease_of(controller), "kind": "perturb"}
        wrong = {"perturbations": [change | {"heads": [0], "site": "q"}]}
        large = {"perturbations": [change | {"layers": list(range(300))}]}
        source = {"kind": "calculation", "site": "mlp2", "action": {"type": "patch", "source": {"tokens": [1, 2]}}}
        for given, message in (
            ({}, "give recipe with perturb"),
            ({"recipe": {"perturbations": [source]}}, "a training has no other prompt to patch from"),
            ({"recipe": wrong}, "recipe: perturbations.0: site means nothing for storage"),
            ({"recipe": large}, "an order to a training holds 1024"),
            ({"recipe": recipe, "kind": "pause"}, "give recipe with perturb, and only with it"),
        ):
            answer = await controller.post("/training/orders", json=order | given)
            assert (answer.status_code, message in answer.json()["message"]) == (422, True), answer.text
        answer = await controller.post("/training/orders", json=order | {"recipe": recipe, "target": "master"})
        digest = answer.json()["digest"]
        assert (answer.json()["target"], answer.json()["replica"]) == ("master", None)
        assert (await controller.post("/training/orders", json=order | {"kind": "undo"})).status_code == 202
        while len(found := (await ordered(agent))["orders"]) < 2:
            pass
        text = json.dumps(recipe | {"version": 1}, sort_keys=True, separators=(",", ":"))
        assert found == [
            {"number": 1, "kind": "perturb", "recipe": text, "target": "master", "steps": 0},
            {"number": 2, "kind": "undo"},
        ]
        span = {"digest": digest, "parameters": "master", "replica": None, "firstStep": 9, "lastStep": None}
        await agent.status(progress=progress("running", 8, (1, 8), perturbation=digest, perturbed=[span]))

        async def reported() -> bool:
            found = await state()
            return (found["perturbation"], found["perturbed"]) == (digest, [span])

        await until(reported)
        actions = [action["what"] for action in (await steered.get("/api/v1/summary"))["actions"]]
        assert f"perturbed the training with recipe {digest} after 8 steps" in actions


@pytest.mark.asyncio
async def test_captures_are_ordered_and_the_ranks_report_their_interval(
    steered: Any, controller: httpx.AsyncClient, fake_job: Any, until: Any
) -> None:
    async with steered.agent(fake_job(data=1), 0) as agent:
        await agent.hello()
        await agent.rings()
        await agent.status(progress=progress("running", 7))

        async def runs() -> bool:
            return bool((await controller.get("/training")).json()["state"] == "running")

        await until(runs)
        order = {"lease": await lease_of(controller), "kind": "capture"}
        for every in (50, None):
            answer = await controller.post("/training/orders", json=order | {"every": every})
            assert answer.json()["every"] == every
        while len(found := (await ordered(agent))["orders"]) < 2:
            pass
        assert found == [{"number": 1, "kind": "capture", "every": 50}, {"number": 2, "kind": "capture"}]
        await agent.status(progress=progress("running", 9, (1, 8), (2, 8), captureEvery=50))

        async def reported() -> bool:
            return bool((await controller.get("/training")).json()["captureEvery"] == 50)

        await until(reported)
        assert (await steered.get("/api/v1/job"))["captures"] == {"every": 50, "newest": None, "newestProbe": None}
        actions = [action["what"] for action in (await steered.get("/api/v1/summary"))["actions"]]
        assert actions[0] == "ordered the training to capture every 50 steps"
        assert actions[-1] == "set the training to capture the next step after 8 steps"


@pytest.mark.asyncio
async def test_a_training_without_control_is_reported(hub: Any) -> None:
    headers = {"Authorization": f"Bearer {derive_token(hub.secret, TokenRole.CONTROLLER)}"}
    async with httpx.AsyncClient(base_url=hub.url, headers=headers, timeout=180, verify=SHARED_TLS) as client:
        answer = await client.get("/api/v1/training")
        assert answer.status_code == 409 and "spec.scope.training.enabled" in answer.json()["hint"]
    assert (await hub.get("/api/v1/job"))["training"] is None


def test_a_hub_without_its_orders_counts_on_from_those_that_the_ranks_report() -> None:
    report = ControlProgress.model_validate(progress("running", 350, (1, 40), (2, 350))["control"])
    orders = TrainingOrders(None)
    orders.observe(1, report)
    given = orders.add("x", Order(0, OrderKind.PAUSE), who="page", at=0.0, saves=True)
    orders.observe(1, report)
    orders.observe(0, report)  # an agent of an attempt that has ended
    (pending,) = orders.newest_first
    assert (given.number, pending.is_pending, orders.document(1)["orders"]) == (3, True, [given.order.to_json()])


def test_a_lease_runs_out_unless_it_is_renewed() -> None:
    now = 0.0
    lease = ControlLease(clock=lambda: now, real_time=lambda: 1000.0 + now)
    key, former = lease.take("ann", "page", force=False)
    assert former is None and lease.holder is not None and lease.holder.expires_at == 1000 + LEASE_S
    now = LEASE_S - 1
    lease.renew(key)
    now = 2 * LEASE_S - 2
    lease.check_holds(key)
    now = 2 * LEASE_S
    assert not lease.holder
    with pytest.raises(HttpError, match="ran out"):
        lease.check_holds(key)
    lease.renew(key)  # nobody else has taken it
    lease.check_holds(key)
    now = 4 * LEASE_S
    other, _ = lease.take("bob", "page", force=False)
    for change in (lease.renew, lease.release, lease.check_holds):
        with pytest.raises(HttpError, match="bob"):
            change(key)
    lease.release(other)
    assert lease.renewals == 4
    lease.take("cid", "page", force=False)  # free at once
