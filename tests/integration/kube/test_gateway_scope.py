"""MegaScope through the gateway, in front of a real hub that plays a recorded session or has a model that generates."""

import contextlib
import io
import json
import pathlib
import time
from collections.abc import Iterator
from typing import Any

import gateway
import httpx
import kube
import numpy as np
import pytest
import scope_analysis
import scope_hub
import scope_session
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect
from websockets.typing import Subprotocol

from megatronapp_analyzer.scope.delivery import session_file
from megatronapp_common import frames
from megatronapp_common.frames import Frame, FrameType
from megatronapp_common.scope.protocol import SUBPROTOCOL, unpack
from megatronapp_common.web.tokens import TokenRole
from megatronapp_operator.gateway.gateway import CONTROLS_S

VIEWER, CONTROLLER = gateway.on_jobs("get", "list"), gateway.on_jobs("get", "list", "update")
RUN = scope_session.RUN
TOKEN = 11
"""Token of the vocabulary that the recorded lens follows."""
CONTROL = (
    ("POST", "runs", {"prompts": ["The sea "]}),
    ("PATCH", f"runs/{RUN}", {"capture": {"preset": "lite"}}),
    ("POST", f"runs/{RUN}/pca", {"layers": [0], "refit": True}),
    ("DELETE", f"runs/{RUN}", None),
    ("POST", "comparisons", {"prompt": "The sea ", "perturbation": "none"}),
    ("DELETE", "sweeps/nothing", None),
)


@pytest.fixture(scope="module")
def recording() -> scope_session.Recording:
    return scope_session.record(tokens=4)


@pytest.fixture(scope="module")
def session(recording: scope_session.Recording, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A session with the lens of all rows, followed by a token."""
    core = scope_session.core_of(recording)
    core.runs[RUN].analyses.put(scope_analysis.recorded_lens(recording, 0, TOKEN))
    file = tmp_path_factory.mktemp("session") / "tiny.scope"
    file.write_bytes(session_file.dump(core.feed, RUN))
    return file


@pytest.fixture
def job(plane: kube.ControlPlane, namespace: str) -> gateway.GatewayJob:
    return gateway.make_job(plane, namespace, "demo")


@pytest.fixture
def viewer(plane: kube.ControlPlane, namespace: str) -> str:
    return gateway.account(plane, namespace, "viewer", grants=[VIEWER])


@pytest.fixture
def controller(plane: kube.ControlPlane, namespace: str) -> str:
    return gateway.account(plane, namespace, "jane", grants=[CONTROLLER])


@pytest.fixture
def replay(job: gateway.GatewayJob, session: pathlib.Path, reviewing: gateway.Gateway) -> Iterator[scope_hub.ScopeHub]:
    with scope_hub.replaying(job, session, port=reviewing.hub_port, key=reviewing.key) as running:
        yield running


@contextlib.contextmanager
def page(
    at: gateway.Gateway, job: gateway.GatewayJob, protocols: tuple[str, ...] = (SUBPROTOCOL,), **headers: str
) -> Iterator[ClientConnection]:
    url = f"{at.url.replace('http', 'ws', 1)}{job.path}/scope"
    how: dict[str, Any] = {"max_size": None, "open_timeout": gateway.DEADLINE_S}
    how["subprotocols"] = [Subprotocol(protocol) for protocol in protocols] or None
    with connect(url, additional_headers=headers, proxy=None, compression=None, **how) as connection:
        yield connection


def receive(connection: ClientConnection) -> Frame:
    message = connection.recv(gateway.DEADLINE_S)
    assert isinstance(message, bytes)
    return frames.decode(message)


def test_a_viewer_reads_everything(
    job: gateway.GatewayJob,
    replay: scope_hub.ScopeHub,
    reviewing: gateway.Gateway,
    viewer: str,
    recording: scope_session.Recording,
) -> None:
    with reviewing.client(viewer) as client:
        hello = client.get(f"{job.path}/scope")
        runs = client.get(f"{job.path}/scope/runs")
        whole = client.get(f"{job.path}/scope/runs/{RUN}")
        tile = client.get(f"{job.path}/scope/runs/{RUN}/attention/0/1/2/0/0/0")
        same = {"If-None-Match": tile.headers["etag"]}
        again = client.get(f"{job.path}/scope/runs/{RUN}/attention/0/1/2/0/0/0", headers=same)
        several = client.get(f"{job.path}/scope/runs/{RUN}/attention/0/1/2/0", params={"tile": ["0,0"]})
        known = {"If-None-Match": several.headers["etag"]}
        unchanged = client.get(several.url.raw_path.decode(), headers=known)
        place = {"layer": 1, "head": 2, "position": 3}
        values = {
            form: client.get(f"{job.path}/scope/runs/{RUN}/values/q", params={**place, "format": form})
            for form in ("json", "csv", "npy")
        }
        file = client.get(f"{job.path}/scope/runs/{RUN}/session")
        none = client.get(f"{job.path}/scope/runs/nothing")
        wrong = client.get(f"{job.path}/scope/runs/{RUN}/values/q", params={**place, "format": "html"})
    assert (hello.json()["role"], hello.json()["source"]) == ("viewer", "replay")
    assert [tensor["run"] for tensor in runs.json()] == [RUN]
    assert [[token["id"] for token in sample] for sample in whole.json()["generated"]] == recording.generated
    read = len(recording.sites[0]["residual"])
    assert (tile.status_code, tile.headers["x-tile-shape"]) == (200, f"{read},{read}")
    assert tile.headers["content-type"] == "application/octet-stream"
    assert len(tile.content) == read * read
    assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", tile.headers["etag"])
    (tensor,) = unpack(frames.decode(several.content))
    assert (tensor.name, tensor.data.tobytes()) == ("0,0", tile.content)
    assert (several.headers["cache-control"], unchanged.status_code) == ("private, no-cache", 304)
    exact = recording.sites[0]["q"][3, 1, 2]
    np.testing.assert_array_equal(np.load(io.BytesIO(values["npy"].content)).ravel(), exact)
    assert values["csv"].headers["content-type"] == "text/csv; charset=utf-8"
    assert values["csv"].headers["content-disposition"] == f'attachment; filename="{RUN}-q.csv"'
    assert values["npy"].headers["content-disposition"] == f'attachment; filename="{RUN}-q.npy"'
    assert "content-disposition" not in values["json"].headers
    assert file.headers["content-disposition"] == f'attachment; filename="{RUN}.scope"'
    assert frames.decode(file.content[: int.from_bytes(file.content[:4], "little")]).type == FrameType.SCOPE_HELLO
    assert {tensor.headers["x-content-type-options"] for tensor in (hello, tile, file, *values.values())} == {"nosniff"}
    assert (none.status_code, none.json()["code"]) == (404, "no-such-run")
    assert wrong.status_code == 422


def test_a_lens_follows_the_token_of_the_query(
    job: gateway.GatewayJob,
    replay: scope_hub.ScopeHub,
    reviewing: gateway.Gateway,
    viewer: str,
    recording: scope_session.Recording,
) -> None:
    rows = len(recording.prompts[0] + recording.generated[0]) - 1
    query: dict[str, Any] = {"positions": f"0-{rows - 1}", "top": 10, "token": TOKEN}
    with reviewing.client(viewer) as client:
        lens = client.get(f"{job.path}/scope/runs/{RUN}/lens", params=query)
        table = client.get(f"{job.path}/scope/runs/{RUN}/lens", params={**query, "format": "csv"})
    assert lens.status_code == 200, lens.text
    logs = scope_analysis.lens_logs(recording, 0)
    ranks = (logs > logs[..., TOKEN : TOKEN + 1]).sum(-1)
    assert lens.json()["tokenRank"] == ranks.transpose().tolist()
    assert (table.status_code, table.headers["content-type"]) == (200, "text/csv; charset=utf-8")
    assert table.headers["content-disposition"] == f'attachment; filename="{RUN}-lens.csv"'


def test_who_may_update_the_job_controls_its_model_by_name(
    job: gateway.GatewayJob,
    recording: scope_session.Recording,
    reviewing: gateway.Gateway,
    viewer: str,
    controller: str,
) -> None:
    secret = reviewing.job_token(job.uid)
    with scope_hub.generating(job, recording, port=reviewing.hub_port, key=reviewing.key) as running:
        scope_hub.generate(running, recording)
        for token, code in ((viewer, "no-right"), (secret, "needs-controller")):
            with reviewing.client(token) as client:
                assert client.get(f"{job.path}/scope").json()["role"] == "viewer"
                for method, path, body in CONTROL:
                    refused = client.request(method, f"{job.path}/scope/{path}", json=body)
                    assert (refused.status_code, refused.json()["code"]) == (403, code), path
        with reviewing.client(controller) as client:
            assert client.get(f"{job.path}/scope").json()["role"] == "controller"
            more = {"X-Megatronapp-Caller": "root"}
            done = [
                client.request(way, f"{job.path}/scope/{path}", json=body, headers=more) for way, path, body in CONTROL
            ]
            long = client.post(f"{job.path}/scope/runs", json={"prompts": ["word " * 12_000] * 8})
            longer = client.post(f"{job.path}/scope/runs", content=b" " * ((1 << 20) + 1))
        with reviewing.client(reviewing.job_token(job.uid, TokenRole.CONTROLLER)) as client:
            assert client.get(f"{job.path}/scope").json()["role"] == "controller"
            assert client.delete(f"{job.path}/scope/runs/{RUN}").status_code == 204
            actions = client.get(f"{job.path}/summary").json()["actions"]
    assert [answer.status_code for answer in done[:2]] == [201, 204], done[0].text
    assert done[2].status_code in {200, 202} and done[3].status_code == 204
    assert done[0].json()["run"] == RUN
    assert (long.status_code, longer.status_code) == (201, 413), long.text
    jane = f"system:serviceaccount:{job.namespace}:jane"
    assert [action["who"] for action in actions] == [jane] * 6 + ["a holder of the job's token"]
    assert actions[0]["what"] == f"started run {RUN} of 1 prompt"


@pytest.mark.full("hundreds of requests; the limit is tested by itself")
def test_who_controls_too_often_waits(job: gateway.GatewayJob, by_tokens: gateway.Gateway) -> None:
    token = by_tokens.job_token(job.uid, TokenRole.CONTROLLER)
    with by_tokens.client(token) as client, by_tokens.client(by_tokens.job_token(job.uid)) as other:
        viewed = [other.post(f"{job.path}/faults", json={}).json()["code"] for _ in range(10)]
        began = time.monotonic()
        codes = [client.delete(f"{job.path}/scope/runs/{RUN}").json()["code"] for _ in range(3)]
        late = client.post(f"{job.path}/faults", json={})
        while late.status_code != 429:
            assert time.monotonic() - began >= CONTROLS_S / 3, "after that a turn is given back"
            late = client.post(f"{job.path}/faults", json={})
        response = client.get(f"{job.path}/scope")
        refused = other.delete(f"{job.path}/scope/runs/{RUN}")
    assert viewed == ["needs-controller"] * 10
    assert codes == ["hub-not-there"] * 3, "who looks takes no turn of who controls"
    assert (late.status_code, late.json()["code"]) == (429, "too-many")
    assert 1 <= int(late.headers["retry-after"]) <= 5
    assert response.status_code == 502, "who looks waits for nobody who controls"
    assert refused.json()["code"] == "needs-controller"


def test_a_page_gets_the_frames_of_its_hub_and_its_disconnect(
    job: gateway.GatewayJob, session: pathlib.Path, reviewing: gateway.Gateway, viewer: str, controller: str
) -> None:
    with contextlib.ExitStack() as stack:
        with scope_hub.replaying(job, session, port=reviewing.hub_port, key=reviewing.key):
            connection = stack.enter_context(
                page(reviewing, job, ("other", SUBPROTOCOL), Authorization=f"Bearer {viewer}")
            )
            hello = receive(connection)
            assert connection.subprotocol == SUBPROTOCOL
            assert (hello.type, hello.header["role"]) == (FrameType.SCOPE_HELLO, "viewer")
            connection.send(json.dumps({"type": "resume", "run": RUN, "seq": 0}))
            got = [receive(connection)]
            while not (got[-1].type == FrameType.SCOPE_RUN and got[-1].header["state"] == "done"):
                got.append(receive(connection))
            assert {FrameType.SCOPE_STEP, FrameType.SCOPE_OVERVIEW, FrameType.SCOPE_ROWS} <= {it.type for it in got}
            with page(reviewing, job, Authorization=f"Bearer {controller}") as other:
                assert receive(other).header["role"] == "controller"
                other.send("no JSON")
                assert receive(other).header["code"] == "bad-message"
                with pytest.raises(ConnectionClosed) as closed:
                    other.recv(gateway.DEADLINE_S)
                assert closed.value.rcvd is not None and closed.value.rcvd.code == 1008
        with pytest.raises(ConnectionClosed) as closed:
            connection.recv(gateway.DEADLINE_S)
    assert closed.value.rcvd is not None and closed.value.rcvd.code == 1012
    with page(reviewing, job, Authorization=f"Bearer {viewer}") as late:
        assert receive(late).header["code"] == "hub-not-there"


def test_the_socket_speaks_its_protocol_with_our_own_page_alone(
    job: gateway.GatewayJob, replay: scope_hub.ScopeHub, reviewing: gateway.Gateway, viewer: str
) -> None:
    with reviewing.client() as client:
        client.post("/login", data={"token": viewer})
        cookie = "; ".join(f"{name}={value}" for name, value in client.cookies.items())
    bearer = {"Authorization": f"Bearer {viewer}"}
    for protocols, headers in (
        ((), bearer),
        (("megatronapp.scope.2",), bearer),
        ((SUBPROTOCOL,), {}),
        ((SUBPROTOCOL,), {"Cookie": cookie, "Origin": "http://127.0.0.1:1"}),
    ):
        with pytest.raises(InvalidStatus) as refused, page(reviewing, job, protocols, **headers):
            pass
        assert refused.value.response.status_code == 403
    with page(reviewing, job, Cookie=cookie, Origin=reviewing.url) as mine:
        assert receive(mine).type == FrameType.SCOPE_HELLO
        with pytest.raises(ConnectionClosed):  # more than 4 KiB
            mine.send("x" * 5000)
            mine.recv(gateway.DEADLINE_S)


def test_other_sites_control_nothing_with_the_cookie(
    job: gateway.GatewayJob, replay: scope_hub.ScopeHub, reviewing: gateway.Gateway, controller: str
) -> None:
    elsewhere = {"Origin": "http://127.0.0.1:1", "Sec-Fetch-Site": "same-site"}

    def statuses(client: httpx.Client, headers: dict[str, str]) -> list[int]:
        requests = [(way, f"{job.path}/scope/{path}", body) for way, path, body in CONTROL]
        return [client.request(way, path, json=body, headers=headers).status_code for way, path, body in requests]

    with reviewing.client() as client:
        client.post("/login", data={"token": controller})
        assert statuses(client, elsewhere) == [403] * len(CONTROL)
        assert replay.hub.scope.probe_client.actions.all() == []
        assert statuses(client, {"Origin": reviewing.url}) == [409, 409, 200, 409, 409, 404], (
            "a replay can only be turned"
        )
