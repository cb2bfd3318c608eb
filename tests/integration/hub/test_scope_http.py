"""Answers of MegaScope's hub: runs, tiles, exact numbers, sessions; rank 0 is queried for more, within bounds."""

import asyncio
import functools
import io
import itertools
import socket
import threading
from typing import Any

import numpy as np
import pytest
import scope_rank_zero
import scope_session
from scope_pages import (
    RUN,
    RUNS,
    agents,
    bearer,
    fetched,
    receive,
    recording,
    shown,
    until_done,
    viewer,
    wait_for_pca_probes,
)

from megatronapp_analyzer.scope.delivery import session_download, session_file
from megatronapp_analyzer.scope.parts.probe_tracker import MAX_OF_CALLER
from megatronapp_analyzer.scope.probes import probe_client, variance
from megatronapp_analyzer.scope.probes.rank0_client import Rank0Client
from megatronapp_common import frames
from megatronapp_common.frames import Frame, FrameType
from megatronapp_common.scope.protocol import unpack
from megatronapp_common.scope.protocol_requests import CALLER_HEADER
from megatronapp_common.web.token_bucket import BucketSize
from megatronapp_common.web.tokens import TokenRole

pytestmark = pytest.mark.asyncio
DEADLINE_S = 120.0
CONTROL = ("POST", RUNS), ("PATCH", f"{RUNS}/{RUN}"), ("DELETE", f"{RUNS}/{RUN}"), ("POST", f"{RUNS}/{RUN}/pca")


async def test_runs_are_listed_with_their_details(hub: Any, fake_job: Any, until: Any) -> None:
    async with shown(hub, fake_job, until) as client:
        hello = (await client.get("/api/v1/scope")).json()
        assert (hello["role"], hello["limits"]["prompts"], hello["limits"]["tokens"]) == ("controller", 4, 512)
        capture_states = {
            name: [key for key, on in preset["states"].items() if on] for name, preset in hello["presets"].items()
        }
        assert (len(capture_states["default"]), "mlp1" in capture_states["lite"], capture_states["off"]) == (
            6,
            False,
            ["probabilities"],
        )
        (summary,) = (await client.get(RUNS)).json()
        assert (summary["run"], summary["state"]) == (RUN, "done")
        detail = (await client.get(f"{RUNS}/{RUN}")).json()
        generated = [[token["id"] for token in sample] for sample in detail["generated"]]
        assert generated == recording().generated
        assert detail["generated"][0][0]["position"] == len(recording().prompts[0])
        assert detail["prompts"][0]["offsets"][8:10] == [None, [8, 9]]
        more = (await client.get(f"{RUNS}/{RUN}?candidates=true")).json()["generated"][0][0]
        assert detail["generated"][0][0]["candidates"] is None
        assert len(more["candidates"]) == 10
        assert all(
            candidate["text"] == (scope_session.text_of(candidate["id"]) or "\ufffd")
            for candidate in more["candidates"]
        )
        chances = [candidate["probability"] for candidate in more["candidates"]]
        assert chances == sorted(chances, reverse=True) and 0 < sum(chances) <= 1.01
        answer = await client.get(f"{RUNS}/nothing")
        assert (answer.status_code, answer.json()["code"]) == (404, "no-such-run")


async def test_tiles_are_the_models_attention(
    hub: Any, fake_job: Any, until: Any, rank_zero: scope_rank_zero.RankZero
) -> None:
    async with shown(hub, fake_job, until, rank_zero) as client:
        pinned = await client.get(f"{RUNS}/{RUN}/attention/0/1/2/0/0/0")
        assert pinned.status_code == 200
        sites = [body["sites"][0]["site"] for _, path, body in rank_zero.requests if path == "probes"]
        assert "attention" not in sites, "a pinned head needs no probe"
        answer = await fetched(client, f"{RUNS}/{RUN}/attention/1/2/3/0/0/0")
        expected = scope_session.codes_of(recording().sites[1]["attention"][2, 3])
        assert answer.headers["x-tile-shape"] == f"{len(expected)},{len(expected)}"
        assert answer.content == expected.tobytes()
        assert "immutable" in answer.headers["cache-control"]
        known = hub.hub.scope.core.runs[RUN]
        known.header["state"], known.header["error"] = "failed", {"code": "engine-lost"}
        grows = await client.get(f"{RUNS}/{RUN}/attention/1/2/3/0/0/0")
        assert grows.headers["cache-control"] == "private, no-cache", "rank 0 may come back, and the text go on"
        known.header["error"]["code"] = "out-of-memory"
        answer = await client.get(f"{RUNS}/{RUN}/attention/1/2/3/0/0/0")
        assert "immutable" in answer.headers["cache-control"]
        etag = answer.headers["etag"]
        again = await client.get(f"{RUNS}/{RUN}/attention/1/2/3/0/0/0", headers={"If-None-Match": etag})
        assert (again.status_code, again.content) == (304, b"")
        coarse = await client.get(f"{RUNS}/{RUN}/attention/1/2/3/3/0/0")
        assert max(coarse.content) == expected.max()
        for outside in ("1/2/3/0/1/0", "1/2/9/0/0/0", "1/9/3/0/0/0", "5/2/3/0/0/0"):
            assert (await client.get(f"{RUNS}/{RUN}/attention/{outside}")).json()["code"] == "outside"


async def test_tiles_of_a_batch_are_equal_to_single_tiles(
    hub: Any, fake_job: Any, until: Any, rank_zero: scope_rank_zero.RankZero
) -> None:
    async with shown(hub, fake_job, until, rank_zero) as client:
        base = f"{RUNS}/{RUN}/attention/1/2/3/0"
        answer = await fetched(client, f"{base}?tile=0,0&tile=0,0")
        sites = [body["sites"][0]["site"] for _, path, body in rank_zero.requests if path == "probes"]
        assert sites.count("attention") == 1
        frame = frames.decode(answer.content)
        where = {name: frame.header[name] for name in ("run", "sample", "layer", "head", "level")}
        assert (frame.type, where) == (
            FrameType.SCOPE_TILES,
            {"run": RUN, "sample": 1, "layer": 2, "head": 3, "level": 0},
        )
        (found,) = unpack(frame)
        assert (found.name, found.code) == ("0,0", "u8s")
        single = await client.get(f"{base}/0/0")
        assert found.data.tobytes() == single.content
        assert ",".join(map(str, found.data.shape)) == single.headers["x-tile-shape"]
        assert answer.headers["cache-control"] == single.headers["cache-control"]
        again = await client.get(f"{base}?tile=0,0", headers={"If-None-Match": answer.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
        known = hub.hub.scope.core.runs[RUN]
        known.header["state"], known.header["error"] = "failed", {"code": "engine-lost"}
        grows = await client.get(f"{base}?tile=0,0")
        assert grows.headers["cache-control"] == "private, no-cache", "rank 0 may come back, and the text go on"


@pytest.mark.parametrize(("level", "names"), [(0, ["3,2", "0,0", "1,0", "3,3"]), (1, ["0,0", "1,1", "1,0"])])
async def test_tiles_of_a_long_text_are_returned_in_the_requested_order(
    hub: Any, fake_job: Any, until: Any, level: int, names: list[str]
) -> None:
    async with shown(hub, fake_job, until) as client:
        known = hub.hub.scope.core.runs[RUN]
        codes = np.random.default_rng(4).integers(0, 256, (900, 900), np.uint8)
        known.tokens[0][900] = known.tokens[0][max(known.tokens[0])]
        known.tokens[0] |= {place: known.tokens[0][900] for place in range(len(known.prompt_ids(0)), 900)}
        for position, row in enumerate(codes):
            known.attention.put((0, 0, 0), [position], row[None, : position + 1].copy())
        base = f"{RUNS}/{RUN}/attention/0/0/0/{level}"
        answer = await client.get(base, params={"tile": names})
        found = unpack(frames.decode(answer.content))
        assert [tensor.name for tensor in found] == names
        for tensor in found:
            single = await client.get(f"{base}/{tensor.name.replace(',', '/')}")
            assert tensor.data.tobytes() == single.content
        del known.attention.get((0, 0, 0))[899]
        refused = await client.get(base, params={"tile": names})
        assert (refused.status_code, refused.json()["code"]) == (404, "not-recorded")


async def test_batches_of_tiles_are_refused_and_charged_like_single_tiles(
    hub: Any, fake_job: Any, until: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with shown(hub, fake_job, until) as client:
        for outside in ("1/2/3/0?tile=0,0&tile=1,0", "1/2/9/0?tile=0,0", "1/9/3/0?tile=0,0", "5/2/3/0?tile=0,0"):
            answer = await client.get(f"{RUNS}/{RUN}/attention/{outside}")
            assert (answer.status_code, answer.json()["code"]) == (404, "outside"), outside
        base = f"{RUNS}/{RUN}/attention/0/1/2/0"
        many = "&".join(f"tile=0,{key}" for key in range(17))
        for wrong in ("", "?tile=", "?tile=0", "?tile=-1,0", "?tile=0,0,0", "?tile=0,1234567", f"?{many}"):
            answer = await client.get(base + wrong)
            assert (answer.status_code, answer.json()["code"]) == (422, "invalid-request"), wrong
        assert (await client.get(f"{RUNS}/nothing/attention/0/1/2/0?tile=0,0")).json()["code"] == "no-such-run"
        other = bearer(hub, TokenRole.VIEWER) | {CALLER_HEADER: "jane"}
        monkeypatch.setattr(hub.hub.scope, "requests", BucketSize(burst=4, per_s=0.001))
        two = [(await client.get(f"{base}?tile=0,0&tile=1,0", headers=other)).status_code for _ in range(3)]
        assert two == [404, 404, 429]


async def test_variance_of_a_layer_is_that_of_all_its_hidden_states(
    hub: Any, fake_job: Any, until: Any, rank_zero: scope_rank_zero.RankZero, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with shown(hub, fake_job, until, rank_zero) as client:
        states = [sites["residual"] for sites in recording().sites]
        for layer in (0, 3):
            rows = np.concatenate([state[:, layer] for state in states]).astype(np.float64)
            variances = (await fetched(client, f"{RUNS}/{RUN}/pca/variance?layer={layer}")).json()
            assert (variances["layer"], variances["rows"]) == (layer, len(rows))
            assert variances["variance"] == pytest.approx(rows.var(axis=0).sum(), rel=1e-6)
        monkeypatch.setattr(variance, "MAX_BYTES", 4 * recording().shape.hidden * len(rows) // 3)
        rows = np.concatenate([state[::3, 1] for state in states]).astype(np.float64)
        variances = (await fetched(client, f"{RUNS}/{RUN}/pca/variance?layer=1")).json()
        assert (variances["rows"], variances["variance"]) == (
            len(rows),
            pytest.approx(rows.var(axis=0).sum(), rel=1e-6),
        )
        assert (await client.get(f"{RUNS}/{RUN}/pca/variance?layer=4")).json()["code"] == "outside"


async def test_exact_numbers_in_three_forms(
    hub: Any, fake_job: Any, until: Any, rank_zero: scope_rank_zero.RankZero
) -> None:
    async with shown(hub, fake_job, until, rank_zero) as client:
        path = f"{RUNS}/{RUN}/values"
        expected = recording().sites[0]["residual"][:, 2]
        answer = await fetched(client, f"{path}/residual?layer=2&format=npy")
        np.testing.assert_array_equal(np.load(io.BytesIO(answer.content)), expected)
        values = (await client.get(f"{path}/residual?layer=2&position=3")).json()
        assert (values["positions"], np.float32(values["values"][0]).tolist()) == ([3], expected[3].tolist())
        lines = (await client.get(f"{path}/residual?layer=2&format=csv")).text.splitlines()
        assert [np.float32(field) for field in lines[1].split(",")[1:]] == list(expected[0])
        exact = np.load(io.BytesIO((await fetched(client, f"{path}/attention?layer=0&head=1&format=npy")).content))
        np.testing.assert_array_equal(exact, recording().sites[0]["attention"][0, 1])
        logits = np.load(io.BytesIO((await fetched(client, f"{path}/logits?format=npy&sample=1")).content))
        np.testing.assert_array_equal(logits, recording().sites[1]["logits"])
        keys = np.load(io.BytesIO((await fetched(client, f"{path}/k?layer=3&head=1&format=npy")).content))
        np.testing.assert_array_equal(keys, recording().sites[0]["k"][:, 3, 1])
        probed = [body["sites"][0]["site"] for _, path, body in rank_zero.requests if path == "probes"]
        assert sorted(site for site in probed if site != "residual") == ["attention", "k", "logits"]
        for wrong, code in (
            ("residual", 422),
            ("residual?layer=9", 404),
            ("k?layer=0&head=2", 404),
            ("logits?layer=1", 422),
            ("soul", 404),
            ("residual?layer=0&position=99", 404),
        ):
            assert (await client.get(f"{path}/{wrong}")).status_code == code


async def test_q_and_k_are_served_before_and_after_rotation(
    hub: Any, fake_job: Any, until: Any, rank_zero: scope_rank_zero.RankZero
) -> None:
    async with shown(hub, fake_job, until, rank_zero) as client:
        for rotary, sign in (("before", -1), ("after", 1)):
            path = f"{RUNS}/{RUN}/values/q?layer=1&head=3&rotary={rotary}&format=npy"
            found = np.load(io.BytesIO((await fetched(client, path)).content))
            np.testing.assert_array_equal(found, sign * recording().sites[0]["q"][:, 1, 3])
        assert (await client.get(f"{RUNS}/{RUN}/values/v?layer=1&head=1&rotary=before")).status_code == 422
        again = session_file.parse((await client.get(f"{RUNS}/{RUN}/session")).content)
        rotations = {frame.header.get("rotary") for frame in again.frames if frame.header.get("site") == "q"}
        assert rotations == {None, "before"}


async def test_an_incomplete_answer_is_refused_and_requested_again(
    hub: Any, fake_job: Any, until: Any, rank_zero: scope_rank_zero.RankZero
) -> None:
    path = f"{RUNS}/{RUN}/values/mlp2?layer=1&format=npy"
    async with shown(hub, fake_job, until, rank_zero) as client:
        publish = rank_zero.publish
        for spoil in ({"dropped": True}, {}):

            def spoiled(frame: Frame, spoil: dict[str, Any] = spoil) -> None:
                publish(Frame(frame.type, {**frame.header, "tensors": []} | spoil))

            rank_zero.publish = spoiled
            refused = await fetched(client, path)
            assert (refused.status_code, refused.json()["code"]) == (503, "probe-incomplete")
            assert refused.headers["retry-after"] == "1"
        rank_zero.publish = publish
        found = np.load(io.BytesIO((await fetched(client, path)).content))
        np.testing.assert_array_equal(found, recording().sites[0]["mlp2"][:, 1])


async def test_equal_requests_are_merged_and_a_caller_is_limited(
    hub: Any, fake_job: Any, until: Any, rank_zero: scope_rank_zero.RankZero
) -> None:
    async with shown(hub, fake_job, until) as client:
        await wait_for_pca_probes(hub, rank_zero, until)
        before = len(rank_zero.requests)
        places = [f"{RUNS}/{RUN}/values/q?layer={layer}&head={head}" for layer in range(4) for head in range(4)]
        places = [*places, *(f"{place}&sample=1" for place in places)][: MAX_OF_CALLER + 1]
        twice = await asyncio.gather(*(client.get(places[0]) for _ in range(6)))
        assert {answer.status_code for answer in twice} == {202} and len(
            {answer.json()["probe"] for answer in twice}
        ) == 1
        assert len(rank_zero.requests) == before + 1
        answers = [await client.get(place) for place in places]
        assert [answer.status_code for answer in answers] == [202] * MAX_OF_CALLER + [429]
        assert (answers[-1].json()["code"], answers[-1].headers["retry-after"]) == ("too-many-probes", "1")
        other = await client.get(places[-1], headers={"X-Megatronapp-Caller": "jane"})
        assert other.status_code == 202, "another caller's share is another"


async def test_a_text_with_holes_is_not_probed_until_rank_zero_has_filled_it(
    hub: Any, fake_job: Any, until: Any, rank_zero: scope_rank_zero.RankZero
) -> None:
    sent = [frame for _, frame in scope_session.rank_frames(recording())]
    late = next(place for place, frame in enumerate(sent) if frame.header.get("step") == 2)
    again = [sent[0], scope_session.run_state(recording(), "decoding"), *sent[late:]]
    path = f"{RUNS}/{RUN}/values/mlp2?layer=1&format=npy"
    hub.hub.scope.core.ingest.assembler.wait_s = 2.0  # the first step after the holes has not all of its parts
    async with agents(hub, fake_job, 1) as (worker,), viewer(hub, TokenRole.CONTROLLER) as page:
        rank_zero.refuse = (503, {"code": "restarting", "message": "", "hint": ""})
        for frame in again:
            await worker.connection.send(frames.encode(frame))
        got = await until_done(page)
        gaps = [frame.header for frame in got if frame.type == FrameType.SCOPE_GAP]
        assert [(gap["what"], gap["from"], gap["to"], gap["reason"]) for gap in gaps] == [("step", 0, 1, "restart")]
        async with hub.client() as client:
            refused = await client.get(path)
            assert (refused.status_code, refused.json()["code"]) == (503, "refilling")
            rank_zero.refuse = None
            rank_zero.publish = scope_rank_zero.sender(worker.connection)

            async def whole() -> bool:
                await client.get(path)
                return bool(hub.hub.scope.core.runs[RUN].whole)

            await until(whole)
            found = np.load(io.BytesIO((await fetched(client, path)).content))
            np.testing.assert_array_equal(found, recording().sites[0]["mlp2"][:, 1])
            detail = (await client.get(f"{RUNS}/{RUN}")).json()
        assert [[token["id"] for token in sample] for sample in detail["generated"]] == recording().generated
        gap_frames = [await receive(page), await receive(page)]
        assert [(frame.type, frame.header["step"], frame.header["tensors"]) for frame in gap_frames] == [
            (FrameType.SCOPE_STEP, step, []) for step in range(2)
        ]


async def test_without_a_model_a_text_with_holes_stays_refused(hub: Any, fake_job: Any, until: Any) -> None:
    async with shown(hub, fake_job, until) as client:
        del hub.hub.scope.core.runs[RUN].tokens[0][max(hub.hub.scope.core.runs[RUN].tokens[0]) - 1]
        for path in ("attention/0/1/2/0/0/0", "values/mlp2?layer=1"):
            refused = await client.get(f"{RUNS}/{RUN}/{path}")
            assert (refused.status_code, refused.json()["code"]) == (409, "run-incomplete")


async def test_long_bodies_are_refused_before_they_are_read(
    hub: Any, fake_job: Any, until: Any, rank_zero: scope_rank_zero.RankZero
) -> None:
    async with shown(hub, fake_job, until, rank_zero) as client:
        long = {"prompts": ["a" * 60_000, "b" * 60_000]}
        for method, path in CONTROL:
            answer = await client.request(method, path, json=long, headers=bearer(hub, TokenRole.VIEWER))
            assert (answer.status_code, answer.json()["code"]) == (413, "too-large")
        assert (await client.post(RUNS, json=long)).status_code == 201
        assert (await client.post(RUNS, content=bytes(6 << 20))).status_code == 413
        assert (await client.patch(f"{RUNS}/{RUN}", json=long)).status_code == 413


async def test_a_fast_caller_is_refused_with_a_retry_delay(hub: Any) -> None:
    hub.hub.scope.requests = BucketSize(burst=2, per_s=0.001)
    async with hub.client() as client:
        answers = [await client.get(RUNS) for _ in range(3)]
        assert [answer.status_code for answer in answers] == [200, 200, 429]
        assert answers[2].json()["code"] == "too-many-requests"
        assert 500 < int(answers[2].headers["retry-after"]) <= 1000, "seconds until there is one again"


async def test_controlling_needs_the_role_and_a_model(hub: Any, fake_job: Any, until: Any) -> None:
    async with shown(hub, fake_job, until) as client:
        request = {"prompts": ["The sea "], "tokens": 4}
        bodies: dict[str, Any] = {"POST": request, "PATCH": {"capture": {}}, "DELETE": None}
        for method, path in CONTROL:
            body = {"layers": [0]} if path.endswith("pca") else bodies[method]
            refused = await client.request(method, path, json=body, headers=bearer(hub, TokenRole.VIEWER))
            assert (refused.status_code, refused.json()["code"]) == (403, "needs-controller")
        for method, path in CONTROL[:3]:
            answer = await client.request(method, path, json=bodies[method])
            assert (answer.status_code, answer.json()["code"]) == (409, "no-model")


async def test_runs_are_forwarded_to_the_model_with_its_refusals(
    hub: Any, fake_job: Any, until: Any, rank_zero: scope_rank_zero.RankZero
) -> None:
    async with shown(hub, fake_job, until, rank_zero) as client:
        request = {"prompts": ["The sea "], "tokens": 4, "capture": {"pinned": [{"layer": 1, "head": 2}]}}
        answer = await client.post(RUNS, json=request)
        assert (answer.status_code, answer.json()) == (201, {"run": RUN, "position": 0})
        sent = next(body for method, path, body in rank_zero.requests if (method, path) == ("POST", "runs"))
        assert sent["prompts"] == ["The sea "] and sent["capture"]["preset"] == "default"
        assert (await client.patch(f"{RUNS}/{RUN}", json={"capture": {"preset": "lite"}})).status_code == 204
        assert (await client.delete(f"{RUNS}/{RUN}")).status_code == 204
        gateway = {"X-Megatronapp-Caller": "jane@example.org"}
        assert (await client.delete(f"{RUNS}/{RUN}", headers=gateway)).status_code == 204
        actions = (await hub.get("/api/v1/summary"))["actions"]
        assert [(action["who"], action["what"]) for action in actions] == [
            ("controller token", f"started run {RUN} of 1 prompt"),
            ("controller token", f"changed what is captured of run {RUN}"),
            ("controller token", f"cancelled run {RUN}"),
            ("jane@example.org", f"cancelled run {RUN}"),
        ]
        assert actions[0]["at"].endswith("Z")
        ids = [action["id"] for action in actions]
        assert ids == sorted(set(ids))
        filters = {"expression": {"qkv": "__import__('os')"}}
        refused: list[dict[str, Any]] = [{"prompts": []}, request | {"capture": filters}]
        for wrong in [*refused, request | {"capture": {"pinned": [{"layer": 9, "head": 0}]}}]:
            answer = await client.post(RUNS, json=wrong)
            assert (answer.status_code, answer.json()["code"]) == (422, "invalid-request")
        for status, code in ((429, "queue-full"), (413, "too-long")):
            rank_zero.refuse = (status, {"code": code, "message": "32 wait", "hint": "Wait."})
            answer = await client.post(RUNS, json=request)
            assert (answer.status_code, answer.json()) == rank_zero.refuse
            assert answer.headers["Retry-After"] == "7"
        rank_zero.refuse = (500, {})
        assert (await client.post(RUNS, json=request)).json()["code"] == "model-failed"


async def test_a_run_is_listed_as_soon_as_it_is_requested(
    hub: Any, fake_job: Any, until: Any, rank_zero: scope_rank_zero.RankZero, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = {"prompts": ["The sea "], "tokens": 4}
    monkeypatch.setattr(probe_client, "KNOWN_S", DEADLINE_S)
    async with agents(hub, fake_job) as workers, hub.client() as client:
        client.headers.update(bearer(hub, TokenRole.CONTROLLER))
        started = asyncio.ensure_future(client.post(RUNS, json=request))

        async def waits() -> bool:
            return RUN in hub.hub.scope.core.runs._waiters

        await until(waits)
        for _, frame in itertools.islice(scope_session.rank_frames(recording()), 3):
            await workers[0].connection.send(frames.encode(frame))
        assert (await started).json() == {"run": RUN, "position": 0}
        assert (await client.get(f"{RUNS}/{RUN}")).status_code == 200
        hub.hub.scope.core.runs._runs.clear()
        monkeypatch.setattr(probe_client, "KNOWN_S", 0.01)
        assert (await client.post(RUNS, json=request)).status_code == 201, "its agent may be away"


async def test_an_unreachable_model_is_reported(hub: Any) -> None:
    hub.hub.scope.probe_client.client = Rank0Client("http://127.0.0.1:9", "token")
    async with hub.client() as client:
        answer = await client.post(RUNS, json={"prompts": ["a"]}, headers=bearer(hub, TokenRole.CONTROLLER))
        assert (answer.status_code, answer.json()["code"]) == (503, "restarting")


async def test_a_session_is_what_the_reference_writes(hub: Any, fake_job: Any, until: Any) -> None:
    async with shown(hub, fake_job, until) as client:
        answer = await client.get(f"{RUNS}/{RUN}/session")
        got = list(frames.split(answer.content))
        assert got[0].type == FrameType.SCOPE_HELLO
        prompts = [frame for frame in got if frame.type == FrameType.SCOPE_VALUES]
        assert [(prompt.header["layer"], prompt.header["head"]) for prompt in prompts] == [(1, 2), (3, 0)] * 2
        assert {prompt.header["tensors"][0]["c"] for prompt in prompts} == {"u8s"}
        assert [frame.type for frame in got[1 : -len(prompts)]] == [
            frame.type
            for frame in frames.split(scope_session.session(recording()))
            if frame.type not in {FrameType.SCOPE_HELLO, FrameType.SCOPE_VALUES, FrameType.SCOPE_PCA}
        ]
        assert threading.active_count() < 50


async def unread(hub: Any, who: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A download whose reader takes its beginning only."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", int(hub.url.rsplit(":", 1)[1])))
    reader, writer = await asyncio.open_connection(sock=sock, limit=4096)
    lines = {"Host": "127.0.0.1", CALLER_HEADER: who, **bearer(hub, TokenRole.VIEWER)}
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    writer.write(f"GET {RUNS}/{RUN}/session HTTP/1.1\r\n{head}\r\n".encode())
    assert b" 200 " in await asyncio.wait_for(reader.readline(), DEADLINE_S)
    return reader, writer


async def has_none(hub: Any, who: str) -> bool:
    return bool(hub.hub.scope.sessions.in_use(f"viewer {who}") == 0)


async def test_who_reads_no_session_holds_no_place_for_long(
    hub: Any, fake_job: Any, until: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with shown(hub, fake_job, until) as client:
        numbers = np.zeros((24, 1 << 18), "<f4")
        hub.hub.scope.core.runs[RUN].values.put(("mlp2", 0, 0, None), range(24), numbers)
        monkeypatch.setattr(session_download, "PATIENCE_S", DEADLINE_S)
        downloads = [await unread(hub, "jane") for _ in range(session_download.MAX_OF_CALLER)]
        path, jane = f"{RUNS}/{RUN}/session", {CALLER_HEADER: "jane", **bearer(hub, TokenRole.VIEWER)}
        refused = await client.get(path, headers=jane)
        assert (refused.status_code, refused.json()["code"]) == (429, "too-many-sessions")
        assert (await client.get(path, headers=jane | {CALLER_HEADER: "joe"})).status_code == 200
        monkeypatch.setattr(session_download, "PATIENCE_S", 0.05)
        late = await unread(hub, "jim")
        await until(functools.partial(has_none, hub, "jim"))
        assert hub.hub.scope.sessions.in_use("viewer jane") == 2, "these began with more patience"
        got = await asyncio.wait_for(late[0].read(), DEADLINE_S)
        assert len(got) < numbers.nbytes, "the reader sees that it broke off"
        for _, writer in [*downloads, late]:
            writer.transport.abort()
            await writer.wait_closed()
        await until(functools.partial(has_none, hub, "jane"))


async def test_no_request_waits_for_another_thread(
    hub: Any, fake_job: Any, until: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(function: Any, *_: Any, **__: Any) -> Any:
        raise AssertionError(f"{function} is given to a thread, which costs a tile more than it does")

    async with shown(hub, fake_job, until) as client:
        monkeypatch.setattr("fastapi.dependencies.utils.run_in_threadpool", refuse)
        for path in ("/api/v1/scope", RUNS, f"{RUNS}/{RUN}", f"{RUNS}/{RUN}/attention/0/1/2/0/0/0", "/api/v1/job"):
            assert (await client.get(path)).status_code == 200
