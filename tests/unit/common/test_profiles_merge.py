"""Laws of the merge of a job over its profiles, and the locks."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatronapp_common.errors import JobError
from megatronapp_common.job import Spec, load_job
from megatronapp_common.job.api.profile import Profile, ProfileKind
from megatronapp_common.job.profiles.effective import (
    begun_job,
    effective_job,
    field_origins,
    load_layered_job,
    resolve,
)
from megatronapp_common.job.profiles.field_tree import Block, leaves, merge, plain, spec_tree
from megatronapp_common.job.profiles.load import load_profile
from megatronapp_common.job.profiles.locks import parse_path, path_problem
from megatronapp_common.job.profiles.own_fields import LAST_APPLIED, own_spec

NAMES = st.sampled_from(["A", "B", "C"])
VALUES = st.sampled_from(["0", "1", "2"])
VARIABLES = st.dictionaries(NAMES, VALUES, max_size=3)
ENV = VARIABLES.map(lambda given: [{"name": name, "value": value} for name, value in given.items()])
PARTS = st.fixed_dictionaries(
    {},
    optional={
        "nodes": st.integers(1, 4),
        "image": st.sampled_from(["a:1", "b:2"]),
        "args": st.lists(st.sampled_from(["--x", "--y"]), max_size=2),
        "env": ENV,
        "nodeSelector": st.dictionaries(st.sampled_from(["gpu", "example.com/zone"]), VALUES, max_size=2),
        "network": st.fixed_dictionaries(
            {},
            optional={
                "mode": st.sampled_from(["Default", "HostNetwork"]),
                "nccl": VARIABLES,
                "rdma": st.fixed_dictionaries({}, optional={"enabled": st.booleans()}),
            },
        ),
        "affinity": st.fixed_dictionaries({}, optional={"podAffinity": st.just({"x": [1]}), "y": VALUES}),
    },
)
PATHS = ["nodes", "image", "args", "env", "env[A]", "env[B].value", "nodeSelector", "nodeSelector[example.com/zone]"]
PATHS += ["network", "network.mode", "network.nccl", "network.nccl[A]", "network.rdma.enabled", "affinity.podAffinity"]
LOCKS = st.lists(st.sampled_from(PATHS), max_size=3, unique=True)


def profile(kind: ProfileKind, template: dict[str, Any], locked: list[str] | tuple[str, ...] = ()) -> Profile:
    return Profile(kind=kind, name="one", generation=1, template=template, locked=tuple(locked))


def cluster(template: dict[str, Any], locked: list[str] | tuple[str, ...] = ()) -> Profile:
    return profile(ProfileKind.CLUSTER, template, locked)


def values(part: dict[str, Any]) -> dict[str, Any]:
    return {text: leaf.value for _, text, leaf in leaves(spec_tree(part, "x"))}


@given(low=PARTS, middle=PARTS, high=PARTS)
def test_the_merge_is_associative_with_its_origins(
    low: dict[str, Any], middle: dict[str, Any], high: dict[str, Any]
) -> None:
    first, second, third = spec_tree(low, "low"), spec_tree(middle, "middle"), spec_tree(high, "high")
    assert merge(merge(first, second), third) == merge(first, merge(second, third))


@given(part=PARTS)
def test_the_merge_is_idempotent_and_nothing_below_changes_nothing(part: dict[str, Any]) -> None:
    tree = spec_tree(part, "x")
    assert merge(tree, tree) == tree == merge(Block({}), tree) == merge(tree, Block({}))
    assert plain(tree) == part, "a tree holds what was written, in its order"


@given(template=PARTS, own=PARTS)
def test_the_job_wins_and_every_other_value_is_of_the_profile(template: dict[str, Any], own: dict[str, Any]) -> None:
    found = resolve(own, [cluster(template)])
    merged, job, below = values(found.spec), values(own), values(template)
    assert not found.problems
    for field, value in merged.items():
        assert value == job.get(field, below.get(field)), field
        assert found.origins[field] == ("job" if field in job else "ClusterMegatronProfile/one"), field
    assert set(job) <= set(merged)
    assert set(below) <= set(merged)


@given(template=PARTS, own=PARTS, locked=LOCKS)
def test_a_locked_value_is_never_another_and_each_change_is_refused_by_name(
    template: dict[str, Any], own: dict[str, Any], locked: list[str]
) -> None:
    found = resolve(own, [cluster(template, locked)])
    merged, job, below = values(found.spec), values(own), values(template)
    inside = [field for field in merged | job if any(within(field, lock) for lock in locked)]
    for field in inside:
        assert merged.get(field) == below.get(field), field
    changed = {field for field in inside if field in job and job[field] != below.get(field)}
    assert {problem.split(": ")[0] for problem in found.problems} == {f"spec.{field}" for field in changed}


def within(field: str, lock: str) -> bool:
    return parse_path(field)[: len(parse_path(lock))] == parse_path(lock)


@given(base=PARTS, middle=PARTS, own=PARTS, locked=LOCKS)
def test_a_lock_of_the_cluster_binds_the_namespace_too(
    base: dict[str, Any], middle: dict[str, Any], own: dict[str, Any], locked: list[str]
) -> None:
    profiles = [profile(ProfileKind.NAMESPACE, middle), cluster(base, locked)]
    found = resolve(own, profiles)
    assert found == resolve(own, profiles[::-1]), "their order is that of their kinds"
    merged, below = values(found.spec), values(base)
    for field in merged:
        if any(within(field, lock) for lock in locked):
            assert merged[field] == below.get(field), field
    if not found.problems:
        assert merged == values(base) | values(middle) | values(own)


def test_lists_are_merged_by_their_type() -> None:
    template = {"env": [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}], "args": ["--x", "1"]}
    own = {"env": [{"name": "C", "value": "3"}, {"name": "A", "value": "4"}], "args": ["--y"]}
    found = resolve(own, [cluster(template)])
    assert found.spec["env"] == [
        {"name": "A", "value": "4"},
        {"name": "B", "value": "2"},
        {"name": "C", "value": "3"},
    ]
    assert found.spec["args"] == ["--y"]
    assert found.origins["env[B].value"] == "ClusterMegatronProfile/one"
    assert (found.origins["env[A].value"], found.origins["args"]) == ("job", "job")


SPEC: dict[str, Any] = {
    "training": {"trainIters": 4, "microBatchSize": 1, "lr": 0.1},
    "model": {"numLayers": 2, "hiddenSize": 64, "numAttentionHeads": 4, "seqLength": 64, "vocabSize": 512},
    "data": {"mock": True},
}


def document(spec: dict[str, Any]) -> dict[str, Any]:
    return {
        "apiVersion": "megatronapp.io/v1alpha1",
        "kind": "MegatronJob",
        "metadata": {"name": "job", "namespace": "team"},
        "spec": spec,
    }


def test_rules_are_judged_on_the_merged_spec_and_name_the_profile() -> None:
    h100 = cluster({"network": {"rdma": {"enabled": True}}, "gpusPerNode": 8})
    with pytest.raises(JobError) as refused:
        effective_job(document(SPEC), SPEC, [h100])
    assert any("resourceName" in problem for problem in refused.value.problems)
    alone = document(SPEC | {"profile": "h100", "network": {"rdma": {"enabled": True}}})
    assert load_job(alone).spec.profile == "h100", "a job that names a profile is not judged without it"
    with pytest.raises(JobError):
        load_job(alone, merged=True)


def test_a_job_that_lacks_what_its_profile_has_is_complete_with_it() -> None:
    own = {name: value for name, value in SPEC.items() if name != "training"}
    base = cluster({"training": {"trainIters": 9, "microBatchSize": 1, "lr": 0.1}})
    assert load_layered_job(document(own), [base]).job.spec.training.train_iters == 9  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("named", "given_names", "problem"),
    [
        ("h100", [], "spec.profile: names h100, but no ClusterMegatronProfile was given"),
        ("h100", ["one"], "spec.profile: names h100, but the ClusterMegatronProfile one was given"),
        (None, ["one", "one"], "2 ClusterMegatronProfiles are given (one, one)"),
    ],
)
def test_the_profile_that_a_job_names_must_be_given(named: str | None, given_names: list[str], problem: str) -> None:
    spec = SPEC | ({"profile": named} if named else {})
    with pytest.raises(JobError) as refused:
        load_layered_job(document(spec), [cluster({}) for _ in given_names])
    assert problem in str(refused.value)


def test_an_attempt_that_has_begun_keeps_locked_values_after_an_edit() -> None:
    base = cluster({"image": "admin:1"}, ["image"])
    edited = SPEC | {"image": "mine:2"}
    assert begun_job(document(edited), edited, [base]).spec.image == "admin:1"
    with pytest.raises(JobError, match=r"spec\.image: is locked by ClusterMegatronProfile/one, which has admin:1"):
        effective_job(document(edited), edited, [base])


def test_every_field_has_an_origin() -> None:
    layered = load_layered_job(document(SPEC), [cluster({"image": "admin:1"})])
    origins = {field.field: field.origin for field in field_origins(layered)}
    assert (origins["image"], origins["model.numLayers"], origins["network.mode"]) == (
        "ClusterMegatronProfile/one",
        "job",
        "default",
    )


@given(part=PARTS, applied=PARTS)
def test_a_written_default_is_the_jobs_own_only_if_it_was_recorded(
    part: dict[str, Any], applied: dict[str, Any]
) -> None:
    spec = Spec.model_validate_json(json.dumps(SPEC | part))
    stored, plain_own = values(spec.to_dict()), values(own_spec(spec, {}))
    defaults = values(Spec.model_validate_json(json.dumps(SPEC)).to_dict())
    for field, value in stored.items():
        if field not in defaults or value != defaults[field]:
            assert plain_own[field] == value, field
    annotation = {"annotations": {LAST_APPLIED: json.dumps({"spec": SPEC | part})}}
    recorded = values(own_spec(spec, annotation))
    assert {field: stored[field] for field in values(SPEC | part)} == {
        field: recorded[field] for field in values(SPEC | part)
    }
    older = values(own_spec(spec, {"annotations": {LAST_APPLIED: json.dumps({"spec": applied})}}))
    assert older.items() <= stored.items(), "values are those of the job, whatever was recorded"


def test_fields_of_server_side_apply_are_the_jobs_own() -> None:
    spec = Spec.model_validate_json(json.dumps(SPEC | {"env": [{"name": "A"}]}))
    fields = {"f:network": {".": {}, "f:mode": {}}, "f:env": {'k:{"name":"A"}': {".": {}, "f:name": {}, "f:value": {}}}}
    entries = [
        {"operation": "Update", "fieldsV1": {"f:spec": {"f:imagePullPolicy": {}}}},
        {"operation": "Apply", "fieldsV1": {"f:spec": fields}},
        {"operation": "Apply", "subresource": "status", "fieldsV1": {"f:spec": {"f:suspend": {}}}},
    ]
    own = values(own_spec(spec, {"managedFields": entries}))
    assert (own["network.mode"], own["env[A].value"]) == ("Default", "")
    assert not {"imagePullPolicy", "suspend"} & set(own)


def test_records_that_are_nested_too_deep_record_nothing() -> None:
    """Any client writes them; they must not keep the job from being read."""
    spec, deep = Spec.model_validate_json(json.dumps(SPEC)), "[" * 5000 + "]" * 5000
    fields: dict[str, Any] = {"f:imagePullPolicy": {}, f'k:{{"name":{deep}}}': {}}
    applied = [{"operation": "Apply", "fieldsV1": {"f:spec": fields}}]
    annotation = {LAST_APPLIED: f'{{"spec":{{"nodes":{deep}}}}}'}
    own = values(own_spec(spec, {"managedFields": applied, "annotations": annotation}))
    assert own == values(own_spec(spec, {})) | {"imagePullPolicy": "IfNotPresent"}


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("network.mod", "network.mod: unknown field; did you mean network.mode?"),
        ("env[A]", None),
        ("env[A].value", None),
        ("nodeSelector[example.com/zone]", None),
        ("affinity.nodeAffinity.any", None),
        ("args[0]", "the list args is replaced as a whole; lock all of it"),
        ("nodes.x", "nodes has no fields; lock nodes"),
        ("network..mode", "is no path of a field"),
        (".network", "is no path of a field"),
        ("[A]", "is no path of a field"),
        ("q", "unknown field; known here: "),
    ],
)
def test_a_locked_path_leads_to_a_field(path: str, problem: str | None) -> None:
    found = path_problem(path)
    assert found is None if problem is None else problem in (found or "")


def test_a_profile_with_wrong_fields_is_refused_with_their_paths() -> None:
    template = {"profile": "x", "nodes": "8", "network": {"mod": 1}, "training": {"lr": 1}}
    spec = {"template": template, "locked": ["network.mod"]}
    with pytest.raises(JobError) as refused:
        load_profile(document(spec) | {"kind": "MegatronProfile"})
    assert [problem.split(": ")[0] for problem in refused.value.problems] == [
        "spec.template.profile",
        "spec.template.nodes",
        "spec.template.network.mod",
        "spec.locked[0]",
    ]
    with pytest.raises(JobError, match="write at most 32768"):
        load_profile(document({"template": {"args": ["x" * 4000] * 9}}) | {"kind": "MegatronProfile"})
    with pytest.raises(JobError) as refused:
        load_profile(document(SPEC))
    assert refused.value.problems == (
        "kind: 'MegatronJob' is no profile; write ClusterMegatronProfile or MegatronProfile",
    ), "fields of a job in it are not listed one by one"
