"""Budget and annotations that keep the workers of a gang from being evicted."""

import pathlib

import pytest
import rendered

from megatronapp_common.names import ANNOTATION_SAVE
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


@pytest.mark.parametrize("restart", ["Pods", "InPlace"])
def test_the_launcher_reads_requests_for_a_checkpoint_where_the_kubelet_writes_them(restart: str) -> None:
    volume = {"claim": "runs", "mountPath": "/runs"}
    checkpoint = {"save": "/runs/a", "saveInterval": 9, "volume": volume}
    policy = {"disruption": "CheckpointFirst", "restart": restart}
    pod = rendered.make_worker(rendered.make_job({"runPolicy": policy, "checkpoint": checkpoint}))
    path = pathlib.PurePath(rendered.environment(pod)["MEGATRONAPP_SAVE_FILE"])
    (mount,) = [entry for entry in rendered.container(pod)["volumeMounts"] if entry["mountPath"] == str(path.parent)]
    (source,) = [entry["downwardAPI"] for entry in pod["spec"]["volumes"] if entry["name"] == mount["name"]]
    field = {"fieldPath": f"metadata.annotations['{ANNOTATION_SAVE}']"}
    assert source["items"] == [{"path": path.name, "fieldRef": field}] and mount["readOnly"]
    assert not PROTECTED.keys() & pod["metadata"]["annotations"].keys(), "autoscalers may choose its node"
    other = rendered.make_worker(rendered.make_job({"runPolicy": {"disruption": "Protect"}}))
    assert "MEGATRONAPP_SAVE_FILE" not in rendered.environment(other)
