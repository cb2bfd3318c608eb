"""Budget and annotations that keep the workers of a gang from being evicted."""

import pytest
import rendered

from megatronapp_operator.backends.kubernetes import render
from megatronapp_operator.backends.kubernetes.render.disruption import PROTECTED
from megatronapp_operator.backends.kubernetes.render.settings import AttemptSettings

PROTECT: rendered.Object = {"runPolicy": {"disruption": "Protect", "restart": "InPlace", "spares": 1}}


def chooses(selector: rendered.Object, labels: dict[str, str]) -> bool:
    absent = [entry["key"] for entry in selector["matchExpressions"] if entry["operator"] == "DoesNotExist"]
    return selector["matchLabels"].items() <= labels.items() and not labels.keys() & set(absent)


def test_a_budget_counts_the_workers_of_its_job_and_no_other_pod() -> None:
    job = rendered.make_job(PROTECT)
    owner, settings = rendered.owner_of(job), rendered.with_settings()
    _, budget = render.disruption_budget(job, owner)
    assert budget["spec"]["minAvailable"] == job.world.nodes == 2
    assert "maxUnavailable" not in budget["spec"]
    chosen = budget["spec"]["selector"]
    for index in range(2):
        assert chooses(chosen, rendered.make_worker(job, index)["metadata"]["labels"])
    spare = render.worker_pod(job, owner, AttemptSettings(number=0), 2, settings, spare=True)
    other = render.worker_pod(job, rendered.owner_of(job, "another"), AttemptSettings(number=0), 0, settings)
    hub = render.hub_pod(job, owner, settings, starts=1)
    for pod in (spare, other, hub):
        assert not chooses(chosen, pod["metadata"]["labels"])


@pytest.mark.parametrize(("disruption", "annotated"), [("Allow", False), ("Protect", True)])
def test_autoscalers_spare_the_nodes_of_a_protected_gang_alone(disruption: str, annotated: bool) -> None:
    annotations = rendered.make_worker(rendered.make_job({"runPolicy": {"disruption": disruption}}))["metadata"]
    assert (PROTECTED.items() <= annotations["annotations"].items()) is annotated


def test_annotations_of_the_template_replace_ours() -> None:
    (name, other) = ("karpenter.sh/do-not-disrupt", "cluster-autoscaler.kubernetes.io/safe-to-evict")
    template = {"metadata": {"annotations": {name: "false"}}}
    job = rendered.make_job({**PROTECT, "podTemplate": template})
    found = rendered.make_worker(job)["metadata"]["annotations"]
    assert (found[name], found[other]) == ("false", "false")
