"""Jobs of many kinds, and what is rendered of them: for tests of the objects alone and on a real API server."""

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any

from megatronapp_common.job import MegatronJob, load_job
from megatronapp_common.job.api.cluster import PodMetadata
from megatronapp_operator.backends.kubernetes import render
from megatronapp_operator.backends.kubernetes.render import AttemptSettings, JobOwner, RenderSettings

Object = dict[str, Any]
UID = "4f7d2c1e-9a53-4b0e-8f37-2a6f0c1d5e88"
SETTINGS = RenderSettings(
    trainer_image="registry.example/trainer:1",
    analyzer_image="registry.example/analyzer:1",
    operator_namespace="megatron-system",
    operator_labels={"app.kubernetes.io/component": "operator"},
    gateway_labels={"app.kubernetes.io/component": "gateway"},
    prometheus_namespace="monitoring",
    prometheus_labels={"app.kubernetes.io/name": "prometheus"},
    node_access=True,
)
BASE: Object = {
    "nodes": 2,
    "procPerNode": 2,
    "model": {"numLayers": 4, "hiddenSize": 64, "numAttentionHeads": 4, "seqLength": 64, "vocabSize": 256},
    "training": {"microBatchSize": 1, "trainIters": 10, "lr": 0.001},
    "data": {"mock": True},
}
GPUS: Object = {"gpusPerNode": 8, "procPerNode": 8}
ANALYZED: Object = {"trace": {"enabled": True}, "analyzer": {"enabled": True}}
RDMA: Object = {
    **GPUS,
    "network": {"mode": "SharedDevice", "rdma": {"enabled": True, "resourceName": "rdma/hca_shared_devices_a"}},
}
CLAIMS: Object = {
    "data": {"volume": {"claim": "corpus", "mountPath": "/data", "readOnly": True}},
    "checkpoint": {"save": "/ckpt/job", "volume": {"claim": "corpus", "mountPath": "/ckpt", "subPath": "saved"}},
}
VARIETY: dict[str, Object] = {
    "plain": {},
    "gpus": GPUS,
    "analyzed": {**GPUS, **ANALYZED},
    "alone": {"nodes": 1},
    "own-image": {
        "image": "registry.example/mine:2",
        "imagePullPolicy": "Always",
        "imagePullSecrets": [{"name": "pull"}],
        **ANALYZED,
    },
    "resources": {
        "resources": {"requests": {"cpu": 4, "memory": "8Gi"}, "limits": {"cpu": "4", "memory": "8Gi"}},
        **ANALYZED,
    },
    "placement": {
        **GPUS,
        "nodeSelector": {"pool": "training"},
        "tolerations": [
            {"key": "team", "operator": "Equal", "value": "a", "effect": "NoExecute", "tolerationSeconds": 5}
        ],
        "affinity": {
            "nodeAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": {
                    "nodeSelectorTerms": [
                        {"matchExpressions": [{"key": "gpu", "operator": "In", "values": ["h100"]}]},
                        {"matchExpressions": [{"key": "gpu", "operator": "In", "values": ["h200"]}]},
                    ]
                }
            }
        },
        "scheduling": {"topology": {"level": "example.com/rack", "required": True}},
    },
    "served": {
        **GPUS,
        "mode": "serve",
        "model": None,
        "training": None,
        "data": {"mock": False},
        "parallelism": {"tensor": 8, "pipeline": 2},
        "checkpoint": {"load": "/ckpt", "volume": {"claim": "corpus", "mountPath": "/ckpt", "readOnly": True}},
        "analyzer": {"enabled": True},
    },
    "near": {"scheduling": {"topology": {"level": "example.com/rack"}}},
    "claims": CLAIMS,
    "initializers": {
        **CLAIMS,
        "initializers": [
            {
                "name": "corpus",
                "image": "registry.example/fetch:1",
                "storageUri": "s3://bucket/corpus",
                "target": "/data/corpus",
                "secretRef": {"name": "bucket"},
            },
            {"name": "tokenizer", "image": "registry.example/fetch:1", "args": ["$(STORAGE_URI)"], "target": "/data/t"},
            {
                "name": "cache",
                "image": "registry.example/fetch:1",
                "command": ["fetch"],
                "storageUri": "https://example.com/cache",
                "target": "/cache",
                "scope": "Node",
            },
        ],
    },
    "rdma": RDMA,
    "rdma-analyzed": {**RDMA, **ANALYZED},
    "rdma-host-devices": {
        **GPUS,
        "network": {"mode": "HostNetwork", "policy": "None", "rdma": {"enabled": True, "devices": "HostPath"}},
    },
    "rdma-unpinned": {
        **GPUS,
        "network": {
            "mode": "SharedDevice",
            "rdma": {
                "enabled": True,
                "resourceName": "rdma/ib",
                "count": 4,
                "ipcLock": False,
                "gidIndex": 3,
                "hca": "=mlx5_0:1,mlx5_1",
                "interface": "net[0-9]",
            },
            "nccl": {"NCCL_DEBUG": "INFO"},
        },
    },
    "sriov": {
        **GPUS,
        "network": {
            "mode": "Sriov",
            "attachments": ["fabric/ib-a", "fabric/ib-b@net2"],
            "rdma": {"enabled": True, "resourceName": "example.com/ib_vf", "ipcLock": False},
            "rankOrder": "Topology",
            "topologyKey": "example.com/rack",
            "preflight": {"enabled": True},
        },
    },
    "host-network": {**GPUS, **ANALYZED, "network": {"mode": "HostNetwork", "policy": "None", "rankOrder": "IP"}},
    "kueue": {"scheduling": {"gang": "Kueue", "queue": "team-a", "topology": {"level": "example.com/rack"}}},
    "volcano": {**GPUS, "scheduling": {"gang": "Volcano", "queue": "team-a"}},
    "coscheduling": {"scheduling": {"gang": "Coscheduling", "timeoutSeconds": 60}},
    "kai": {**GPUS, "scheduling": {"gang": "KAI", "queue": "team-a"}},
    "forward-apart": {
        **GPUS,
        "procPerNode": 8,
        "parallelism": {"tensor": 2, "pipeline": 2},
        "fbd": {
            "enabled": True,
            "ship": "full",
            "forward": {"nodes": 4, "procPerNode": 4, "gpusPerNode": 0, "nodeSelector": {"pool": "cpu"}},
        },
        "model": {"attentionDropout": 0, "hiddenDropout": 0},
    },
    "template": {
        **ANALYZED,
        "podTemplate": {
            "metadata": {"labels": {"team": "a"}, "annotations": {"note": "b"}},
            "spec": {
                "containers": [
                    {"name": "trainer", "env": [{"name": "HF_HOME", "value": "/scratch"}], "stdin": True},
                    {
                        "name": "logs",
                        "image": "registry.example/logs:1",
                        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
                    },
                ],
                "volumes": [{"name": "scratch", "emptyDir": {}}],
                "topologySpreadConstraints": [
                    {
                        "maxSkew": 1,
                        "topologyKey": "zone",
                        "whenUnsatisfiable": "ScheduleAnyway",
                        "labelSelector": {"matchLabels": {"team": "a"}},
                    }
                ],
            },
        },
    },
}
"""Specs of jobs, as additions to `BASE`."""
UNRESTRICTED = {"rdma-host-devices", "rdma", "rdma-analyzed", "host-network"}
"""Names of jobs whose workers need more than the pod security standard `restricted` allows."""


def joined(base: Mapping[str, Any], patch: Mapping[str, Any]) -> Object:
    """`base` with the blocks of `patch` in it."""
    made = copy.deepcopy(dict(base))
    for name, value in patch.items():
        old = made.get(name)
        made[name] = joined(old, value) if isinstance(old, dict) and isinstance(value, dict) else copy.deepcopy(value)
    return made


def make_job(patch: Mapping[str, Any] | None = None, *, name: str = "gpt", namespace: str = "default") -> MegatronJob:
    """A job that is right, with `patch` in its spec."""
    metadata = {"name": name, "namespace": namespace}
    kind = {"apiVersion": "megatronapp.io/v1alpha1", "kind": "MegatronJob"}
    return load_job({**kind, "metadata": metadata, "spec": joined(BASE, patch or {})})


def with_template(job: MegatronJob, spec: Object, metadata: Object | None = None) -> MegatronJob:
    """Return the job with an unchecked pod template: a cluster may lack the policy that checks it."""
    template = job.spec.pod_template.model_copy(
        update={"spec": spec, "metadata": PodMetadata.model_validate(metadata or {})}
    )
    return job.model_copy(update={"spec": job.spec.model_copy(update={"pod_template": template})})


def owner_of(job: MegatronJob, uid: str = UID) -> JobOwner:
    return JobOwner(namespace=job.metadata.namespace, name=job.metadata.name, uid=uid)


def make_worker(
    job: MegatronJob, index: int = 0, *, attempt: int = 0, excluded: tuple[str, ...] = (), **settings: Any
) -> Object:
    """The pod of a worker."""
    life = AttemptSettings(number=attempt, excluded_nodes=excluded)
    return render.worker_pod(job, owner_of(job), life, index, with_settings(**settings))


def with_settings(**changes: Any) -> RenderSettings:
    return dataclasses.replace(SETTINGS, **changes)


def container(pod: Object, name: str = "trainer") -> Object:
    """A container of a pod by its name."""
    found = [
        container
        for container in pod["spec"]["containers"] + pod["spec"].get("initContainers", [])
        if container["name"] == name
    ]
    assert len(found) == 1, [found_container["name"] for found_container in found]
    made: Object = found[0]
    return made


def environment(pod: Object, name: str = "trainer") -> dict[str, Any]:
    """Variables of a container: its text, or the path of the field that it is read from."""
    entries = container(pod, name)["env"]
    names = [entry["name"] for entry in entries]
    assert len(names) == len(set(names)), "a name stands twice"
    return {entry["name"]: entry.get("value", _path(entry)) for entry in entries}


def _path(entry: Object) -> Any:
    return entry.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath")
