"""Jobs of bench_operator.py: MegatronJobs, and Indexed Jobs whose pods are those of a MegatronJob."""

from typing import Any

from megatronapp_common.job import load_job
from megatronapp_common.names import API_VERSION, KIND
from megatronapp_operator.backends.kubernetes import render
from megatronapp_operator.backends.kubernetes.render.settings import AttemptSettings, JobOwner, RenderSettings

Object = dict[str, Any]
GPUS = 8
NO_LIMIT = 2**31 - 1
SETTINGS = RenderSettings(
    trainer_image="megatronapp/trainer:bench",
    analyzer_image="megatronapp/analyzer:bench",
    operator_namespace="bench",
    operator_labels={"app.kubernetes.io/component": "operator"},
    gateway_labels={"app.kubernetes.io/component": "gateway"},
)


def megatron_job(namespace: str, name: str, pods: int, *, hub: bool) -> Object:
    """Return a GPT of 7 billion parameters on `pods` nodes of 8 GPUs, with the usual fields."""
    model = {"numLayers": 32, "hiddenSize": 4096, "numAttentionHeads": 32, "seqLength": 4096, "vocabSize": 32000}
    training = {"microBatchSize": 1, "trainIters": 100_000, "lr": 3e-4, "minLr": 3e-5, "precision": "bf16"}
    spec = {
        "nodes": pods,
        "procPerNode": GPUS,
        "gpusPerNode": GPUS,
        "parallelism": {"tensor": GPUS},
        "model": model,
        "training": training,
        "data": {"mock": True},
        "resources": {"requests": {"cpu": "32", "memory": "256Gi"}, "limits": {"memory": "512Gi"}},
        "runPolicy": {"backoff": {"initialSeconds": 0}, "nodeExclusion": {"enabled": False}},
        **({"trace": {"enabled": True}, "analyzer": {"enabled": True}} if hub else {}),
    }
    return {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": name, "namespace": namespace}, "spec": spec}


def indexed_job(namespace: str, name: str, pods: int, *, hub: bool) -> Object:
    """An Indexed Job with the same pods, but for their own names and owner."""
    job = load_job(megatron_job(namespace, name, pods, hub=hub))
    owner = JobOwner(namespace=namespace, name=name, uid="00000000-0000-0000-0000-000000000000")
    pod = render.worker_pod(job, owner, AttemptSettings(number=0), 0, SETTINGS)
    spec = {field: value for field, value in pod["spec"].items() if field != "hostname"}
    metadata = {field: pod["metadata"][field] for field in ("labels", "annotations")}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {
            "completionMode": "Indexed",
            "completions": pods,
            "parallelism": pods,
            "backoffLimit": NO_LIMIT,
            "template": {"metadata": metadata, "spec": spec},
        },
    }
