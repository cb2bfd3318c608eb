"""Init container that waits for annotations that other controllers write on a pod once it is bound to a node."""

import dataclasses

from megatronapp_common.names import RankOrder
from megatronapp_operator.backends.kubernetes.client.resources import Object
from megatronapp_operator.backends.kubernetes.render.pod import network
from megatronapp_operator.backends.kubernetes.render.pod.environment import ANNOTATION_TOPOLOGY, rank_order
from megatronapp_operator.backends.kubernetes.render.pod.security import container_security
from megatronapp_operator.backends.kubernetes.render.pod.worker_draft import WorkerDraft

NAME = "await-annotations"
VOLUME = "annotations"
FOLDER = "/run/megatronapp/annotations"
WAIT_S = 120
"""Seconds that the init container waits for annotations."""
RESOURCES = {"cpu": "100m", "memory": "128Mi"}
"""Requests and limits alike: without them a Guaranteed pod would lose its class."""
PROGRAM = """
import pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
seconds, given = sys.argv[1], sys.argv[2:]
needed, wanted = given[: given.index("--")], given[given.index("--") + 1 :]
until = time.monotonic() + float(seconds)
def missing(paths):
    return [path.rpartition("/")[2] for path in paths if not pathlib.Path(path).read_text().strip()]
while missing(needed + wanted) and time.monotonic() < until:
    time.sleep(0.2)
if names := ", ".join(missing(needed + wanted)):
    print(f"these annotations are not written after {seconds} s: {names}", file=sys.stderr)
if missing(needed):
    sys.exit("is what attaches networks installed in this cluster?")
""".strip()
"""Waits for files to be filled: those before `--` must be filled in the end, those after it may stay empty.

The first process of a container does not get a signal that it has no handler for."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AwaitedAnnotation:
    """Annotation that the launcher's environment depends on."""

    file: str
    annotation: str
    needed: bool
    """True if the ranks would not be as requested without it."""


def awaited_annotations(draft: WorkerDraft) -> list[AwaitedAnnotation]:
    """Return the annotations that are written on a worker's pod after it is bound, and that its launcher reads."""
    made: list[AwaitedAnnotation] = []
    if network.waits_for_networks(draft):
        made.append(AwaitedAnnotation(file="network-status", annotation=network.ANNOTATION_NETWORK_STATUS, needed=True))
    if rank_order(draft) is RankOrder.TOPOLOGY:
        made.append(AwaitedAnnotation(file="topology", annotation=ANNOTATION_TOPOLOGY, needed=False))
    return made


def waiting_containers(draft: WorkerDraft, image: Object) -> list[Object]:
    """Return an init container that ends once the annotations exist; none if no annotation is awaited.

    The kubelet makes a container's environment from the state of the pod when it began to start its containers, which
    is before the networks are attached. A container that starts after an init container sees what that has seen.
    `image` is the trainer's, which is needed in any case.
    """
    files = awaited_annotations(draft)
    if not files:
        return []
    needed = [f"{FOLDER}/{annotation.file}" for annotation in files if annotation.needed]
    optional = [f"{FOLDER}/{annotation.file}" for annotation in files if not annotation.needed]
    return [
        {
            "name": NAME,
            **image,
            "command": ["python3", "-c", PROGRAM, str(WAIT_S), *needed, "--", *optional],
            "resources": {"requests": RESOURCES, "limits": RESOURCES},
            "volumeMounts": [{"name": VOLUME, "mountPath": FOLDER, "readOnly": True}],
            "securityContext": container_security(read_only=True),
            "terminationMessagePolicy": "FallbackToLogsOnError",
        }
    ]


def waiting_volumes(draft: WorkerDraft) -> list[Object]:
    """Return the volume from which the init container reads them; the kubelet updates it when they change."""
    items = [
        {"path": annotation.file, "fieldRef": {"fieldPath": f"metadata.annotations['{annotation.annotation}']"}}
        for annotation in awaited_annotations(draft)
    ]
    return [{"name": VOLUME, "downwardAPI": {"items": items}}] if items else []
