"""Properties of a job that schedulers of gangs see."""

import fractions

import pytest
import rendered
from hypothesis import given
from hypothesis import strategies as st

from megatronapp_common.job import MegatronJob
from megatronapp_common.job.api.quantity import quantity_value
from megatronapp_operator.backends.kubernetes import render
from megatronapp_operator.backends.kubernetes.client.resources import KUBERNETES_POD_GROUPS, Resource
from megatronapp_operator.backends.kubernetes.render import AttemptSettings
from megatronapp_operator.backends.kubernetes.render.pod.quantities import pod_requests, text_of


def group(job: MegatronJob, attempt: int = 0) -> rendered.Object | None:
    objects = render.gang_objects(job, rendered.owner_of(job), AttemptSettings(number=attempt), rendered.SETTINGS)
    found = [obj for _, obj in objects if obj["kind"] == "PodGroup"]
    assert objects[-1][1] in found or not found, "the pod group comes last"
    return found[0] if found else None


def test_a_job_without_a_gang_has_no_marks() -> None:
    job = rendered.make_job()
    assert group(job) is None
    pod = rendered.make_worker(job)
    assert "schedulerName" not in pod["spec"]
    assert not [name for name in pod["metadata"]["labels"] if "kueue" in name or "scheduling" in name]


def test_kueue_sees_a_group_of_plain_pods() -> None:
    job = rendered.make_job(rendered.VARIETY["kueue"])
    assert group(job) is None
    meta = rendered.make_worker(job, 1, attempt=3)["metadata"]
    assert meta["labels"]["kueue.x-k8s.io/queue-name"] == "team-a"
    assert meta["labels"]["kueue.x-k8s.io/pod-group-name"] == "gpt-a3"
    marks = {name: value for name, value in meta["annotations"].items() if name.startswith("kueue.x-k8s.io/")}
    assert marks == {
        "kueue.x-k8s.io/pod-group-total-count": "2",
        "kueue.x-k8s.io/retriable-in-group": "false",
        "kueue.x-k8s.io/pod-group-pod-index-label": "megatronapp.io/replica-index",
        "kueue.x-k8s.io/podset-preferred-topology": "example.com/rack",
    }
    assert meta["labels"]["megatronapp.io/replica-index"] == "1"


def shape(pod: rendered.Object) -> rendered.Object:
    """Return what Kueue distinguishes pod sets by; a workload may have few of them."""
    parts = ("nodeSelector", "affinity", "tolerations", "runtimeClassName", "topologySpreadConstraints", "overhead")
    containers = [
        [
            (container.get("resources", {}).get("requests"), container.get("ports"))
            for container in pod["spec"].get(kind, [])
        ]
        for kind in ("containers", "initContainers")
    ]
    return {"containers": containers, **{name: pod["spec"].get(name) for name in parts}}


@pytest.mark.parametrize("kind", rendered.VARIETY)
def test_workers_have_the_same_shape_within_each_group(kind: str) -> None:
    job = rendered.make_job(rendered.VARIETY[kind])
    for alike in job.world.worker_groups:
        shapes = [shape(rendered.make_worker(job, index, excluded=("a",))) for index in alike.indices]
        assert all(shape == shapes[0] for shape in shapes)


@pytest.mark.parametrize(
    ("kind", "scheduler", "labels", "annotations"),
    [
        ("volcano", "volcano", {}, {"scheduling.k8s.io/group-name": "gpt-a4"}),
        ("coscheduling", "scheduler-plugins-scheduler", {"scheduling.x-k8s.io/pod-group": "gpt-a4"}, {}),
        (
            "kai",
            "kai-scheduler",
            {"kai.scheduler/queue": "team-a"},
            {"pod-group-name": "gpt-a4", "kai.scheduler/skip-podgrouper": "true"},
        ),
    ],
)
def test_pods_name_their_group(kind: str, scheduler: str, labels: dict[str, str], annotations: dict[str, str]) -> None:
    job = rendered.make_job(rendered.VARIETY[kind])
    pod, made = rendered.make_worker(job, attempt=4), group(job, attempt=4)
    assert made is not None
    assert made["metadata"]["name"] == "gpt-a4"
    assert pod["spec"]["schedulerName"] == scheduler
    assert labels.items() <= pod["metadata"]["labels"].items()
    assert annotations.items() <= pod["metadata"]["annotations"].items()


def test_another_name_of_the_scheduler() -> None:
    job = rendered.make_job({**rendered.VARIETY["volcano"], "schedulerName": "volcano-2"})
    assert rendered.make_worker(job)["spec"]["schedulerName"] == "volcano-2"


@pytest.mark.parametrize(
    ("kind", "spec"),
    [
        (
            "volcano",
            {
                "minMember": 2,
                "queue": "team-a",
                "priorityClassName": "high",
                "minResources": {"cpu": "2100m", "memory": str(9 << 30), "nvidia.com/gpu": "16"},
            },
        ),
        (
            "coscheduling",
            {
                "minMember": 2,
                "scheduleTimeoutSeconds": 60,
                "minResources": {"cpu": "2100m", "memory": str(9 << 30), "nvidia.com/gpu": "16"},
            },
        ),
        ("kai", {"minMember": 2, "queue": "team-a", "priorityClassName": "high"}),
    ],
)
def test_pod_groups(kind: str, spec: rendered.Object) -> None:
    resources = {"requests": {"cpu": "1"}, "limits": {"cpu": "2", "memory": "4480Mi"}}
    patch = {**rendered.GPUS, **rendered.ANALYZED, "resources": resources, "priorityClassName": "high"}
    made = group(rendered.make_job({**patch, **rendered.VARIETY[kind]}))
    assert made is not None
    assert made["spec"] == spec


def kubernetes_gang(resource: Resource | None, **patch: object) -> tuple[rendered.Object | None, rendered.Object]:
    """Return the group that is created on a cluster with this kind, and the spec of a worker."""
    job = rendered.make_job({"scheduling": {"gang": "Kubernetes"}, "priorityClassName": "high", **patch})
    settings = rendered.with_settings(pod_groups=resource)
    objects = render.gang_objects(job, rendered.owner_of(job), AttemptSettings(number=4), settings)
    found = [obj for _, obj in objects if obj["kind"] in {"PodGroup", "Workload"}]
    spec: rendered.Object = rendered.make_worker(job, 1, attempt=4, pod_groups=resource)["spec"]
    return (found[0] if found else None), spec


@pytest.mark.parametrize(
    ("resource", "spec"),
    [
        (KUBERNETES_POD_GROUPS[0], {"disruptionMode": {"all": {}}, "priorityClassName": "high"}),
        (KUBERNETES_POD_GROUPS[1], {}),
    ],
)
def test_the_scheduler_of_kubernetes_sees_a_group_of_its_own_kind(resource: Resource, spec: rendered.Object) -> None:
    made, pod = kubernetes_gang(resource)
    assert made is not None
    assert (made["apiVersion"], made["kind"], made["metadata"]["name"]) == (resource.api_version, "PodGroup", "gpt-a4")
    assert made["spec"] == {"schedulingPolicy": {"gang": {"minCount": 2}}, **spec}
    assert pod["schedulingGroup"] == {"podGroupName": "gpt-a4"}
    assert "schedulerName" not in pod and "workloadRef" not in pod


def test_a_group_has_the_priority_that_the_template_gives_its_pods() -> None:
    """Kubernetes decides by that of the group who is preempted."""
    made, pod = kubernetes_gang(KUBERNETES_POD_GROUPS[0], podTemplate={"spec": {"priorityClassName": "template"}})
    assert made is not None
    assert (made["spec"]["priorityClassName"], pod["priorityClassName"]) == ("template", "template")


def test_kubernetes_1_35_has_the_group_in_a_workload() -> None:
    made, pod = kubernetes_gang(KUBERNETES_POD_GROUPS[2])
    assert made is not None
    assert (made["apiVersion"], made["kind"], made["metadata"]["name"]) == (
        "scheduling.k8s.io/v1alpha1",
        "Workload",
        "gpt-a4",
    )
    assert made["spec"] == {
        "controllerRef": {"apiGroup": "megatronapp.io", "kind": "MegatronJob", "name": "gpt"},
        "podGroups": [{"name": "workers", "policy": {"gang": {"minCount": 2}}}],
    }
    assert pod["workloadRef"] == {"name": "gpt-a4", "podGroup": "workers"}
    assert "schedulingGroup" not in pod


def test_a_template_cannot_move_a_worker_to_another_group() -> None:
    template = {"podTemplate": {"spec": {"schedulingGroup": {"podGroupName": "other"}}}}
    _, pod = kubernetes_gang(KUBERNETES_POD_GROUPS[0], **template)
    assert pod["schedulingGroup"] == {"podGroupName": "gpt-a4"}


def test_a_cluster_without_such_groups_or_claims_is_named() -> None:
    assert kubernetes_gang(None)[0] is None
    claims = {"podTemplate": {"spec": {"resourceClaims": [{"name": "gpus", "resourceClaimName": "a"}]}}}
    job = rendered.make_job({"scheduling": {"gang": "Kubernetes"}, **claims})
    gang, claimed = render.missing_features(job, rendered.SETTINGS)
    assert "scheduling.k8s.io/v1beta1" in gang and "resource.k8s.io" in claimed
    able = rendered.with_settings(pod_groups=KUBERNETES_POD_GROUPS[0], resource_claims=True)
    assert render.missing_features(job, able) == ()
    assert render.missing_features(rendered.make_job(), rendered.SETTINGS) == ()


def test_a_gang_of_several_kinds_of_workers_asks_for_all_of_them() -> None:
    job = rendered.make_job({**rendered.VARIETY["forward-apart"], "scheduling": {"gang": "Volcano"}})
    made = group(job)
    assert made is not None
    assert made["spec"]["minMember"] == job.world.nodes
    pods = [rendered.make_worker(job, index) for index in range(job.world.nodes)]
    limits = [rendered.container(pod, "trainer").get("resources", {}).get("limits", {}) for pod in pods]
    total = sum(int(limit.get("nvidia.com/gpu", 0)) for limit in limits)
    assert made["spec"]["minResources"]["nvidia.com/gpu"] == str(total)


def test_an_init_container_counts_where_it_asks_for_more() -> None:
    spec = {
        "containers": [{"resources": {"requests": {"cpu": "1"}}}, {"resources": {"requests": {"cpu": "500m"}}}],
        "initContainers": [{"resources": {"requests": {"cpu": "1", "memory": "1Gi"}}}],
    }
    assert pod_requests(spec) == {"cpu": fractions.Fraction(3, 2), "memory": fractions.Fraction(1 << 30)}


@given(st.integers(0, 10**15).map(lambda thousandths: fractions.Fraction(thousandths, 1000)))
def test_sums_are_written_so_that_they_are_read_again(value: fractions.Fraction) -> None:
    assert quantity_value(text_of(value)) == value
