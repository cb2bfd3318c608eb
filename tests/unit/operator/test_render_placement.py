"""Placement of workers: exclusion, topology, and the requirements of the user and the template."""

import pytest
import rendered
from hypothesis import given
from hypothesis import strategies as st

from megatronapp_operator.backends.kubernetes.observe import worker
from megatronapp_operator.backends.kubernetes.pod_record import PodRecord, read_pod
from megatronapp_operator.backends.kubernetes.render.pod.placement import REQUIRED, without_nodes

NODES = st.lists(st.sampled_from(["a", "b", "c", "d"]), unique=True, max_size=3)
LABELS = ("x", "y")


def admits(affinity: rendered.Object, node: str, labels: rendered.Object) -> bool:
    """Return whether a node affinity admits a pod to a node: any term, all of its requirements, an empty term never."""
    required = affinity.get(REQUIRED)
    if required is None:
        return True

    def meets(term: rendered.Object) -> bool:
        fields, expressions = term.get("matchFields") or [], term.get("matchExpressions") or []
        assert all(field["operator"] == "NotIn" and len(field["values"]) == 1 for field in fields)
        return bool(fields or expressions) and (
            all(node not in field["values"] for field in fields)
            and all(labels.get(expression["key"]) in expression["values"] for expression in expressions)
        )

    return any(map(meets, required["nodeSelectorTerms"]))


TERM = st.builds(
    lambda values: {"matchExpressions": [{"key": "k", "operator": "In", "values": values}]} if values else {},
    st.lists(st.sampled_from(LABELS), unique=True, max_size=2),
)
AFFINITY = st.one_of(
    st.just({}),
    st.builds(lambda terms: {REQUIRED: {"nodeSelectorTerms": terms}}, st.lists(TERM, min_size=1, max_size=3)),
)


@given(affinity=AFFINITY, excluded=NODES.filter(bool))
def test_exclusion_removes_exactly_these_nodes(affinity: rendered.Object, excluded: list[str]) -> None:
    made = without_nodes(affinity, excluded)
    for node in "abcd":
        for label in (*LABELS, "z"):
            before = admits(affinity, node, {"k": label})
            assert admits(made, node, {"k": label}) == (before and node not in excluded)


@given(affinity=AFFINITY)
def test_what_the_user_wrote_is_not_changed(affinity: rendered.Object) -> None:
    text = str(affinity)
    without_nodes(affinity, ["a"])
    assert str(affinity) == text


def test_excluded_nodes_stay_excluded_whatever_the_template_requires() -> None:
    required = {"nodeSelectorTerms": [{"matchExpressions": [{"key": "k", "operator": "In", "values": ["x"]}]}]}
    template = {"spec": {"affinity": {"nodeAffinity": {REQUIRED: required}}}}
    pod = rendered.make_worker(rendered.make_job({"podTemplate": template}), excluded=("a",))
    affinity = pod["spec"]["affinity"]["nodeAffinity"]
    assert not admits(affinity, "a", {"k": "x"})
    assert admits(affinity, "b", {"k": "x"})
    assert not admits(affinity, "b", {"k": "y"})


def test_a_worker_shows_which_nodes_its_job_excluded_when_it_was_made() -> None:
    pod = rendered.make_worker(rendered.make_job(), attempt=3, excluded=("gpu-3", "gpu-9"))
    assert read(pod).avoids == {"gpu-3", "gpu-9"}
    assert worker(read(pod)).avoids == {"gpu-3", "gpu-9"}
    assert read(rendered.make_worker(rendered.make_job())).avoids == frozenset()


def read(pod: rendered.Object) -> PodRecord:
    given = {"uid": "u", "resourceVersion": "1", "creationTimestamp": "2026-01-02T03:04:05Z"}
    record = read_pod(pod | {"metadata": pod["metadata"] | given})
    assert record is not None
    return record


def test_other_affinities_are_combined_with_the_exclusion() -> None:
    preferred = {
        "preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 1, "preference": {"matchExpressions": []}}]
    }
    pod = rendered.make_worker(rendered.make_job({"affinity": {"nodeAffinity": preferred}}), excluded=("a",))
    assert set(pod["spec"]["affinity"]["nodeAffinity"]) == {REQUIRED, *preferred}


@pytest.mark.parametrize("required", [True, False])
def test_workers_near_to_each_other(required: bool) -> None:
    job = rendered.make_job({"scheduling": {"topology": {"level": "rack", "required": required}}})
    pod = rendered.make_worker(job)
    affinity = pod["spec"]["affinity"]["podAffinity"]
    if required:
        (term,) = affinity[REQUIRED]
    else:
        (entry,) = affinity["preferredDuringSchedulingIgnoredDuringExecution"]
        term = entry["podAffinityTerm"]
    assert term["topologyKey"] == "rack"
    assert term["labelSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()


def test_a_toleration_that_the_user_gave_is_not_given_twice() -> None:
    gpu = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
    pod = rendered.make_worker(rendered.make_job({**rendered.GPUS, "tolerations": [gpu]}))
    assert pod["spec"]["tolerations"] == [gpu]


def test_priority_scheduler_runtime_and_account() -> None:
    job = rendered.make_job(
        {
            "priorityClassName": "high",
            "schedulerName": "mine",
            "runtimeClassName": "nvidia",
            "serviceAccountName": "puller",
        }
    )
    spec = rendered.make_worker(job)["spec"]
    assert (spec["priorityClassName"], spec["schedulerName"]) == ("high", "mine")
    assert (spec["runtimeClassName"], spec["serviceAccountName"]) == ("nvidia", "puller")
