"""MegaScope through the gateway, as users of a cluster see it: a real API server, gateway and hubs, and Chromium."""

import dataclasses
import io
import pathlib
import urllib.parse
from collections.abc import Callable, Iterator
from typing import Any

import gateway
import kube
import numpy as np
import playwright.sync_api as pw
import pytest
import scope_hub
import scope_session

from megatronapp_common import frames
from megatronapp_common.scope.protocol import unpack

pytestmark = pytest.mark.browser
ROOT = pathlib.Path(__file__).parents[2]
NAMESPACE = "team"
LAYER, HEAD = 1, 2


@dataclasses.dataclass(frozen=True)
class ScopeCluster:
    """A gateway with the built page, a job whose hub plays a session, and one whose model generates."""

    entrance: gateway.Gateway
    recorded: gateway.GatewayJob
    serving: gateway.GatewayJob
    hub: scope_hub.ScopeHub
    """Hub of the job that serves."""
    viewer: str
    controller: str
    recording: scope_session.Recording

    def entry(self, token: str, job: gateway.GatewayJob, **selection: Any) -> str:
        """Address that logs a browser in once, as `megatronapp ui` makes it, at a panel of MegaScope."""
        with self.entrance.client(token) as client:
            ticket = client.post("/api/v1/tickets").raise_for_status().json()["ticket"]
        return f"{self.view(job, **selection)}#code={ticket}"

    def view(self, job: gateway.GatewayJob, **selection: Any) -> str:
        """Address of a panel."""
        query = {"job": f"{job.namespace}/{job.name}", "page": "scope", **selection}
        return f"{self.entrance.url}/?{urllib.parse.urlencode(query)}"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScopeCluster]:
    folder = tmp_path_factory.mktemp("gateway")
    recording = scope_session.record()
    session = folder / "tiny.scope"
    session.write_bytes(scope_session.session(recording))
    with kube.control_plane(folder) as plane:
        done = plane.kubectl("apply", "--server-side", "-f", str(ROOT / "crds" / "megatronjob.yaml"))
        assert done.returncode == 0, done.stderr
        with plane.client() as client:
            gateway.wait_for(lambda: client.get("/apis/megatronapp.io/v1alpha1/megatronjobs").is_success)
        gateway.create(plane, "/api/v1/namespaces", {"metadata": {"name": NAMESPACE}})
        recorded, serving = (gateway.make_job(plane, NAMESPACE, name) for name in ("recorded", "serving"))
        tokens = {
            "viewer": gateway.account(plane, NAMESPACE, "viewer", grants=[gateway.on_jobs("get", "list")]),
            "controller": gateway.account(plane, NAMESPACE, "jane", grants=[gateway.on_jobs("get", "list", "update")]),
        }
        with (
            gateway.gateway(plane, tmp_path_factory.mktemp("pages"), built=ROOT / "frontend" / "dist") as entrance,
            scope_hub.replaying(recorded, session, port=entrance.hub_port, key=entrance.key),
            scope_hub.generating(serving, recording, port=entrance.hub_port, key=entrance.key) as hub,
        ):
            yield ScopeCluster(entrance, recorded, serving, hub, recording=recording, **tokens)


def keep(answers: list[pw.Response]) -> Callable[[pw.Response], None]:
    """Record answers; Playwright asks for a function that was written."""

    def take(answer: pw.Response) -> None:
        answers.append(answer)

    return take


def saved(page: pw.Page, card: str, name: str) -> bytes:
    """The file that a button of a panel saves."""
    with page.expect_download() as download:
        page.get_by_role("region", name=card).get_by_role("button", name=name, exact=True).click()
    return pathlib.Path(download.value.path()).read_bytes()


def test_a_viewer_sees_attention_and_probabilities_and_takes_the_numbers_home(
    own_page: pw.Page, cluster: ScopeCluster
) -> None:
    answers: list[pw.Response] = []
    own_page.on("response", keep(answers))
    recording = cluster.recording
    own_page.goto(cluster.entry(cluster.viewer, cluster.recorded, view="attention", layer=LAYER, head=HEAD))
    pw.expect(own_page.get_by_test_id("run-state")).to_contain_text("Done: 8 new tokens")
    pw.expect(own_page.get_by_test_id("attention-map")).to_be_visible()
    assert "code=" not in own_page.url
    exact = recording.sites[0]["attention"][LAYER, HEAD]
    npy = np.load(io.BytesIO(saved(own_page, f"Layer {LAYER}, head {HEAD}", "NPY")))
    np.testing.assert_array_equal(npy[: len(exact), : exact.shape[1]], exact)
    lines = saved(own_page, f"Layer {LAYER}, head {HEAD}", "CSV").decode().splitlines()
    assert len(lines) > len(exact)
    (answer, *_) = (answer for answer in answers if "/attention/" in answer.url)
    (tile,) = unpack(frames.decode(answer.body()))
    assert (answer.status, tile.name, tile.data.shape) == (200, "0,0", (len(exact), len(exact)))
    (table, *_) = (answer for answer in answers if "format=csv" in answer.url)
    assert table.headers["content-disposition"].startswith("attachment;")
    own_page.keyboard.press("3")
    pw.expect(own_page.get_by_test_id("candidates")).to_be_visible()
    assert {answer.url.split("/api/")[0] for answer in answers if "/api/" in answer.url} == {cluster.entrance.url}


def test_a_viewer_sees_why_generating_is_disabled_and_an_editor_generates(
    page: pw.Page, chromium: pw.Browser, cluster: ScopeCluster
) -> None:
    page.goto(cluster.entry(cluster.viewer, cluster.serving))
    generate = page.get_by_role("button", name="Generate")
    pw.expect(page.get_by_test_id("why-not")).to_contain_text("You may view, but not generate")
    pw.expect(generate).to_be_disabled()
    context = chromium.new_context()
    jane = context.new_page()
    jane.goto(cluster.entry(cluster.controller, cluster.serving))
    pw.expect(jane.get_by_test_id("why-not")).to_have_count(0)
    jane.get_by_label("Prompt").first.fill("The sea ")
    jane.get_by_role("button", name="Generate").click()
    rank_zero = cluster.hub.rank_zero
    assert rank_zero is not None
    gateway.wait_for(lambda: any(path == "runs" for _, path, _ in rank_zero.requests))
    scope_hub.generate(cluster.hub, cluster.recording)
    for shown in (jane, page):
        pw.expect(shown.get_by_test_id("run-state")).to_contain_text("Done: 8 new tokens")
    with cluster.entrance.client(cluster.viewer) as client:
        actions = client.get(f"{cluster.serving.path}/summary").json()["actions"]
    assert [action["who"] for action in actions] == [f"system:serviceaccount:{NAMESPACE}:jane"]
    context.close()
