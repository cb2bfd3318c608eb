"""Other controllers of training jobs that bench_operator.py compares with: JobSet, and Kubeflow Trainer above it.

Both run without their webhooks, so their jobs have the defaults that these would write: on a real cluster each JobSet
and each of its pods takes a call of a webhook more. Kubernetes' Job controller and garbage collector run next to them,
because both make Jobs and delete them with their pods. Cost is that of all these processes together.
"""

import contextlib
import enum
import json
import pathlib
import shutil
from collections.abc import Iterator
from typing import Any

import kube
from operator_cluster import Cluster, Program
from operator_jobs import indexed_job
from ports import reserved_ports

Object = dict[str, Any]
CERTIFICATES = pathlib.Path("/tmp/k8s-webhook-server/serving-certs")
"""Folder that Kubeflow Trainer has as a constant, and both use."""
TRAINER_NAMESPACE = "kubeflow-system"
RUNTIME = "bench"
NODE = "node"
"""Name of the replicated job and of its container, as Kubeflow Trainer wants it."""
RESTARTS = 100


class Peer(enum.StrEnum):
    """Controller of training jobs, and the release that scripts/kube_tools.sh builds."""

    JOBSET = "JobSet v0.8.0"
    TRAINER = "Kubeflow Trainer v2.0.0"


def group_path(peer: Peer, namespace: str) -> str:
    """Return the path of the peer's jobs."""
    group = "jobset.x-k8s.io/v1alpha2" if peer is Peer.JOBSET else "trainer.kubeflow.org/v1alpha1"
    return f"/apis/{group}/namespaces/{namespace}/{'jobsets' if peer is Peer.JOBSET else 'trainjobs'}"


def peer_job(peer: Peer, namespace: str, name: str, pods: int) -> Object:
    """Return a job of the peer whose pods are those of a MegatronJob without a hub."""
    metadata = {"name": name, "namespace": namespace}
    if peer is Peer.JOBSET:
        spec = _job_set(_template(namespace, pods))
        return {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": metadata, "spec": spec}
    training = {"runtimeRef": {"name": RUNTIME}, "trainer": {"numNodes": pods, "numProcPerNode": 8}}
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": metadata,
        "spec": training,
    }


def _template(namespace: str, pods: int) -> Object:
    """Return the template of a Job, of which one failed pod is a failure of the whole."""
    spec = indexed_job(namespace, RUNTIME, pods, hub=False)["spec"]
    spec["template"]["spec"]["containers"][0]["name"] = NODE
    return {"spec": spec | {"backoffLimit": 0}}


def _job_set(template: Object) -> Object:
    """Return the spec of a JobSet, with the fields that its webhook would add."""
    return {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "successPolicy": {"operator": "All"},
        "startupPolicy": {"startupPolicyOrder": "AnyOrder"},
        "failurePolicy": {"maxRestarts": RESTARTS},
        "replicatedJobs": [{"name": NODE, "replicas": 1, "template": template}],
    }


def _runtime(namespace: str) -> Object:
    template = _template(namespace, 1)
    template["metadata"] = {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}}
    spec = {"mlPolicy": {"numNodes": 1, "torch": {"numProcPerNode": 8}}, "template": {"spec": _job_set(template)}}
    metadata = {"name": RUNTIME}
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "ClusterTrainingRuntime",
        "metadata": metadata,
        "spec": spec,
    }


@contextlib.contextmanager
def serving_certificates(plane: kube.ControlPlane) -> Iterator[None]:
    """Give the webhook servers a certificate where they look for it; no API server calls them."""
    CERTIFICATES.mkdir(parents=True, exist_ok=True)
    for suffix in ("crt", "key"):
        shutil.copy(plane.certificate.with_suffix(f".{suffix}"), CERTIFICATES / f"tls.{suffix}")
    try:
        yield
    finally:
        shutil.rmtree(CERTIFICATES.parent, ignore_errors=True)


async def start_peer(made: Cluster, peer: Peer, namespace: str) -> list[Program]:
    """Define the peer's kinds and start its controllers; the first program is its own."""
    found = [await _start_job_set(made)]
    if peer is Peer.TRAINER:
        found.insert(0, await _start_trainer(made, namespace))
    return found


def _define(made: Cluster, folder: pathlib.Path) -> None:
    made.plane.define(*sorted((folder / "crds").glob("*_*.yaml")))


async def _start_job_set(made: Cluster) -> Program:
    folder = kube.programs("jobset")
    _define(made, folder)
    with reserved_ports(2) as (webhook, health):
        settings = {
            "apiVersion": "config.jobset.x-k8s.io/v1alpha1",
            "kind": "Configuration",
            "leaderElection": {"leaderElect": False},
            "internalCertManagement": {"enable": False},
            "webhook": {"port": webhook},
            "health": {"healthProbeBindAddress": f"127.0.0.1:{health}"},
        }
        path = made.folder / "jobset.yaml"
        path.write_text(json.dumps(settings), encoding="utf-8")
        flags = [f"--config={path}", "--metrics-bind-address=0", "--zap-log-level=info"]
        program = made.start("jobset", str(folder / "jobset"), f"--kubeconfig={made.plane.kubeconfig()}", *flags)
        await program.wait_for_line("Starting workers")
    return program


async def _start_trainer(made: Cluster, namespace: str) -> Program:
    folder = kube.programs("trainer")
    _define(made, folder)
    client = made.client
    await client.send("POST", "/api/v1/namespaces", {"metadata": {"name": TRAINER_NAMESPACE}})
    secret = {"metadata": {"name": "kubeflow-trainer-webhook-cert"}}
    await client.send("POST", f"/api/v1/namespaces/{TRAINER_NAMESPACE}/secrets", secret)
    webhooks = "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations"
    await client.send("POST", webhooks, {"metadata": {"name": "validator.trainer.kubeflow.org"}})
    await client.send("POST", "/apis/trainer.kubeflow.org/v1alpha1/clustertrainingruntimes", _runtime(namespace))
    with reserved_ports(2) as (webhook, health):
        flags = [f"--webhook-server-port={webhook}", f"--health-probe-bind-address=127.0.0.1:{health}"]
        binary = str(folder / "trainer-controller-manager")
        program = made.start("trainer", binary, f"--kubeconfig={made.plane.kubeconfig()}", *flags)
        await program.wait_for_line("Starting workers")
    return program
