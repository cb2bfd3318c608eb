"""Connections to a job's pods that the rendered policies permit."""

import itertools

import pytest
import rendered
from network_policy import Place, fits, may_connect

from megatronapp_common.job import MegatronJob
from megatronapp_common.names import HUB_PORT, STATUS_PORT, ReplicaType
from megatronapp_operator.backends.kubernetes import render
from megatronapp_operator.backends.kubernetes.client.resources import NETWORK_POLICIES
from megatronapp_operator.backends.kubernetes.render import AttemptSettings

OTHER_UID = "00000000-0000-4000-8000-000000000000"
TORCH_PORT = 23456
PORTS = (STATUS_PORT, HUB_PORT, TORCH_PORT)


def objects(job: MegatronJob, uid: str = rendered.UID, **settings: object) -> list[rendered.Object]:
    """The policies of a job."""
    owner, chosen = rendered.owner_of(job, uid), rendered.with_settings(**settings)
    made = render.gang_objects(job, owner, AttemptSettings(number=0), chosen) + render.hub_objects(job, owner, chosen)
    return [obj for resource, obj in made if resource == NETWORK_POLICIES]


def place(pod: rendered.Object) -> Place:
    meta = pod["metadata"]
    return Place(namespace=meta["namespace"], labels=meta["labels"], host_network=pod["spec"].get("hostNetwork", False))


def places(patch: rendered.Object, uid: str = rendered.UID, namespace: str = "default") -> dict[str, Place]:
    """Pods of a job, by what they are."""
    job = rendered.make_job(patch, namespace=namespace)
    owner = rendered.owner_of(job, uid)
    init = render.init_pod(job, owner)
    assert init is not None
    return {
        "worker": place(render.worker_pod(job, owner, AttemptSettings(number=0), 0, rendered.SETTINGS)),
        "peer": place(render.worker_pod(job, owner, AttemptSettings(number=0), 1, rendered.SETTINGS)),
        "hub": place(render.hub_pod(job, owner, rendered.SETTINGS, starts=1)),
        "init": place(init),
    }


FETCHED = {**rendered.ANALYZED, **rendered.VARIETY["initializers"]}
OURS = places(FETCHED)
OUTSIDE = {
    "operator": Place(namespace="megatron-system", labels=rendered.SETTINGS.operator_labels),
    "gateway": Place(namespace="megatron-system", labels=rendered.SETTINGS.gateway_labels),
    "prometheus": Place(namespace="monitoring", labels=rendered.SETTINGS.prometheus_labels),
    "neighbour of the operator": Place(namespace="megatron-system", labels={"app": "other"}),
    "neighbour of Prometheus": Place(namespace="monitoring", labels={"app": "grafana"}),
    "stranger": Place(namespace="default", labels={"app": "other"}),
    "stranger elsewhere": Place(namespace="other", labels={}),
    "operator elsewhere": Place(namespace="default", labels=rendered.SETTINGS.operator_labels),
    "prometheus elsewhere": Place(namespace="default", labels=rendered.SETTINGS.prometheus_labels),
    "job elsewhere": places(FETCHED, namespace="other")["worker"],
    "other job's worker": places(FETCHED, uid=OTHER_UID)["worker"],
    "other job's hub": places(FETCHED, uid=OTHER_UID)["hub"],
    "a node": Place(namespace="default", labels={}, host_network=True),
}
EVERYBODY = OURS | OUTSIDE
ALLOWED = {
    *(("worker", source, port) for source in ("worker", "peer") for port in PORTS),
    *(("peer", source, port) for source in ("worker", "peer") for port in PORTS),
    ("worker", "operator", STATUS_PORT),
    ("peer", "operator", STATUS_PORT),
    *(("hub", source, HUB_PORT) for source in ("worker", "peer", "operator", "gateway", "prometheus")),
}
"""Target, source, port: all that may connect."""


@pytest.mark.parametrize("target", OURS)
def test_only_these_flows_are_let_in(target: str) -> None:
    policies = [*objects(rendered.make_job(FETCHED)), *objects(rendered.make_job(FETCHED), uid=OTHER_UID)]
    let_in = {
        (target, source, port)
        for source, port in itertools.product(EVERYBODY, PORTS)
        if may_connect(policies, EVERYBODY[source], OURS[target], port)
    }
    assert let_in == {flow for flow in ALLOWED if flow[0] == target}


def test_without_a_policy_everybody_is_let_in() -> None:
    """Check what the policies are for, and what `policy: None` means."""
    patch = {**FETCHED, "network": {"policy": "None"}}
    assert objects(rendered.make_job(patch)) == []
    assert may_connect([], OUTSIDE["stranger"], OURS["hub"], HUB_PORT)


def test_policies_of_a_job_do_not_change_who_reaches_others() -> None:
    policies = objects(rendered.make_job(FETCHED))
    other = places(FETCHED, uid=OTHER_UID)
    assert all(may_connect(policies, OUTSIDE["stranger"], target, HUB_PORT) for target in other.values())


def test_an_installation_without_prometheus_lets_none_in() -> None:
    policies = objects(rendered.make_job(FETCHED), prometheus_namespace=None)
    assert not may_connect(policies, OUTSIDE["prometheus"], OURS["hub"], HUB_PORT)
    assert may_connect(policies, OUTSIDE["gateway"], OURS["hub"], HUB_PORT)


def test_prometheus_without_labels_means_its_whole_namespace() -> None:
    policies = objects(rendered.make_job(FETCHED), prometheus_labels={})
    assert may_connect(policies, OUTSIDE["neighbour of Prometheus"], OURS["hub"], HUB_PORT)
    assert not may_connect(policies, OUTSIDE["stranger"], OURS["hub"], HUB_PORT)


def test_missing_operator_labels_admit_no_pod() -> None:
    """An empty selector would let its whole namespace in."""
    policies = objects(rendered.make_job(FETCHED), operator_labels={}, gateway_labels={})
    for source in ("operator", "gateway", "neighbour of the operator"):
        assert not may_connect(policies, OUTSIDE[source], OURS["hub"], HUB_PORT)
        assert not may_connect(policies, OUTSIDE[source], OURS["worker"], STATUS_PORT)


@pytest.mark.parametrize("kind", rendered.VARIETY)
def test_no_policy_restricts_outgoing_connections(kind: str) -> None:
    job = rendered.make_job(rendered.VARIETY[kind])
    assert all(policy["spec"]["policyTypes"] == ["Ingress"] for policy in objects(job))
    assert bool(objects(job)) == (job.spec.network.policy == "JobOnly")


def test_services_find_the_pods_of_this_job_alone() -> None:
    job = rendered.make_job(FETCHED)
    owner = rendered.owner_of(job)
    made = render.gang_objects(job, owner, AttemptSettings(number=0), rendered.SETTINGS)
    made += render.hub_objects(job, owner, rendered.SETTINGS)
    selectors = {obj["metadata"]["name"]: obj["spec"]["selector"] for _, obj in made if obj["kind"] == "Service"}
    found = {
        name: sorted(who for who, peer in EVERYBODY.items() if fits({"matchLabels": chosen}, peer.labels))
        for name, chosen in selectors.items()
    }
    elsewhere = "job elsewhere"  # a Service looks into its own namespace only
    assert found == {"gpt-workers": sorted(["worker", "peer", elsewhere]), "gpt-hub": ["hub"]}
    assert set(ReplicaType) == {ReplicaType.WORKER, ReplicaType.HUB, ReplicaType.INIT}


def test_objects_removed_from_a_spec_are_no_longer_rendered() -> None:
    """An object that only another spec of the job has would stay until the job is deleted."""
    whole = rendered.make_job({"analyzer": {"enabled": True}})
    less = rendered.make_job({"analyzer": {"enabled": False}, "network": {"policy": "None"}})
    owner = rendered.owner_of(whole)
    removed = objects_of(whole) - objects_of(less)
    assert ("configmaps", "gpt-job") in removed
    unwanted = {
        (resource.plural, name) for resource, name in render.unwanted_hub_objects(less, owner, rendered.SETTINGS)
    }
    assert removed <= unwanted and not unwanted & objects_of(less)


def objects_of(job: MegatronJob) -> set[tuple[str, str]]:
    """Return all objects around the pods of a job."""
    owner, settings = rendered.owner_of(job), rendered.SETTINGS
    made = render.gang_objects(job, owner, AttemptSettings(number=0), settings)
    made += render.hub_objects(job, owner, settings) if job.spec.analyzer.enabled else ()
    return {(resource.plural, obj["metadata"]["name"]) for resource, obj in made}
