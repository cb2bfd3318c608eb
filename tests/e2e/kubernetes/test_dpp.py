"""The example of MegaDPP on a real node: trained to its end; its plan in the status, the panel's numbers at the hub."""

from collections.abc import Iterator

import pytest
from cluster.jobs import LONG_S, E2eJob, example, space
from cluster.runtime import Cluster

pytestmark = pytest.mark.timeout(3600)  # the first test brings the cluster up
TRANSFERS = {(0, 2), (2, 0), (1, 3), (3, 1)}
"""Neighbours in the pipelines of ranks 0, 2 and 1, 3."""


@pytest.fixture(scope="module")
def job(cluster: Cluster, release: str) -> Iterator[E2eJob]:
    with space(cluster, "dpp") as namespace:
        yield E2eJob(cluster, namespace, example("dpp"))


def test_the_example_trains_to_its_end_under_a_chosen_plan(job: E2eJob) -> None:
    job.wait(lambda: job.status().get("phase") == "Succeeded", "the end", 2 * LONG_S)
    job.wait(lambda: job.status()["progress"]["iteration"] == 60, "the progress of the last step, which a poll brings")
    progress = job.status()["progress"]
    assert progress["totalIterations"] == 60
    before, chosen = progress["plans"][0], progress["plans"][-1]
    assert (before["schedule"], before["chosen"], before["microbatches"], before["chunks"]) == ("auto", False, 8, 2)
    assert chosen["chosen"] and chosen["simulatedSeconds"] > 0 and chosen["staticSeconds"] > 0


def test_the_hub_has_the_numbers_of_the_panel(job: E2eJob) -> None:
    view = job.hub("/api/v1/pipeline")
    assert view["stages"] == 2
    assert len(view["steps"]) == len(view["early"]) == len(view["bubble"]) > 40
    assert set(view["passes"]) == {4 * 3 * 8 * 2}, "F, B and W of 8 microbatches and 2 chunks on 4 ranks"
    period = view["plans"][-1]
    assert sum(period["steps"] for period in view["plans"]) > 40, "plans are compared again when steps become longer"
    assert all(0 < bubble < 1 for bubble in period["rankBubbles"])
    assert {(pair["source"], pair["destination"]) for pair in view["transfers"]} == TRANSFERS
    assert {pair["path"] for pair in view["transfers"]} == {"shared-memory"}
