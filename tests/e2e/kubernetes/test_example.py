"""The README's path on real nodes: the chart, its own test, the example trained and traced, its slow rank named."""

import pathlib
import re
from collections.abc import Iterator

import playwright.sync_api as pw
import pytest
import yaml
from cluster import chart, gateways
from cluster.jobs import LONG_S, E2eJob, example, space
from cluster.runtime import Cluster

pytestmark = pytest.mark.timeout(3600)  # the first test brings the cluster up
SLOW_RANK = 1
STEPS = 400
"""More than the example's 120: its rank stays slow while five places are searched for it, one after the other."""
PAGE_MS = 60_000
MONITORS = "monitoring.coreos.com/v1"


@pytest.fixture(scope="module")
def job(cluster: Cluster, release: str) -> Iterator[E2eJob]:
    document = example()
    document["spec"]["training"]["trainIters"] = STEPS
    document["spec"]["faults"][0]["steps"] = STEPS - 60
    with space(cluster, "example") as namespace:
        yield E2eJob(cluster, namespace, document)


def test_chart_finds_itself_well(cluster: Cluster, release: str) -> None:
    assert "Succeeded" in chart.helm(cluster, "test", release)


def test_example_trains_on_both_nodes(job: E2eJob) -> None:
    job.wait(lambda: job.status().get("phase") == "Running", "training")
    workers = job.pods()
    assert [item["metadata"]["name"] for item in workers] == [f"{job.name}-worker-0", f"{job.name}-worker-1"]
    assert {item["spec"]["nodeName"] for item in workers} == {"node-1", "node-2"}


def test_slow_rank_is_named_everywhere(cluster: Cluster, job: E2eJob, release: str) -> None:
    job.wait(lambda: job.status().get("slowRanks"), "a slow rank in the status")
    verdict = job.status()["slowRanks"][0]
    assert (verdict["subject"]["ranks"], verdict["cause"]) == ([SLOW_RANK], "compute")
    condition = next(condition for condition in job.status()["conditions"] if condition["type"] == "SlowNodeDetected")
    assert condition["status"] == "True" and "ank 1" in condition["message"], condition
    cluster.wait(lambda: "SlowNodeDetected" in job.events(), "the event SlowNodeDetected")
    line = cluster.kubectl("get", "mgj", job.name, "-n", job.namespace).splitlines()[1]
    assert job.status()["slowNode"] in line, line

    suspect = r'^megascan_suspect_info\{cause="compute",.*rank="1",state="(confirmed|recovering)"\} 1\.0$'
    assert re.search(suspect, scraped(cluster, "hubs"), re.MULTILINE)
    slow = rf'^megatron_job_slow_node\{{cause="compute",name="{job.name}",namespace="{job.namespace}",node="\S+"\}} '
    cluster.wait(lambda: re.search(slow, scraped(cluster, "operator"), re.MULTILINE), "the operator's metric")


def scraped(cluster: Cluster, what: str) -> str:
    """Return what a Prometheus discovers by one of the chart's ServiceMonitors."""
    text = chart.helm(cluster, "template", chart.HOME, chart.CHART, "--kube-version=1.35", f"--api-versions={MONITORS}")
    monitors = [item for item in yaml.safe_load_all(text) if item and item["kind"] == "ServiceMonitor"]
    spec = next(item["spec"] for item in monitors if item["metadata"]["name"] == f"{chart.HOME}-{what}")
    labels = ",".join(f"{name}={value}" for name, value in spec["selector"]["matchLabels"].items())
    slices = cluster.get("endpointslices", "-A", "-l", labels)["items"]
    assert slices, f"no Service has the labels {labels}"
    port_name = spec["endpoints"][0]["port"]
    (port,) = {port["port"] for slice in slices for port in slice["ports"] if port["name"] == port_name}
    addresses = [address for slice in slices for end in slice["endpoints"] for address in end["addresses"]]
    fetch = f"import urllib.request as r;print(r.urlopen('http://{addresses[0]}:{port}/metrics').read().decode())"
    return cluster.inside("python3", "-c", fetch).stdout


def test_page_by_port_forward_and_a_token_of_the_cluster(
    cluster: Cluster, job: E2eJob, page: pw.Page, complaints: list[str], tmp_path: pathlib.Path
) -> None:
    token = gateways.person(cluster, job.namespace, "view")
    with gateways.forwarded(cluster) as address:
        page.goto(address)
        page.get_by_label("Token").fill(token, timeout=PAGE_MS)
        page.get_by_role("button", name="Log in").click()
        row = page.get_by_role("row").filter(has_text=job.name)
        pw.expect(row).to_contain_text(job.namespace, timeout=PAGE_MS)
        assert all("401" in text for text in complaints), complaints  # of the page before the login, all of them by now
        complaints.clear()
        row.get_by_role("link", name=job.name).click()
        see_job(page, job, tmp_path)


def test_page_by_megatronapp_ui(cluster: Cluster, job: E2eJob, page: pw.Page, tmp_path: pathlib.Path) -> None:
    with gateways.opened(cluster, job) as address:
        page.goto(address)
        see_job(page, job, tmp_path)
        assert "code=" not in page.url


def see_job(page: pw.Page, job: E2eJob, folder: pathlib.Path) -> None:
    """The page of the job, live, with the rank that is or was slow; left before the way to it is closed."""
    pw.expect(page.get_by_role("heading", name=job.name)).to_be_visible(timeout=PAGE_MS)
    pw.expect(page.get_by_test_id("connection")).to_have_text("Live", timeout=PAGE_MS)
    pw.expect(page.get_by_test_id("heatmap")).to_be_visible(timeout=PAGE_MS)
    pw.expect(page.get_by_test_id("verdict")).to_contain_text(f"Rank {SLOW_RANK}", timeout=PAGE_MS)
    pw.expect(page.get_by_test_id("timeline")).to_be_visible(timeout=PAGE_MS)
    page.screenshot(path=folder / "page.png", full_page=True)
    pw.expect(page.get_by_test_id("connection")).to_have_text("Live")
    pw.expect(page.locator("[data-state=stale], [role=alert]")).to_have_count(0)
    page.goto("about:blank")


def test_example_ends(cluster: Cluster, job: E2eJob) -> None:
    job.wait(lambda: job.status().get("phase") == "Succeeded", "the end", 2 * LONG_S)
    job.wait(lambda: job.status()["progress"]["iteration"] == STEPS, "the progress of the last step")
    assert job.status()["progress"]["totalIterations"] == STEPS
