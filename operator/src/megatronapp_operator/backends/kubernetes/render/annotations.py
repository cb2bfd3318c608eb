"""Waiting for annotations that others write on a pod once it has its place."""

from megatronapp_common.names import RankOrder
from megatronapp_operator.backends.kubernetes.api import Object
from megatronapp_operator.backends.kubernetes.render import network
from megatronapp_operator.backends.kubernetes.render.environment import ANNOTATION_TOPOLOGY, rank_order
from megatronapp_operator.backends.kubernetes.render.security import container_security
from megatronapp_operator.backends.kubernetes.render.worker_draft import Draft

NAME = "await-annotations"
VOLUME = "annotations"
FOLDER = "/run/megatronapp/annotations"
WAIT_S = 120
PROGRAM = """
import pathlib, sys, time
until = time.monotonic() + float(sys.argv[1])
def missing():
    return [path for path in sys.argv[2:] if not pathlib.Path(path).read_text().strip()]
while missing() and time.monotonic() < until:
    time.sleep(0.2)
if missing():
    names = ", ".join(path.rpartition("/")[2] for path in missing())
    sys.exit(f"nobody has written these annotations within {sys.argv[1]} s: {names}; is what writes them installed?")
""".strip()


def awaited(draft: Draft) -> dict[str, str]:
    """Files and annotations that the launcher's environment is made of."""
    made: dict[str, str] = {}
    if network.waits_for_networks(draft):
        made["network-status"] = network.ANNOTATION_NETWORK_STATUS
    if rank_order(draft) is RankOrder.TOPOLOGY:
        made["topology"] = ANNOTATION_TOPOLOGY
    return made


def waiting_containers(draft: Draft, image: Object) -> list[Object]:
    """An init container that ends once they are there; none where nothing is awaited.

    The kubelet makes a container's environment from the pod as it knew it when it began to start its containers,
    which is before the networks are attached. A container that starts after an init container sees what the
    init container has seen. `image` is the trainer's, which is needed in any case.
    """
    files = awaited(draft)
    if not files:
        return []
    return [
        {
            "name": NAME,
            **image,
            "command": ["python3", "-c", PROGRAM, str(WAIT_S), *(f"{FOLDER}/{name}" for name in files)],
            "volumeMounts": [{"name": VOLUME, "mountPath": FOLDER, "readOnly": True}],
            "securityContext": container_security(read_only=True),
            "terminationMessagePolicy": "FallbackToLogsOnError",
        }
    ]


def waiting_volumes(draft: Draft) -> list[Object]:
    """Where that init container reads them; the kubelet writes them anew when they change."""
    items = [
        {"path": name, "fieldRef": {"fieldPath": f"metadata.annotations['{annotation}']"}}
        for name, annotation in awaited(draft).items()
    ]
    return [{"name": VOLUME, "downwardAPI": {"items": items}}] if items else []
