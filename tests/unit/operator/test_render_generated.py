"""Properties of the objects of every job."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
import rendered
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from megatronapp_common.errors import JobError
from megatronapp_common.job import MegatronJob, parse_manifest
from megatronapp_common.job.api.metadata import MAX_NAME_LENGTH
from megatronapp_operator.backends.kubernetes import render
from megatronapp_operator.backends.kubernetes.render import AttemptSettings
from megatronapp_operator.backends.kubernetes.render.pod.initializers import container_name

NAME = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")
LABEL = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\x00"), max_size=20)
NAMES = st.from_regex(rf"[a-z]([-a-z0-9]{{0,{MAX_NAME_LENGTH - 2}}}[a-z0-9])?", fullmatch=True)


@st.composite
def jobs(draw: st.DrawFn) -> MegatronJob:
    """Jobs made of up to three of the table's, where that is a job."""
    patch: rendered.Object = {}
    for kind in draw(st.lists(st.sampled_from(sorted(rendered.VARIETY)), unique=True, max_size=3)):
        patch = rendered.joined(patch, rendered.VARIETY[kind])
    patch["args"] = ["--wandb-project", draw(TEXT)]
    try:
        return rendered.make_job(patch, name=draw(NAMES))
    except JobError:
        assume(False)
        raise


def everything(job: MegatronJob, attempt: AttemptSettings) -> Iterator[rendered.Object]:
    owner = rendered.owner_of(job)
    yield from (obj for _, obj in render.gang_objects(job, owner, attempt, rendered.SETTINGS))
    yield from (obj for _, obj in render.hub_objects(job, owner, rendered.SETTINGS))
    yield render.secret(owner, "00" * 32, rendered.SETTINGS)[1]
    yield render.hub_pod(job, owner, rendered.SETTINGS, starts=1)
    init = render.init_pod(job, owner)
    yield from () if init is None else (init,)
    for index in range(job.world.nodes):
        yield render.worker_pod(job, owner, attempt, index, rendered.SETTINGS)


ATTEMPTS = st.builds(
    lambda number, excluded: AttemptSettings(number=number, excluded_nodes=tuple(excluded)),
    st.integers(0, 10**9),
    st.lists(st.sampled_from(["a", "b"]), unique=True),
)
THOROUGHLY = settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])


@THOROUGHLY
@given(job=jobs(), attempt=ATTEMPTS)
def test_objects_belong_to_their_job_and_have_names_of_their_own(job: MegatronJob, attempt: AttemptSettings) -> None:
    objects = list(everything(job, attempt))
    assert json.loads(json.dumps(objects)) == objects
    places = [(obj["kind"], obj["apiVersion"], obj["metadata"]["name"]) for obj in objects]
    assert len(set(places)) == len(places)
    for obj in objects:
        meta = obj["metadata"]
        assert NAME.fullmatch(meta["name"]), meta["name"]
        assert [owner["uid"] for owner in meta["ownerReferences"]] == [rendered.UID]
        assert all(LABEL.fullmatch(value) for value in meta["labels"].values()), meta["labels"]


@THOROUGHLY
@given(job=jobs(), attempt=ATTEMPTS)
def test_pods_are_whole(job: MegatronJob, attempt: AttemptSettings) -> None:
    for pod in everything(job, attempt):
        if pod["kind"] != "Pod":
            continue
        spec = pod["spec"]
        containers = [*spec["containers"], *spec.get("initContainers", [])]
        volumes = unique(spec.get("volumes", []), "name")
        unique(containers, "name")
        for container in containers:
            unique(container.get("env", []), "name")
            unique(container.get("volumeMounts", []), "mountPath")
            assert {mount["name"] for mount in container.get("volumeMounts", [])} <= volumes
        assert spec["automountServiceAccountToken"] is False


def unique(entries: list[rendered.Object], key: str) -> set[str]:
    names = [entry[key] for entry in entries]
    assert len(set(names)) == len(names), names
    return set(names)


@THOROUGHLY
@given(job=jobs(), attempt=ATTEMPTS, variable=TEXT)
def test_the_hub_reads_the_manifest_without_variables_of_users(
    job: MegatronJob, attempt: AttemptSettings, variable: str
) -> None:
    spec = {"containers": [{"name": "trainer", "env": [{"name": "X", "value": variable}]}]}
    given_job = rendered.with_template(job, {**spec, "again": spec})
    objects = render.gang_objects(given_job, rendered.owner_of(job), attempt, rendered.SETTINGS)
    texts = [obj["data"]["job.yaml"] for _, obj in objects if obj["kind"] == "ConfigMap"]
    if not job.spec.analyzer.enabled:
        assert texts == []
        return
    (text,) = texts
    document = parse_manifest(text)
    assert document["metadata"] == {"name": job.metadata.name, "namespace": "default", "uid": rendered.UID}
    private = {"env", "podTemplate", "initializers"}
    assert document["spec"] == {key: value for key, value in given_job.spec.to_dict().items() if key not in private}


@settings(max_examples=15, deadline=None)
@given(
    name=NAMES.filter(lambda name: len(name) <= MAX_NAME_LENGTH - 9),
    suffix=st.sampled_from(["-hub", "-job", "-init", "-a0", "-tokens", "-workers", "-worker-1", "-worker", "0"]),
)
def test_objects_of_two_jobs_never_meet(name: str, suffix: str) -> None:
    names: list[set[Any]] = []
    for label in (name, name + suffix):
        job = rendered.make_job({**rendered.VARIETY["initializers"], **rendered.ANALYZED}, name=label)
        objects = everything(job, AttemptSettings(number=0))
        names.append({(obj["kind"], obj["metadata"]["name"]) for obj in objects})
    assert not names[0] & names[1]


@pytest.mark.parametrize("kind", rendered.VARIETY)
def test_objects_that_others_need_are_created_first(kind: str) -> None:
    job = rendered.make_job(rendered.VARIETY[kind])
    order = ["NetworkPolicy", "Service", "ConfigMap", "PodGroup"]
    owner = rendered.owner_of(job)
    kinds = [obj["kind"] for _, obj in render.gang_objects(job, owner, AttemptSettings(number=0), rendered.SETTINGS)]
    assert [order.index(object_kind) for object_kind in kinds] == sorted(
        order.index(object_kind) for object_kind in kinds
    )


def test_a_shortened_name_stays_a_name_of_its_own() -> None:
    names = [container_name("a" * 62 + last) for last in "bc"]
    assert len(set(names)) == 2
    assert all(NAME.fullmatch(name) for name in names)
    assert container_name("corpus") == "init-corpus"
