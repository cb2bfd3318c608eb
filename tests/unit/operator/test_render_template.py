"""Pod template of the user: it is applied last, but for what the gang rests on."""

import copy
from typing import Any

import pytest
import rendered
from hypothesis import given
from hypothesis import strategies as st

from megatronapp_common.names import Env
from megatronapp_operator.backends.kubernetes.render.pod.merge import merge

JOB = rendered.make_job({**rendered.ANALYZED, "env": [{"name": "A", "value": "job"}, {"name": "B", "value": "job"}]})


def with_template(spec: rendered.Object, metadata: rendered.Object | None = None) -> rendered.Object:
    return rendered.make_worker(rendered.with_template(JOB, spec, metadata))


def test_containers_are_merged_by_name_and_variables_too() -> None:
    trainer = {"name": "trainer", "env": [{"name": "B", "value": "template"}], "workingDir": "/work"}
    pod = with_template({"containers": [{"name": "extra", "image": "x"}, trainer]})
    assert [container["name"] for container in pod["spec"]["containers"]] == ["trainer", "agent", "extra"]
    environment = rendered.environment(pod)
    assert (environment["A"], environment["B"]) == ("job", "template")
    assert rendered.container(pod)["workingDir"] == "/work"
    assert rendered.container(pod)["image"] == "registry.example/trainer:1"


def test_a_variable_with_a_source_is_not_merged_with_another() -> None:
    """Check that no variable is merged from half of one entry and half of another."""
    source = {"secretKeyRef": {"name": "s", "key": "k"}}
    pod = with_template({"containers": [{"name": "trainer", "env": [{"name": "A", "valueFrom": source}]}]})
    entry = next(variable for variable in rendered.container(pod)["env"] if variable["name"] == "A")
    assert entry == {"name": "A", "valueFrom": source}


def test_volumes_and_their_mounts_are_added() -> None:
    mount = {"name": "scratch", "mountPath": "/scratch"}
    pod = with_template(
        {
            "containers": [{"name": "trainer", "volumeMounts": [mount]}],
            "volumes": [{"name": "scratch", "hostPath": {"path": "/nvme"}}],
        }
    )
    assert mount in rendered.container(pod)["volumeMounts"]
    assert {"name": "scratch", "hostPath": {"path": "/nvme"}} in pod["spec"]["volumes"]


def test_tolerations_and_pull_secrets_are_joined() -> None:
    job = rendered.make_job({**rendered.GPUS, "imagePullSecrets": [{"name": "a"}]})
    template = {"tolerations": [{"key": "k", "operator": "Exists"}], "imagePullSecrets": [{"name": "b"}]}
    spec = rendered.make_worker(rendered.with_template(job, template))["spec"]
    assert [toleration["key"] for toleration in spec["tolerations"]] == ["nvidia.com/gpu", "k"]
    assert spec["imagePullSecrets"] == [{"name": "a"}, {"name": "b"}]


def test_security_may_be_loosened_or_tightened() -> None:
    trainer = {"name": "trainer", "securityContext": {"readOnlyRootFilesystem": True}}
    pod = with_template({"containers": [trainer], "securityContext": {"runAsUser": 1000, "runAsGroup": None}})
    assert rendered.container(pod)["securityContext"]["readOnlyRootFilesystem"] is True
    assert rendered.container(pod)["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert pod["spec"]["securityContext"]["runAsUser"] == 1000
    assert "runAsGroup" not in pod["spec"]["securityContext"]


def test_labels_and_annotations_are_added() -> None:
    pod = with_template({}, {"labels": {"team": "a"}, "annotations": {"note": "b"}})
    assert pod["metadata"]["labels"]["team"] == "a"
    assert pod["metadata"]["annotations"]["note"] == "b"


GREEDY = {
    "restartPolicy": "Always",
    "hostname": "mine",
    "subdomain": "mine",
    "setHostnameAsFQDN": True,
    "hostNetwork": True,
    "hostPID": True,
    "hostIPC": True,
    "shareProcessNamespace": True,
    "terminationGracePeriodSeconds": 1,
    "containers": [
        {
            "name": name,
            "command": ["sh"],
            "args": ["-c", "true"],
            "restartPolicy": "Always",
            "terminationMessagePath": "/tmp/x",
            "env": [{"name": str(variable), "value": "mine"} for variable in Env],
            "volumeMounts": [{"name": "mine", "mountPath": "/dev/shm"}],
        }
        for name in ("trainer", "agent")
    ],
    "volumes": [{"name": name, "hostPath": {"path": "/"}} for name in ("shm", "run", "secret")],
}
"""Everything at once that a template may not have."""


def test_what_the_gang_rests_on_is_not_changed() -> None:
    ours, pod = rendered.make_worker(JOB), with_template(GREEDY)
    for field in ("restartPolicy", "hostname", "subdomain", "terminationGracePeriodSeconds", "volumes"):
        assert pod["spec"][field] == ours["spec"][field]
    for name in ("setHostnameAsFQDN", "hostNetwork", "hostPID", "hostIPC", "shareProcessNamespace"):
        assert name not in pod["spec"]
    for name in ("trainer", "agent"):
        theirs, own = rendered.container(pod, name), rendered.container(ours, name)
        assert (theirs["command"], "args" in theirs) == (own["command"], False)
        assert theirs["volumeMounts"] == own["volumeMounts"]
        environment, known = rendered.environment(pod, name), rendered.environment(ours, name)
        assert {variable: environment[variable] for variable in known} == known
    assert "restartPolicy" not in rendered.container(pod)


def test_labels_that_the_operator_reads_are_not_changed() -> None:
    ours = rendered.make_worker(JOB)["metadata"]
    pod = with_template({}, {"labels": dict.fromkeys(ours["labels"], "mine")})
    assert pod["metadata"]["labels"] == ours["labels"]


VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=3)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(["a", "b", "c"]), inner, max_size=3)
    ),
    max_leaves=8,
)
MAPS = st.dictionaries(st.sampled_from(["a", "b", "c"]), VALUES, max_size=3)


@given(base=MAPS, patch=MAPS)
def test_merging_leaves_what_it_is_given(base: Any, patch: Any) -> None:
    before = copy.deepcopy((base, patch))
    once = merge(base, patch)
    assert (base, patch) == before
    assert merge(once, patch) == once
    assert all(name not in once for name, value in patch.items() if value is None)


@given(base=MAPS)
def test_merging_nothing_changes_nothing(base: Any) -> None:
    assert merge(base, {}) == base


@pytest.mark.parametrize(
    ("base", "patch", "merged"),
    [
        ({"a": {"b": 1}}, {"a": {"c": 2}}, {"a": {"b": 1, "c": 2}}),
        ({"a": {"b": 1}}, {"a": {"b": None}}, {"a": {}}),
        ({"command": ["a", "b"]}, {"command": ["c"]}, {"command": ["c"]}),
        ({"env": [{"name": "x", "value": "1"}]}, {"env": []}, {"env": [{"name": "x", "value": "1"}]}),
        ({}, {"containers": [{"name": "x", "image": None}]}, {"containers": [{"name": "x"}]}),
        (
            {"ports": [{"containerPort": 1, "name": "a"}]},
            {"ports": [{"containerPort": 1, "protocol": "TCP", "name": "b"}]},
            {"ports": [{"containerPort": 1, "protocol": "TCP", "name": "b"}]},
        ),
        (
            {"tolerations": [{"key": "a"}]},
            {"tolerations": [{"key": "a"}, {"key": "b"}]},
            {"tolerations": [{"key": "a"}, {"key": "b"}]},
        ),
    ],
)
def test_merging_by_example(base: rendered.Object, patch: rendered.Object, merged: rendered.Object) -> None:
    assert merge(base, patch) == merged
