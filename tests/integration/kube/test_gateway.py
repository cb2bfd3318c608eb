"""Gateway as a real process on a real API server: who may see what, and which answers of a real hub pass."""

import contextlib
import dataclasses
import pathlib
import re
from collections.abc import Iterator

import gateway
import httpx
import kube
import pytest
from shared_tls import SHARED_TLS
from websockets.exceptions import InvalidStatus
from websockets.sync.client import ClientConnection, connect

from megatronapp_common import frames
from megatronapp_common.frames import FrameType
from megatronapp_common.web.static_pages import ELSEWHERE_MARK
from megatronapp_common.web.tokens import TokenRole

VIEWER = gateway.on_jobs("get", "list")
FAULT = {"rank": 1, "kind": "compute", "factor": 2.0, "fromStep": 900, "steps": 3}


@contextlib.contextmanager
def live(at: gateway.Gateway, job: gateway.GatewayJob, **headers: str) -> Iterator[ClientConnection]:
    url = f"{at.url.replace('http', 'ws', 1)}{job.path}/live"
    how = {"proxy": None, "compression": None, "max_size": None, "open_timeout": gateway.DEADLINE_S}
    with connect(url, additional_headers=headers, **how) as connection:  # type: ignore[arg-type]
        yield connection


def test_a_user_sees_the_namespaces_that_rbac_gives_them(
    plane: kube.ControlPlane, namespace: str, reviewing: gateway.Gateway
) -> None:
    other = f"{namespace}-other"
    gateway.create(plane, "/api/v1/namespaces", {"metadata": {"name": other}})
    token = gateway.account(plane, namespace, "alice", grants=[VIEWER])
    mine, theirs = gateway.make_job(plane, namespace, "mine"), gateway.make_job(plane, other, "theirs")
    gateway.set_status(
        plane,
        mine,
        phase="Running",
        restarts=2,
        progress={"iteration": 5, "totalIterations": 9},
        slowRanks=[{"sentence": "Rank 1 is slow."}],
    )
    with reviewing.client(token) as client:
        # the list is two seconds old at most
        gateway.wait_for(lambda: '"restarts":2' in client.get("/api/v1/jobs").text)
        listed = client.get("/api/v1/jobs")
        answer = client.get(mine.path)
        refused = client.get(theirs.path)
        hidden = client.get(f"/api/v1/jobs/{other}/none")
        missing = client.get(f"/api/v1/jobs/{namespace}/none")
    assert listed.status_code == 200, listed.text
    assert [(job["namespace"], job["name"]) for job in listed.json()] == [(namespace, "mine")]
    assert answer.json() == listed.json()[0]
    assert answer.json()["findings"] == ["Rank 1 is slow."]
    assert (answer.json()["iteration"], answer.json()["totalIterations"], answer.json()["restarts"]) == (5, 9, 2)
    assert refused.status_code == 403
    alice = f"system:serviceaccount:{namespace}:alice"
    right = f"get megatronjobs.megatronapp.io 'theirs' in namespace '{other}'"
    assert refused.json()["message"] == f"{alice} may not {right}"
    assert hidden.json() == {**refused.json(), "message": refused.json()["message"].replace("theirs", "none")}
    assert missing.status_code == 404


def test_who_is_not_known_gets_nothing(plane: kube.ControlPlane, namespace: str, reviewing: gateway.Gateway) -> None:
    job = gateway.make_job(plane, namespace, "demo")
    for token in (None, "wrong", "ab" * 32, plane.tokens[kube.ADMIN] + "x"):
        with reviewing.client(token) as client:
            for method, path in (
                ("GET", "/api/v1/jobs"),
                ("GET", f"{job.path}/job"),
                ("POST", f"{job.path}/faults"),
                ("POST", "/api/v1/tickets"),
            ):
                answer = client.request(method, path)
                assert answer.status_code == 401, (method, path, token)
                assert answer.json()["code"] == "log-in"
                assert "megatronapp ui" in answer.json()["hint"]


def test_a_viewer_reads_the_hub_and_only_who_may_update_makes_ranks_slow(
    plane: kube.ControlPlane, namespace: str, reviewing: gateway.Gateway, tmp_path: pathlib.Path
) -> None:
    job = gateway.make_job(plane, namespace, "demo")
    viewer = gateway.account(plane, namespace, "viewer", grants=[VIEWER])
    runner = gateway.account(plane, namespace, "runner", grants=[gateway.on_jobs("update")])
    with gateway.hub(job, tmp_path / "hub", port=reviewing.hub_port, key=reviewing.key):
        with reviewing.client(viewer) as client:
            state = client.get(f"{job.path}/job")
            heat = client.get(f"{job.path}/heatmap", params={"metric": "step", "from": 2, "to": 4, "token": "x"})
            wrong = client.get(f"{job.path}/heatmap", params={"metric": "nonsense"})
            assert client.post(f"{job.path}/faults", json=FAULT).status_code == 403
            assert client.delete(f"{job.path}/faults/manifest-0").status_code == 403
            agent = client.get(f"{job.path}/agent")
        with reviewing.client(runner) as client:
            given = client.post(f"{job.path}/faults", json=FAULT)
            ended = client.delete(f"{job.path}/faults/{given.json()['id']}")
            assert client.get(f"{job.path}/job").status_code == 403
        with live(reviewing, job, Authorization=f"Bearer {viewer}") as connection:
            message = connection.recv(gateway.DEADLINE_S)
            assert isinstance(message, bytes)
            snapshot = frames.decode(message)
    assert state.status_code == 200, state.text
    assert (state.json()["name"], state.json()["uid"], state.json()["worldSize"]) == ("demo", job.uid, 2)
    assert heat.json()["steps"] == [2, 3, 4]
    assert wrong.status_code == 422
    assert wrong.json()["code"] == "invalid-request"
    assert agent.status_code == 404
    assert given.status_code in {200, 201}, given.text
    assert ended.is_success
    assert snapshot.type == FrameType.SNAPSHOT
    assert snapshot.header["uid"] == job.uid


def test_the_live_socket_needs_the_right_and_our_own_page(
    plane: kube.ControlPlane, namespace: str, reviewing: gateway.Gateway
) -> None:
    job = gateway.make_job(plane, namespace, "demo", hub=False)
    viewer = gateway.account(plane, namespace, "viewer", grants=[VIEWER])
    stranger = gateway.account(plane, namespace, "stranger")
    with reviewing.client() as client:
        client.post("/login", data={"token": viewer})
        cookie = "; ".join(f"{name}={value}" for name, value in client.cookies.items())
    for headers in (
        {},
        {"Authorization": f"Bearer {stranger}"},
        {"Cookie": cookie, "Origin": "http://127.0.0.1:1"},
    ):
        with pytest.raises(InvalidStatus) as refused, live(reviewing, job, **headers):
            pass
        assert refused.value.response.status_code == 403
    sly = dataclasses.replace(job, name="demo%3Fa=1")
    with pytest.raises(InvalidStatus), live(reviewing, sly, Authorization=f"Bearer {viewer}"):
        pass
    with live(reviewing, job, Cookie=cookie, Origin=reviewing.url) as connection:
        message = connection.recv(gateway.DEADLINE_S)
    assert isinstance(message, bytes)
    event = frames.decode(message)
    assert (event.type, event.header["code"]) == (FrameType.ERROR, "no-hub")


def test_a_browser_logs_in_once_and_its_token_is_nowhere(
    plane: kube.ControlPlane, namespace: str, reviewing: gateway.Gateway
) -> None:
    gateway.make_job(plane, namespace, "demo")
    token = gateway.account(plane, namespace, "alice", grants=[VIEWER])
    with reviewing.client(token) as program:
        ticket = program.post("/api/v1/tickets").json()["ticket"]
    with reviewing.client() as first, reviewing.client() as second, reviewing.client() as third:
        by_ticket = first.post("/login", data={"token": ticket}, headers={"Origin": reviewing.url})
        again = second.post("/login", data={"token": ticket}, headers={"Origin": reviewing.url})
        by_form = third.post("/login", data={"token": token}, headers={"Origin": reviewing.url})
        assert first.get("/api/v1/jobs").status_code == 200
        assert second.get("/api/v1/jobs").status_code == 401
        assert third.get("/api/v1/jobs").status_code == 200
        elsewhere = {"Origin": "http://127.0.0.1:1"}
        assert third.delete("/api/v1/session", headers=elsewhere).status_code == 403
        assert third.post("/login", data={"token": token}, headers=elsewhere).status_code == 403
        assert third.delete("/api/v1/session", headers={"Origin": reviewing.url}).status_code == 204
        assert third.get("/api/v1/jobs").status_code == 401
    assert (by_ticket.status_code, by_ticket.headers["location"]) == (303, "./")
    assert again.status_code == 401
    assert by_form.status_code == 303
    cookie = by_form.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    assert token not in cookie
    assert token not in reviewing.log.read_text(encoding="utf-8")


def test_a_token_that_opens_nothing_begins_no_session(reviewing: gateway.Gateway) -> None:
    with reviewing.client() as browser:
        for token in ("junk", "x" * 9000, ""):
            by_form = browser.post("/login", data={"token": token}, headers={"Origin": reviewing.url})
            assert by_form.status_code == 401
            assert 'action="login"' in by_form.text
        assert not browser.cookies
    with reviewing.client("x" * 9000) as program:
        assert "more than 8192 bytes" in program.get("/api/v1/jobs").json()["message"]


def test_no_address_logs_in_and_a_page_knows_its_cross_site_navigation(
    plane: kube.ControlPlane, namespace: str, reviewing: gateway.Gateway
) -> None:
    token = gateway.account(plane, namespace, "mallory", grants=[VIEWER])
    with reviewing.client() as browser:
        for site, elsewhere in (("cross-site", 1), ("same-site", 1), ("odd", 1), ("none", 0), ("same-origin", 0)):
            answer = browser.get("/", params={"token": token}, headers={"Sec-Fetch-Site": site})
            assert answer.status_code == 200
            assert answer.text.count(ELSEWHERE_MARK) == elsewhere
            assert not browser.cookies
            browser.cookies.clear()


def test_without_reviews_only_tokens_of_jobs_open_and_each_only_its_own(
    plane: kube.ControlPlane, namespace: str, by_tokens: gateway.Gateway, tmp_path: pathlib.Path
) -> None:
    first, second = gateway.make_job(plane, namespace, "one"), gateway.make_job(plane, namespace, "two", hub=False)
    alice = gateway.account(plane, namespace, "alice", grants=[VIEWER])
    with by_tokens.client(alice) as client:
        assert client.get("/api/v1/jobs").status_code == 401
    with (
        gateway.hub(first, tmp_path / "hub", port=by_tokens.hub_port, key=by_tokens.key),
        by_tokens.client(by_tokens.job_token(first.uid)) as client,
    ):
        gateway.wait_for(lambda: client.get("/api/v1/jobs").is_success)
        assert [job["name"] for job in client.get("/api/v1/jobs").json()] == ["one"]
        assert client.get(f"{first.path}/job").json()["uid"] == first.uid
        viewed = client.post(f"{first.path}/faults", json=FAULT)
        assert (viewed.status_code, viewed.json()["code"]) == (403, "needs-controller")
        with by_tokens.client(by_tokens.job_token(first.uid, TokenRole.CONTROLLER)) as owner:
            assert owner.post(f"{first.path}/faults", json=FAULT).is_success
        refused, absent = client.get(f"{second.path}/job"), client.get(f"/api/v1/jobs/{namespace}/absent/job")
    assert refused.status_code == absent.status_code == 403
    assert refused.json()["message"].replace("two", "absent") == absent.json()["message"]
    with by_tokens.client() as browser:
        for job in (first, second):
            browser.post("/login", data={"token": by_tokens.job_token(job.uid)})
        assert [job["name"] for job in browser.get("/api/v1/jobs").json()] == ["one", "two"]
        assert browser.get("/").status_code == 404


def test_the_page_is_served_by_the_gateway_itself(reviewing: gateway.Gateway) -> None:
    with reviewing.client() as client:
        for path in ("/", "/index.html", "/jobs"):
            page = client.get(path)
            assert '<meta name="megatronapp-server" content="gateway" />' in page.text
            assert "default-src 'self'" in page.headers["content-security-policy"]
            assert page.headers["x-content-type-options"] == "nosniff"
        assert "immutable" in client.get("/assets/app-1.js").headers["cache-control"]
        for path in ("/../gateway.log", "/%2e%2e/gateway.log", "/api/v1/none", "/assets/none.js"):
            answer = client.get(path)
            assert answer.status_code == 404
            assert set(answer.json()) == {"code", "message", "hint"}


@pytest.mark.parametrize(
    "path", ["/%00", "/" + "a" * 300, "/" + "a/" * 3000, "/%ff", "/..%2f..%2fetc%2fpasswd", "/a%5c..%5cb"]
)
def test_no_path_is_too_odd(reviewing: gateway.Gateway, path: str) -> None:
    with reviewing.client() as client:
        answer = client.get(path)
    assert answer.status_code == 404
    assert set(answer.json()) == {"code", "message", "hint"}


def test_a_gateway_redirects_to_no_alias(reviewing: gateway.Gateway) -> None:
    """Check a name below `localhost`: the gateway cannot know which processes of the browser's machine answer to it."""
    opens = {"Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}
    port = reviewing.url.rpartition(":")[2]
    with reviewing.client() as client:
        for host in ("127.0.0.1", "localhost", "[::1]", "127.0.0.5", "gateway-1.localhost"):
            assert client.get("/jobs?a=1", headers=opens | {"Host": f"{host}:{port}"}).status_code == 200


def test_a_page_of_another_port_or_neighbour_reads_nothing_with_the_cookie(
    plane: kube.ControlPlane, namespace: str, reviewing: gateway.Gateway
) -> None:
    token = gateway.account(plane, namespace, "alice", grants=[VIEWER])
    with reviewing.client() as browser:
        browser.post("/login", data={"token": token})
        for site, status in (("same-site", 403), ("cross-site", 403), ("same-origin", 200), ("none", 200)):
            answer = browser.get("/api/v1/jobs", headers={"Sec-Fetch-Site": site})
            assert answer.status_code == status, site
    with reviewing.client(token) as program:
        assert program.get("/api/v1/jobs", headers={"Sec-Fetch-Site": "cross-site"}).status_code == 200


def test_the_cookie_is_limited_to_this_host_with_tls(
    plane: kube.ControlPlane, namespace: str, reviewing: gateway.Gateway
) -> None:
    token = gateway.account(plane, namespace, "alice", grants=[VIEWER])
    tls = {"X-Forwarded-Proto": "https", "Host": "gateway.example"}
    with reviewing.client() as browser:
        made = browser.post("/login", data={"token": token}, headers=tls).headers["set-cookie"]
        name, _, value = made.partition(";")[0].partition("=")
        assert name.startswith("__Host-")
        assert "Secure" in made
        assert "Domain" not in made
        for scheme in ("https", "wss", "HTTPS", "https, http"):  # "wss": Traefik, of WebSockets
            shown = tls | {"X-Forwarded-Proto": scheme, "Cookie": f"{name}={value}"}
            assert browser.get("/api/v1/jobs", headers=shown).status_code == 200, scheme
        plain = tls | {"X-Forwarded-Proto": "http, https", "Cookie": f"{name}={value}"}
        assert browser.get("/api/v1/jobs", headers=plain).status_code == 401
        tossed = {"Cookie": f"{name.removeprefix('__Host-')}={value}"}  # as a neighbour of the host may set it
        assert browser.get("/api/v1/jobs", headers=tls | tossed).status_code == 401


def test_metrics_have_a_separate_port_and_name_no_users(
    plane: kube.ControlPlane, namespace: str, reviewing: gateway.Gateway
) -> None:
    job = gateway.make_job(plane, namespace, "demo", hub=False)
    token = gateway.account(plane, namespace, "alice", grants=[VIEWER])

    def metrics() -> str:
        at = f"http://127.0.0.1:{reviewing.metrics_port}"
        with httpx.Client(base_url=at, trust_env=False, verify=SHARED_TLS, timeout=gateway.DEADLINE_S) as client:
            assert client.get("/healthz").status_code == 200
            answer = client.get("/metrics")
            assert answer.status_code == 200  # some scrapers follow nothing
            return answer.text

    before = metrics()
    with reviewing.client(token) as client:
        client.get(f"{job.path}/job")
        client.get(f"/api/v1/jobs/{namespace}/other/job")
    with reviewing.client(f"unknown-{namespace}") as client:  # the review of a token is cached
        client.get("/api/v1/jobs")
        assert client.get("/metrics").status_code in {200, 404}
        assert "megatron_gateway" not in client.get("/metrics").text
    after = metrics()

    def grown(series: str) -> float:
        found = [re.search(rf"^{re.escape(series)} (\S+)$", text, re.MULTILINE) for text in (before, after)]
        old, new = (0.0 if match is None else float(match[1]) for match in found)
        return new - old

    hub = "/api/v1/jobs/{namespace}/{name}/{path:path}"
    assert grown(f'megatron_gateway_requests_total{{code="503",route="{hub}"}}') == 1
    assert grown(f'megatron_gateway_requests_total{{code="404",route="{hub}"}}') == 1
    assert grown('megatron_gateway_requests_total{code="401",route="/api/v1/jobs"}') == 1
    assert grown('megatron_gateway_refusals_total{code="log-in"}') == 1
    assert grown('megatron_gateway_refusals_total{code="no-hub"}') == 1
    assert grown('megatron_gateway_api_requests_total{code="201",resource="tokenreviews",verb="post"}') >= 2
    assert "megatron_gateway_sockets_limit 64.0" in after
    assert not [name for name in (namespace, "alice", token) if name in after]


def test_a_hub_is_that_of_this_life_of_the_job(
    plane: kube.ControlPlane, namespace: str, reviewing: gateway.Gateway
) -> None:
    token = gateway.account(plane, namespace, "alice", grants=[VIEWER])
    job = gateway.make_job(plane, namespace, "demo", hub=False)
    gateway.make_pod(plane, job, "demo-hub", address=job.address, owner="00000000-0000-0000-0000-000000000000")
    with reviewing.client(token) as client:
        answer = client.get(f"{job.path}/job")
    assert (answer.status_code, answer.json()["code"]) == (503, "no-hub")


def test_a_terminating_hub_receives_no_request(
    plane: kube.ControlPlane, namespace: str, reviewing: gateway.Gateway
) -> None:
    """Check that no request is sent: its address may be given to another user's pod at any moment."""
    token = gateway.account(plane, namespace, "alice", grants=[VIEWER])
    job = gateway.make_job(plane, namespace, "demo", hub=False)
    gateway.make_pod(plane, job, "demo-hub", address=job.address, nodeName="none")  # a kubelet would end it
    with plane.client() as client:
        assert client.delete(f"/api/v1/namespaces/{namespace}/pods/demo-hub").is_success
    with reviewing.client(token) as client:
        answer = client.get(f"{job.path}/job")
    assert (answer.status_code, answer.json()["code"]) == (503, "no-hub")
    assert "is ending" in answer.json()["message"]
