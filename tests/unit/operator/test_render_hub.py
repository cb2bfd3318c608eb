"""A hub is replaced before a gang starts if its pod, or what it reads of the manifest, has changed."""

import dataclasses
import pathlib

import pytest
import rendered

from megatronapp_analyzer.hub.settings import JobIdentity, load_job_file
from megatronapp_common.job import MegatronJob, resized
from megatronapp_common.names import ANNOTATION_TEMPLATE_HASH
from megatronapp_operator.backends.kubernetes import render
from megatronapp_operator.backends.kubernetes.render import AttemptSettings

FAULT = {"rank": 1, "kind": "host", "factor": 2, "fromStep": 5, "steps": 3}
CLAIM = {"analyzer": {"enabled": True, "volume": {"claim": "hubs", "sizeLimit": "1Gi"}}}
CONTROLLED = {**rendered.ANALYZED, "scope": {"training": {}}}
GANG_OF_GPUS = {**CONTROLLED, "gpusPerNode": 2}
ELASTIC = {
    "nodes": 4,
    "parallelism": {"data": 8},
    "training": {"globalBatchSize": 8},
    "checkpoint": {**rendered.CLAIMS["checkpoint"], "saveInterval": 5},
    "runPolicy": {"restart": "InPlace", "elastic": {"minData": 4}},
}
Edit = tuple[rendered.Object, rendered.Object]
READ: dict[str, Edit] = {
    "trace": ({"analyzer": {"enabled": True}}, {"trace": {"enabled": True}}),
    "the flag of traces": ({"analyzer": {"enabled": True}}, {"args": ["--trace"]}),
    "faults": (rendered.ANALYZED, {"faults": [FAULT]}),
    "the factor of a fault": (rendered.ANALYZED | {"faults": [FAULT]}, {"faults": [FAULT | {"factor": 3}]}),
    "price": (rendered.ANALYZED, {"analyzer": {"gpuHourPrice": 2.5}}),
    "control": (rendered.ANALYZED, {"scope": {"training": {"startPaused": True}}}),
    "the flag of control": (rendered.ANALYZED, {"args": ["--training-control"]}),
    "the flag of MegatronApp's control": (rendered.ANALYZED, {"args": ["--training-ws-port", "5000"]}),
    "no control any more": (CONTROLLED, {"scope": {"training": {"enabled": False}}}),
    "the end of pauses": (CONTROLLED, {"scope": {"training": {"resumeAfterSeconds": 600}}}),
    "GPUs that a pause keeps idle": (GANG_OF_GPUS, {"nodes": 4}),
    "the size of its volume": (rendered.ANALYZED, {"analyzer": {"volume": {"sizeLimit": "1Gi"}}}),
    "the size of its part of a claim": (CLAIM, {"analyzer": {"volume": {"sizeLimit": "2Gi"}}}),
}
"""Edits of what a hub reads: a spec, and what is added to it."""
NOT_READ: dict[str, Edit] = {
    "learning rate": (rendered.ANALYZED, {"training": {"lr": 0.5}}),
    "other arguments": (rendered.ANALYZED, {"args": ["--log-throughput"]}),
    "environment": (rendered.ANALYZED, {"env": [{"name": "A", "value": "b"}]}),
    "workers": (rendered.ANALYZED, {"nodes": 4}),
    "restarts": (rendered.ANALYZED, {"runPolicy": {"restart": "InPlace"}}),
    "windows": (rendered.ANALYZED, {"trace": {"interval": 10}}),
    "captures": (CONTROLLED, {"scope": {"training": {"captureEvery": 5, "startPaused": True}}}),
    "slow nodes": (rendered.ANALYZED, {"analyzer": {"slowNode": {"action": "Exclude"}}}),
}


def hash_of(job: MegatronJob) -> str:
    return render.hub_hash(job, rendered.owner_of(job), rendered.SETTINGS)


def identity_of(job: MegatronJob, folder: pathlib.Path) -> JobIdentity:
    """Return what the hub of a job reads; without the digest of the whole spec, which it only shows."""
    objects = render.gang_objects(job, rendered.owner_of(job), AttemptSettings(number=0), rendered.SETTINGS)
    (text,) = [obj["data"]["job.yaml"] for _, obj in objects if obj["kind"] == "ConfigMap"]
    path = folder / "job.yaml"
    path.write_text(text, encoding="utf-8")
    return dataclasses.replace(load_job_file(path, name=None, uid=None), spec_digest="")


def edited(edit: Edit) -> tuple[MegatronJob, MegatronJob]:
    spec, patch = edit
    return rendered.make_job(spec), rendered.make_job(rendered.joined(spec, patch))


@pytest.mark.parametrize("name", READ)
def test_a_hub_of_another_manifest_has_another_digest(name: str, tmp_path: pathlib.Path) -> None:
    before, after = edited(READ[name])
    assert identity_of(before, tmp_path) != identity_of(after, tmp_path)
    assert hash_of(before) != hash_of(after)


@pytest.mark.parametrize("name", NOT_READ)
def test_a_hub_that_would_read_the_same_has_the_same_digest(name: str, tmp_path: pathlib.Path) -> None:
    before, after = edited(NOT_READ[name])
    assert before != after
    assert identity_of(before, tmp_path) == identity_of(after, tmp_path)
    assert hash_of(before) == hash_of(after)


def test_an_elastic_gang_has_the_same_hub_in_all_sizes() -> None:
    job = rendered.make_job({**GANG_OF_GPUS, **ELASTIC})
    smaller = resized(job, 4)
    assert smaller.world.gpus < job.world.gpus
    assert hash_of(smaller) == hash_of(job)


@pytest.mark.parametrize("name", rendered.VARIETY)
def test_the_pod_has_the_digest_that_decides(name: str) -> None:
    job = rendered.make_job(rendered.VARIETY[name])
    pod = render.hub_pod(job, rendered.owner_of(job), rendered.SETTINGS, starts=3)
    assert pod["metadata"]["annotations"][ANNOTATION_TEMPLATE_HASH] == hash_of(job)
