"""One real cluster for all tests of this folder; they run where MEGATRONAPP_E2E is set, as `make e2e` does.

MEGATRONAPP_E2E=standing takes the cluster that `python -m cluster up` brought up, and leaves it standing.
"""

import os
from collections.abc import Iterator

import playwright.sync_api as pw
import pytest
from cluster import chart, gateways, host
from cluster.jobs import space
from cluster.runtime import Cluster, remains, running, standing

REQUESTED = os.environ.get("MEGATRONAPP_E2E", "")
collect_ignore_glob = [] if REQUESTED else ["test_*.py"]


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    if REQUESTED == "standing":
        yield standing()
        return
    if reason := host.missing():
        pytest.skip(f"{reason} (the cluster takes {host.DISK_GB} GB and {host.MINUTES} minutes)")
    with running() as cluster:
        yield cluster
    assert remains() == []


@pytest.fixture
def namespace(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[str]:
    name = request.node.name.removeprefix("test_").replace("_", "-").replace("[", "-").replace("]", "")[:40]
    with space(cluster, name) as made:
        yield made


@pytest.fixture(scope="session")
def release(cluster: Cluster) -> str:
    """The chart, in a namespace under the restricted standard."""
    cluster.namespace(chart.HOME)
    chart.install(cluster)
    return chart.HOME


@pytest.fixture(scope="module")
def browser(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[pw.Browser]:
    with gateways.chromium(cluster, tmp_path_factory.mktemp("browser")) as browser:
        yield browser


@pytest.fixture
def complaints() -> list[str]:
    """Complaints of the page; those left at the end of a test fail it."""
    return []


@pytest.fixture
def page(browser: pw.Browser, complaints: list[str]) -> Iterator[pw.Page]:
    context = browser.new_context(viewport={"width": 1440, "height": 900}, reduced_motion="reduce")
    shown = context.new_page()
    shown.on("pageerror", lambda error: complaints.append(str(error)))
    shown.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
    yield shown
    context.close()
    assert complaints == []
