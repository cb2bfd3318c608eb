"""Examples of the rules about podTemplate, which an admission policy judges on a cluster."""

from typing import Any

from rule_example import Changes, Example, bad, good
from rule_examples_cluster import WITHIN_LIMITS

_POD = "spec.podTemplate.spec"
_CONTAINERS = f"{_POD}.containers"
_CLAIM = {"name": "gpus", "resourceClaimTemplateName": "four-gpus"}
_CLAIMING: dict[str, Any] = {"name": "trainer", "resources": {"claims": [{"name": "gpus"}]}}
_CLAIMED: Changes = {"spec.gpusPerNode": 4, "spec.gpuResourceName": "resource.k8s.io/claims"}


def _pod(**fields: Any) -> Changes:
    return {_POD: fields}


def _container(name: str = "trainer", **fields: Any) -> Changes:
    return _pod(containers=[{"name": name, **fields}])


def _refused(name: str, value: Any, message: str) -> list[Example]:
    """Return examples of a field of the pod that must be omitted."""
    return [
        *good(f"pod-{name}", _pod(dnsPolicy="Default", nodeName="a")),
        *bad(f"pod-{name}", f"{_POD}.{name}", (_pod(**{name: value}), message)),
    ]


def _own(name: str, value: Any, message: str) -> list[Example]:
    """A field of our containers that others may set."""
    message_of_trainer = f"sets {name} of trainer, which is the operator's; {message}"
    return [
        *good(f"container-{name}", _container("proxy", **{name: value}), _container(workingDir="/data")),
        *bad(f"container-{name}", _CONTAINERS, (_container(**{name: value}), message_of_trainer)),
    ]


def _shm(size: str | None, container: str, memory: str) -> Changes:
    """Return changes with a size of shared memory next to a container's memory limit."""
    return _container(container, resources={"limits": {"memory": memory}}) | {"spec.shm.sizeLimit": size}


POD_EXAMPLES = (
    *_refused("restartPolicy", "OnFailure", "is Never, as the operator restarts all workers together; leave it out"),
    *_refused("hostname", "me", "is how the ranks find each other"),
    *_refused("subdomain", "me", "is how the ranks find each other"),
    *_refused("setHostnameAsFQDN", True, "would change the name by which the ranks find each other"),
    *_refused("hostIPC", True, "would mix the shared memory of jobs"),
    *_refused("hostPID", False, "would mix the processes of jobs"),
    *_refused("hostNetwork", True, "is set by another field: write network.mode: HostNetwork"),
    *_refused("shareProcessNamespace", True, "process 1, which reaps orphans"),
    *_refused("terminationGracePeriodSeconds", 5, "write runPolicy.terminationGracePeriodSeconds"),
    *_refused("activeDeadlineSeconds", 5, "write runPolicy.activeDeadlineSeconds"),
    *good("pod-containers-have-names", _pod(containers=[{"name": "proxy", "image": "proxy:1"}])),
    *bad(
        "pod-containers-have-names",
        _CONTAINERS,
        (_pod(containers=[{"image": "proxy:1"}]), "must be a list of blocks with a name each"),
    ),
    *good("pod-initContainers-have-names", _pod(initContainers=[{"name": "tune", "image": "tune:1"}])),
    *bad(
        "pod-initContainers-have-names",
        f"{_POD}.initContainers",
        (_pod(initContainers=[{"image": "proxy:1"}]), "must be a list of blocks with a name each"),
    ),
    *good("pod-volumes-have-names", _pod(volumes=[{"name": "scratch", "emptyDir": {}}])),
    *bad(
        "pod-volumes-have-names",
        f"{_POD}.volumes",
        (_pod(volumes={"scratch": {}}), "must be a list of blocks with a name each, by which they are merged"),
        (_pod(volumes=["scratch"]), "must be a list of blocks"),
    ),
    *good("pod-resourceClaims-have-names", _pod(resourceClaims=[_CLAIM])),
    *bad(
        "pod-resourceClaims-have-names",
        f"{_POD}.resourceClaims",
        (_pod(resourceClaims=[{"resourceClaimName": "gpus"}]), "must be a list of blocks with a name each"),
    ),
    *good(
        "gpus-are-claimed",
        {**_CLAIMED, f"{_POD}.resourceClaims": [_CLAIM], _CONTAINERS: [_CLAIMING]},
        {**_CLAIMED, "spec.gpusPerNode": 0},
        {**_CLAIMED, "spec.profile": "has-the-claims"},
        {"spec.gpusPerNode": 4},
    ),
    *bad(
        "gpus-are-claimed",
        "spec.gpuResourceName",
        (_CLAIMED, "is resource.k8s.io/claims, and podTemplate claims nothing for the trainer"),
        (
            {**_CLAIMED, f"{_POD}.resourceClaims": [_CLAIM], _CONTAINERS: [_CLAIMING | {"name": "agent"}]},
            "write its resources.claims there",
        ),
    ),
    *_own("image", "mine:1", "write image, or analyzer.image"),
    *_own("command", ["sh"], "leave it out"),
    *_own("args", ["-c"], "write args, which the ranks get"),
    *_own("restartPolicy", "Always", "leave it out"),
    *_own("terminationMessagePath", "/tmp/end", "leave it out"),
    *_own("terminationMessagePolicy", "File", "leave it out"),
    *good(
        "container-env",
        _container(env=[{"name": "OMP_NUM_THREADS", "value": "4"}]),
        _container("proxy", env=[{"name": "RANK", "value": "4"}]),
    ),
    *bad(
        "container-env",
        _CONTAINERS,
        (_container(env=[{"name": "A"}, {"name": "MASTER_ADDR", "value": "a"}]), "sets a variable of trainer or agent"),
        (
            _pod(initContainers=[{"name": "agent", "env": [{"name": "MEGATRONAPP_HUB_URL", "value": "http://a"}]}]),
            "that the operator or the launcher sets; leave it out",
        ),
    ),
    Example(
        rule_id="container-env",
        good=False,
        change=_container(env="A=1"),
        field=_CONTAINERS,
        message="sets a variable of trainer or agent",
        server_message="resulted in error",
    ),
    *good("container-mounts", _container(volumeMounts=[{"name": "scratch", "mountPath": "/scratch"}])),
    *bad(
        "container-mounts",
        _CONTAINERS,
        (
            _container(volumeMounts=[{"name": "scratch", "mountPath": "/dev/shm"}]),
            "mounts a volume where trainer or agent have what the system or the operator puts there",
        ),
    ),
    Example(
        rule_id="container-mounts",
        good=False,
        change=_container(volumeMounts=[{"name": "scratch"}]),
        field=_CONTAINERS,
        message="mounts a volume where",
        server_message="resulted in error",
    ),
    *good("template-volumes", _pod(volumes=[{"name": "my-secret"}, {"name": "claim-0", "emptyDir": {}}])),
    *bad(
        "template-volumes",
        "spec.podTemplate.spec.volumes",
        (
            _pod(volumes=[{"name": "other"}, {"name": "secret", "secret": {"secretName": "hf-token"}}]),
            "has secret, the name of a volume of the operator; write my-secret",
        ),
        (_pod(volumes=[{"name": "run"}, {"name": "shm"}]), "has run, the name of a volume of the operator"),
    ),
    *good(
        "shm-within-template-memory",
        _shm("2Gi", "trainer", "3Gi"),
        _shm("2Gi", "agent", "1Gi"),
        _shm(None, "trainer", "1"),
    ),
    *bad(
        "shm-within-template-memory",
        "spec.shm.sizeLimit",
        (_shm("16Gi", "trainer", "8Gi"), "must be below the memory limit of the trainer in podTemplate"),
        (_shm("2Gi", "trainer", "2Gi"), "must be below the memory limit of the trainer in podTemplate"),
    ),
    *WITHIN_LIMITS,
    *good(
        "failure-rule-regex",
        {"spec.runPolicy.rules": [{"action": "FailJob", "match": {"messageRegex": r"^Xid \(\d+\)|\pL"}}]},
    ),
    Example(
        rule_id="failure-rule-regex",
        good=False,
        change={"spec.runPolicy.rules": [{"action": "FailJob", "match": {"messageRegex": "Xid ("}}]},
        field="spec.runPolicy.rules",
        message="holds a messageRegex that is no regular expression of RE2",
        server_message="resulted in error",
    ),
)
