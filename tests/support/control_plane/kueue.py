"""Real Kueue with a real API server: the CRDs and webhooks of its chart, and its controller as a process.

The API server calls the webhooks at an address of loopback instead of a Service; all other fields are unchanged.
"""

import base64
import contextlib
import dataclasses
import pathlib
import subprocess
import time
from collections.abc import Iterator
from typing import IO, Any

import httpx
import kube
import yaml
from ports import reserved_ports
from shared_tls import SHARED_TLS

Object = dict[str, Any]
START_S = 120
POLL_S = 0.1
HOME = "kueue-system"
WEBHOOKS = ("MutatingWebhookConfiguration", "ValidatingWebhookConfiguration")
_EC = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")


@dataclasses.dataclass(frozen=True, slots=True)
class Kueue:
    """Controller of Kueue as a process."""

    plane: kube.ControlPlane
    folder: pathlib.Path
    health_port: int
    webhook_port: int

    @property
    def log(self) -> pathlib.Path:
        """Path of its log."""
        return self.folder / "kueue.log"

    def ready(self) -> bool:
        """Return whether its webhooks answer."""
        try:
            return httpx.get(
                f"http://127.0.0.1:{self.health_port}/readyz", trust_env=False, verify=SHARED_TLS
            ).is_success
        except httpx.TransportError:
            return False


@contextlib.contextmanager
def kueue(plane: kube.ControlPlane, folder: pathlib.Path) -> Iterator[Kueue]:
    """Install Kueue in a control plane and run it; it manages pods of every namespace that name a queue."""
    with reserved_ports(2) as (health_port, webhook_port):
        made = Kueue(plane, folder, health_port, webhook_port)
        with _installed(made):
            yield made


@contextlib.contextmanager
def _installed(made: Kueue) -> Iterator[None]:
    programs, plane, folder = kube.programs("kueue"), made.plane, made.folder
    _certificate(folder)
    config = _configuration(made)
    (folder / "config.yaml").write_text(config, encoding="utf-8")
    documents = _rendered(programs / "chart", folder, config)
    plane.kubectl("create", "namespace", HOME)
    _apply(
        plane, [_reachable(document, made) for document in documents if document["kind"] == "CustomResourceDefinition"]
    )
    done = plane.kubectl("wait", "--for=condition=Established", "crd", "--all", "--timeout=240s")
    assert done.returncode == 0, done.stderr
    command = [programs / "kueue", f"--config={folder / 'config.yaml'}", f"--kubeconfig={plane.kubeconfig()}"]
    with made.log.open("wb") as log, _running(command, log) as process:
        _wait(made, process)
        _apply(plane, [_reachable(document, made) for document in documents if document["kind"] in WEBHOOKS])
        yield


@contextlib.contextmanager
def collectors(plane: kube.ControlPlane, folder: pathlib.Path) -> Iterator[None]:
    """The garbage collector, and the collector of pods that no kubelet ends, of a real controller manager."""
    command = [
        kube.programs("cluster") / "kube-controller-manager",
        f"--kubeconfig={plane.kubeconfig()}",
        "--leader-elect=false",
        "--controllers=garbage-collector-controller,pod-garbage-collector-controller",
        "--secure-port=0",
    ]
    with (folder / "controllers.log").open("wb") as log, _running(command, log):
        yield


@contextlib.contextmanager
def _running(command: list[Any], log: IO[bytes]) -> Iterator["subprocess.Popen[bytes]"]:
    process = subprocess.Popen(
        ["setpriv", "--pdeathsig", "KILL", *command], stdin=subprocess.DEVNULL, stdout=log, stderr=log
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def queue(plane: kube.ControlPlane, namespace: str, name: str, *, cpus: int) -> None:
    """Create a queue of a namespace, with a separate quota. Workloads of a higher priority preempt others."""
    whole = f"{namespace}-{name}"
    flavor = {"name": whole, "resources": [{"name": "cpu", "nominalQuota": cpus}]}
    _apply(
        plane,
        [
            _object("ResourceFlavor", whole),
            _object(
                "ClusterQueue",
                whole,
                {
                    "namespaceSelector": {},
                    "preemption": {"withinClusterQueue": "LowerPriority"},
                    "resourceGroups": [{"coveredResources": ["cpu"], "flavors": [flavor]}],
                },
            ),
            _object("LocalQueue", name, {"clusterQueue": whole}, namespace=namespace),
        ],
    )


def _object(kind: str, name: str, spec: Object | None = None, *, namespace: str | None = None) -> Object:
    place = {} if namespace is None else {"namespace": namespace}
    made = {"apiVersion": "kueue.x-k8s.io/v1beta1", "kind": kind, "metadata": {"name": name, **place}}
    return made if spec is None else made | {"spec": spec}


def _configuration(made: Kueue) -> str:
    """The defaults of its chart, but for plain pods instead of other kinds, and ports and keys of our own."""
    ports = {"host": "127.0.0.1", "port": made.webhook_port, "certDir": str(made.folder)}
    document = {
        "apiVersion": "config.kueue.x-k8s.io/v1beta1",
        "kind": "Configuration",
        "namespace": HOME,
        "health": {"healthProbeBindAddress": f"127.0.0.1:{made.health_port}"},
        "metrics": {"bindAddress": "0"},
        "webhook": ports,
        "leaderElection": {"leaderElect": False},
        "internalCertManagement": {"enable": False},
        "clientConnection": {"qps": 500, "burst": 1000},
        "featureGates": {"VisibilityOnDemand": False},
        "integrations": {
            "frameworks": ["pod"],
            "podOptions": {
                "namespaceSelector": {
                    "matchExpressions": [
                        {"key": "kubernetes.io/metadata.name", "operator": "NotIn", "values": ["kube-system", HOME]}
                    ]
                }
            },
        },
    }
    return yaml.safe_dump(document)


def _rendered(chart: pathlib.Path, folder: pathlib.Path, config: str) -> list[Object]:
    values = folder / "values.yaml"
    values.write_text(yaml.safe_dump({"managerConfig": {"controllerManagerConfigYaml": config}}), encoding="utf-8")
    helm = kube.programs("helm") / "helm"
    command = [str(helm), "template", "kueue", str(chart), "-n", HOME, "-f", str(values), "--kube-version", "1.35.4"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    return [document for document in yaml.safe_load_all(done.stdout) if document]


def _reachable(document: Object, made: Kueue) -> Object:
    """The object with addresses of loopback in place of Kueue's Service."""
    if document["kind"] == "CustomResourceDefinition":
        configs = [document["spec"].get("conversion", {}).get("webhook", {}).get("clientConfig")]
    else:
        configs = [webhook["clientConfig"] for webhook in document["webhooks"]]
    for config in (config for config in configs if config is not None):
        path = config.pop("service")["path"]
        config["url"] = f"https://127.0.0.1:{made.webhook_port}{path}"
        config["caBundle"] = base64.b64encode((made.folder / "tls.crt").read_bytes()).decode()
    return document


def _certificate(folder: pathlib.Path) -> None:
    names = ("-subj", "/CN=kueue", "-addext", "subjectAltName=IP:127.0.0.1")
    command = ["openssl", "req", "-x509", *_EC, *names, "-days", "30", "-keyout", "tls.key", "-out", "tls.crt"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)


def _apply(plane: kube.ControlPlane, documents: list[Object]) -> None:
    listed = {"apiVersion": "v1", "kind": "List", "items": documents}
    done = plane.kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=listed)
    assert done.returncode == 0, done.stderr


def _wait(made: Kueue, process: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + START_S
    while not made.ready():
        log = made.log.read_text(encoding="utf-8", errors="replace")[-3000:]
        assert process.poll() is None and time.monotonic() < deadline, log
        time.sleep(POLL_S)
