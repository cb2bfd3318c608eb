"""Examples of the rules about a cluster: resources, volumes, network, queues, failures."""

from typing import Any

from rule_example import Changes, Example, bad, good, stays
from rule_examples_runtimes import forward
from rule_examples_serve import SERVED

_FBD = {"enabled": True}
_SUSPENDED: Changes = {"spec.suspend": True}
_CODES = {"action": "FailJob", "match": {"exitCodes": {"in": [1]}}}


def _volume(path: str = "/data", **fields: Any) -> Changes:
    return {"spec.data.volume": {"claim": "corpus", "mountPath": path, **fields}}


def _checkpoints(path: str = "/checkpoints", **fields: Any) -> Changes:
    return {"spec.checkpoint.volume": {"claim": "runs", "mountPath": path, **fields}}


def _initializer(**fields: Any) -> Changes:
    return {"spec.initializers": [{"name": "fetch", "image": "fetcher:1", **fields}]}


def _rules(*rules: dict[str, Any]) -> Changes:
    return {"spec.runPolicy.rules": list(rules)}


_SPARE: Changes = {"spec.runPolicy": {"restart": "InPlace", "spares": 1}}
_SWAP: Changes = {"spec.analyzer": {"enabled": True, "slowNode": {"action": "SwapAtCheckpoint"}}}
_SAVES: Changes = {"spec.checkpoint": {"save": "/checkpoints/run", "saveInterval": 10}} | _checkpoints()
_GPUS: Changes = {"spec.gpusPerNode": 4}
_RDMA = {"enabled": True, "resourceName": "rdma/hca"}
_LESS = {"requests": {"cpu": "1500m", "memory": "1G", "other.io/x": 1}, "limits": {"cpu": "1.5", "memory": "1Gi"}}
_MORE = {"requests": {"cpu": "1501m"}, "limits": {"cpu": "1.5"}}


def _requests(place: str, also: Changes) -> list[Example]:
    rule_id = f"requests-within-limits-of.{place}"
    message = "requests more of a resource than its limit"
    return [
        *good(rule_id, {**also, f"spec.{place}": _LESS}),
        *bad(rule_id, f"spec.{place}", ({**also, f"spec.{place}": _MORE}, message)),
    ]


WITHIN_LIMITS = [
    *_requests("resources", {}),
    *_requests("analyzer.resources", {}),
    *_requests("fbd.forward.resources", {"spec.fbd.enabled": True}),
]
_RESOURCES = [
    *good(
        "gpus-named-once",
        {**_GPUS, "spec.resources": {"limits": {"nvidia.com/gpu": 4, "cpu": "7500m"}, "requests": {"cpu": 2}}},
        {**_GPUS, "spec.resources.limits": {"nvidia.com/gpu": "4"}},
        {**_GPUS, "spec.resources.limits": {"amd.com/gpu": 1}},
    ),
    *bad(
        "gpus-named-once",
        "spec.resources",
        (
            {**_GPUS, "spec.resources.limits": {"nvidia.com/gpu": 8}},
            "names nvidia.com/gpu with another count than gpusPerNode 4; leave it out",
        ),
        (
            {**_GPUS, "spec.resources.requests": {"amd.com/gpu": 1}, "spec.gpuResourceName": "amd.com/gpu"},
            "names amd.com/gpu with another count",
        ),
        ({"spec.resources.limits": {"nvidia.com/gpu": 4}}, "another count than gpusPerNode 0"),
    ),
    *good("rdma-named-once", {"spec.network.rdma": _RDMA, "spec.resources.limits": {"rdma/hca": 1}}),
    *bad(
        "rdma-named-once",
        "spec.resources",
        (
            {"spec.network.rdma": _RDMA | {"count": 2}, "spec.resources.limits": {"rdma/hca": 1}},
            "names rdma/hca with another count than network.rdma.count 2; leave it out",
        ),
    ),
    *good("shm.sizeLimit-above-zero", {"spec.shm.sizeLimit": "64Mi"}, {"spec.shm.sizeLimit": 1000000}),
    *bad(
        "shm.sizeLimit-above-zero",
        "spec.shm.sizeLimit",
        ({"spec.shm.sizeLimit": "0Gi"}, "must be above 0, such as 16Gi"),
        ({"spec.shm.sizeLimit": 0}, "must be above 0, such as 16Gi"),
    ),
    *good(
        "shm-within-memory",
        {"spec.shm.sizeLimit": "16Gi", "spec.resources.limits": {"memory": "17Gi"}},
        {"spec.shm.sizeLimit": "1G", "spec.resources.limits": {"memory": "1Gi"}},
        {"spec.shm.sizeLimit": "2e9", "spec.resources.limits": {"memory": 2000000001}},
    ),
    *bad(
        "shm-within-memory",
        "spec.shm.sizeLimit",
        (
            {"spec.shm.sizeLimit": "16Gi", "spec.resources.limits": {"memory": "16384Mi"}},
            "16Gi is not below resources.limits.memory 16384Mi, which it is charged to",
        ),
        ({"spec.shm.sizeLimit": "1.5Gi", "spec.resources.limits": {"memory": "1.6G"}}, "1.5Gi is not below"),
    ),
    *good(
        "analyzer-volume-has-space",
        {"spec.analyzer.volume.sizeLimit": "128Mi"},
        {"spec.analyzer.volume.sizeLimit": ".5G"},
    ),
    *bad(
        "analyzer-volume-has-space",
        "spec.analyzer.volume.sizeLimit",
        ({"spec.analyzer.volume.sizeLimit": "0"}, "0 is less than 128Mi; write more, such as 10Gi"),
        ({"spec.analyzer.volume.sizeLimit": "127Mi"}, "127Mi is less than 128Mi"),
    ),
]
_VOLUMES = [
    *good("data-mount-is-a-path", _volume("/data/corpora"), _volume("/data/")),
    *bad(
        "data-mount-is-a-path",
        "spec.data.volume.mountPath",
        (_volume("data"), "data is not an absolute path below / without '..' and ':'; write one such as /data"),
        (_volume("/"), "/ is not an absolute path"),
        (_volume("/data/../etc"), "is not an absolute path"),
        (_volume("/da:ta"), "is not an absolute path"),
        (_volume("/data//corpus"), "is not an absolute path"),
    ),
    *good("data-mount-is-free", _volume("/device"), _volume("/run/corpus")),
    *bad(
        "data-mount-is-free",
        "spec.data.volume.mountPath",
        (_volume("/dev/shm"), "/dev/shm belongs to the system or the operator; write another, such as /data"),
        (_volume("/run/megatronapp/secret"), "/run/megatronapp/secret belongs to"),
        (_volume("/run"), "/run belongs to"),
        (_volume("/proc/"), "/proc/ belongs to"),
    ),
    *good("data-sub-path-is-relative", _volume(subPath="team/..corpus")),
    *bad(
        "data-sub-path-is-relative",
        "spec.data.volume.subPath",
        (_volume(subPath="/team"), "must be a path inside of the volume"),
        (_volume(subPath="team/.."), "must be a path inside of the volume"),
    ),
    *good("checkpoint-mount-is-a-path", _checkpoints("/a-b_c/.d")),
    *bad("checkpoint-mount-is-a-path", "spec.checkpoint.volume.mountPath", (_checkpoints("runs"), "runs is not an")),
    *good("checkpoint-mount-is-free", _checkpoints()),
    *bad("checkpoint-mount-is-free", "spec.checkpoint.volume.mountPath", (_checkpoints("/sys/a"), "/sys/a belongs")),
    *good("checkpoint-sub-path-is-relative", _checkpoints(subPath="a")),
    *bad(
        "checkpoint-sub-path-is-relative",
        "spec.checkpoint.volume.subPath",
        (_checkpoints(subPath="../a"), "must be a path inside of the volume, without / in front and without '..'"),
    ),
    *good("mounts-apart", {**_volume("/data"), **_checkpoints("/data/runs")}),
    *bad(
        "mounts-apart",
        "spec.checkpoint.volume.mountPath",
        ({**_volume("/data"), **_checkpoints("/data")}, "/data is the mountPath of data.volume too; write another"),
        ({**_volume("/data/"), **_checkpoints("/data")}, "/data is the mountPath of data.volume too"),
        ({**_volume("/data"), **_checkpoints("/data/")}, "/data/ is the mountPath of data.volume too"),
    ),
    *good(
        "checkpoints-are-written",
        {**_checkpoints(), "spec.checkpoint.save": "/checkpoints/a"},
        {**_checkpoints(readOnly=True), "spec.checkpoint.load": "/checkpoints/a"},
    ),
    *bad(
        "checkpoints-are-written",
        "spec.checkpoint.volume.readOnly",
        ({**_checkpoints(readOnly=True), "spec.checkpoint.save": "/checkpoints/a"}, "checkpoint.save lies on this"),
    ),
]
_INITIALIZERS = [
    *good(
        "initializer-given-twice",
        {"spec.initializers": [{"name": "a", "image": "i"}, {"name": "b", "image": "i", "scope": "Node"}]},
    ),
    Example(
        rule_id="initializer-given-twice",
        good=False,
        change={"spec.initializers": [{"name": "a", "image": "i"}, {"name": "a", "image": "j"}]},
        field="spec.initializers",
        message="a is given twice; write another name",
        server_message="Duplicate value",
    ),
    *good(
        "initializer-needs-target",
        {**_volume(), **_initializer(storageUri="s3://bucket/corpus?part=1@2", target="/data/new")},
    ),
    *bad(
        "initializer-needs-target",
        "spec.initializers",
        (_initializer(storageUri="hf://models/tiny"), "fetch has a storageUri and needs target: DIRECTORY"),
    ),
    *good("initializer-target-is-a-path", _initializer(target="/scratch", scope="Node")),
    *bad(
        "initializer-target-is-a-path",
        "spec.initializers",
        (_initializer(target="scratch"), "target scratch of fetch must be an absolute path"),
        (_initializer(target="/dev/shm/a", scope="Node"), "target /dev/shm/a of fetch must be"),
    ),
    *good(
        "initializer-target-on-a-volume",
        {**_volume(), **_initializer(target="/data")},
        {**_volume("/data/"), **_initializer(target="/data/a")},
        {**_checkpoints(), **_initializer(target="/checkpoints/base")},
    ),
    *bad(
        "initializer-target-on-a-volume",
        "spec.initializers",
        ({**_volume(), **_initializer(target="/database")}, "target /database of fetch is not on data.volume or"),
        (_initializer(target="/data"), "write one below their mountPath, or scope: Node"),
    ),
]
_PODS = [
    *good("pod-labels-are-not-ours", {"spec.podTemplate.metadata.labels": {"team": "a", "app.kubernetes.io/v": "1"}}),
    *bad(
        "pod-labels-are-not-ours",
        "spec.podTemplate.metadata.labels",
        ({"spec.podTemplate.metadata.labels": {"megatronapp.io/attempt": "7"}}, "hold one that the operator sets"),
        ({"spec.podTemplate.metadata.labels": {"a": "b", "app.kubernetes.io/instance": "x"}}, "leave it out"),
    ),
    *good("pod-annotations-are-not-ours", {"spec.podTemplate.metadata.annotations": {"team.io/note": "a b"}}),
    *bad(
        "pod-annotations-are-not-ours",
        "spec.podTemplate.metadata.annotations",
        ({"spec.podTemplate.metadata.annotations": {"megatronapp.io/template-hash": "0"}}, "hold one that the"),
    ),
]
_HOST: Changes = {"spec.network.mode": "HostNetwork", "spec.network.policy": "None"}
_NETWORK = [
    *good(
        "rdma-needs-a-resource",
        {"spec.network.rdma": _RDMA},
        {**_HOST, "spec.network.rdma": {"enabled": True, "devices": "HostPath"}},
    ),
    *bad(
        "rdma-needs-a-resource",
        "spec.network.rdma.resourceName",
        ({"spec.network.rdma.enabled": True}, "is missing; write the resource of the cluster's device plugin"),
        ({**_HOST, "spec.network.rdma.enabled": True}, "or network.mode: HostNetwork with network.rdma.devices"),
    ),
    *good("host-path-devices-need-host-network", {**_HOST, "spec.network.rdma": _RDMA}),
    *bad(
        "host-path-devices-need-host-network",
        "spec.network.rdma.devices",
        ({"spec.network.rdma": {"enabled": True, "devices": "HostPath"}}, "HostPath needs network.rdma.enabled"),
        ({**_HOST, "spec.network.rdma.devices": "HostPath"}, "HostPath needs network.rdma.enabled"),
    ),
    *good("devices-from-one-place", {"spec.network.rdma": _RDMA | {"devices": "Resource"}}),
    *bad(
        "devices-from-one-place",
        "spec.network.rdma.resourceName",
        ({**_HOST, "spec.network.rdma": _RDMA | {"devices": "HostPath"}}, "has no effect with network.rdma.devices"),
    ),
    *good("host-path-devices-need-root", {"spec.network.rdma": _RDMA | {"ipcLock": False}}),
    *bad(
        "host-path-devices-need-root",
        "spec.network.rdma.ipcLock",
        (
            {**_HOST, "spec.network.rdma": {"enabled": True, "devices": "HostPath", "ipcLock": False}},
            "must be true for network.rdma.devices: HostPath",
        ),
    ),
    *good("shared-device-needs-rdma", {"spec.network": {"mode": "SharedDevice", "rdma": _RDMA}}),
    *bad(
        "shared-device-needs-rdma",
        "spec.network.rdma.enabled",
        ({"spec.network.mode": "SharedDevice"}, "must be true for network.mode SharedDevice"),
    ),
    *good(
        "mode-needs-attachments",
        {"spec.network": {"mode": "Sriov", "attachments": ["ib0"]}},
        {"spec.network": {"mode": "Macvlan", "attachments": ["net/roce-1@eth1", "b"]}},
        {"spec.network.attachments": ["storage"]},
    ),
    *bad(
        "mode-needs-attachments",
        "spec.network.attachments",
        ({"spec.network.mode": "Sriov"}, "is missing; network.mode Sriov needs a network of Multus"),
    ),
    *good("host-network-has-no-attachments", _HOST),
    *bad(
        "host-network-has-no-attachments",
        "spec.network.attachments",
        ({**_HOST, "spec.network.attachments": ["a"]}, "have no effect on pods in the node's own network"),
    ),
    *good("host-network-has-no-policy", {"spec.network.policy": "None"}),
    *bad(
        "host-network-has-no-policy",
        "spec.network.policy",
        ({"spec.network.mode": "HostNetwork"}, "must be None for network.mode HostNetwork: a NetworkPolicy does not"),
    ),
    *good(
        "topology-order-needs-a-key",
        {"spec.network": {"rankOrder": "Topology", "topologyKey": "topology.kubernetes.io/zone"}},
        {"spec.network.rankOrder": "IP"},
    ),
    *bad(
        "topology-order-needs-a-key",
        "spec.network.topologyKey",
        ({"spec.network.rankOrder": "Topology"}, "is missing; rankOrder Topology needs the label of nodes"),
    ),
    *good("nccl-variables", {"spec.network.nccl": {"NCCL_DEBUG": "INFO", "UCX_TLS": "rc"}}),
    *bad(
        "nccl-variables",
        "spec.network.nccl",
        ({"spec.network.nccl": {"NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "1"}}, "does not begin with NCCL_ or UCX_"),
    ),
    *good(
        "nccl-variables-once",
        {"spec.network.nccl": {"NCCL_DEBUG": "INFO"}, "spec.env": [{"name": "NCCL_ALGO", "value": "Ring"}]},
    ),
    *bad(
        "nccl-variables-once",
        "spec.network.nccl",
        (
            {"spec.network.nccl": {"NCCL_DEBUG": "INFO"}, "spec.env": [{"name": "NCCL_DEBUG", "value": "WARN"}]},
            "holds a variable that env holds too; leave one of them out",
        ),
    ),
]
_POLICIES = [
    *good("kueue-needs-a-queue", {"spec.scheduling": {"gang": "Kueue", "queue": "team-a"}}),
    *bad("kueue-needs-a-queue", "spec.scheduling.queue", ({"spec.scheduling.gang": "Kueue"}, "is missing; Kueue")),
    *good("in-place-without-queue", {"spec.runPolicy": {"restart": "InPlace"}}),
    *bad(
        "in-place-without-queue",
        "spec.runPolicy.restart",
        (
            {"spec.runPolicy": {"restart": "InPlace"}, "spec.scheduling": {"gang": "Coscheduling"}},
            "which places all pods of an attempt; leave out spares and elastic, too",
        ),
    ),
    *good("spares-restart-in-place", _SPARE, {"spec.runPolicy": {"spares": 0}}),
    *bad(
        "spares-restart-in-place",
        "spec.runPolicy.spares",
        ({"spec.runPolicy": {"restart": "Pods", "spares": 1}}, "by which spares take places, and no scheduling.gang"),
    ),
    *good("spares-train", _SPARE),
    *bad("spares-train", "spec.runPolicy.spares", (SERVED | _SPARE, "must be 0 with mode: serve")),
    *good("spares-of-one-kind", _SPARE | {"spec.fbd.enabled": False}),
    *bad(
        "spares-of-one-kind",
        "spec.runPolicy.spares",
        ({**_SPARE, "spec.fbd.enabled": True}, "must be 0 with fbd.enabled, whose workers have different roles"),
    ),
    *good(
        "checkpoints-outlive-nodes",
        _SPARE,
        _SPARE | {"spec.checkpoint": {"save": "/checkpoints/run"}} | _checkpoints(),
        _SPARE | {"spec.checkpoint": {"save": "/data/run"}} | _volume(),
    ),
    *bad(
        "checkpoints-outlive-nodes",
        "spec.checkpoint.save",
        (_SPARE | {"spec.checkpoint": {"save": "/elsewhere/run"}} | _volume(), "is lost with its pod"),
    ),
    *good(
        "queues-need-a-gang",
        {"spec.scheduling": {"gang": "Coscheduling", "timeoutSeconds": 60}},
        {"spec.scheduling": {"gang": "Kubernetes", "topology": {"level": "example.com/rack"}}},
    ),
    *bad(
        "queues-need-a-gang",
        "spec.scheduling.gang",
        ({"spec.scheduling.queue": "team-a"}, "must say who keeps queue, minAvailable and timeoutSeconds"),
        ({"spec.scheduling.minAvailable": 2}, "Kueue, Volcano, Coscheduling or KAI"),
        ({"spec.scheduling.timeoutSeconds": 2}, "Kueue, Volcano, Coscheduling or KAI"),
        ({"spec.scheduling": {"gang": "Kubernetes", "queue": "team-a"}}, "Kueue, Volcano, Coscheduling or KAI"),
    ),
    *good(
        "available-workers",
        {"spec.scheduling": {"gang": "Volcano", "minAvailable": 2}},
        {**forward(nodes=2), "spec.scheduling": {"gang": "Volcano", "minAvailable": 4}},
    ),
    *bad(
        "available-workers",
        "spec.scheduling.minAvailable",
        (
            {"spec.scheduling": {"gang": "Volcano", "minAvailable": 3}},
            "is 3, and a gang trains with all of its 2 workers or with none; leave it out or write 2",
        ),
        ({"spec.scheduling": {"gang": "Volcano", "minAvailable": 1}}, "is 1, and a gang trains with all of its 2"),
        ({**forward(nodes=2), "spec.scheduling": {"gang": "KAI", "minAvailable": 2}}, "all of its 4 workers"),
    ),
    *good(
        "failure-rule-matches",
        _rules(_CODES),
        _rules(
            {"action": "Ignore", "match": {"conditionTypes": ["DisruptionTarget"]}},
            {"action": "RestartJobIgnoreMax", "match": {"messageRegex": "Xid [0-9]+"}},
            {"action": "RestartJob", "match": {"workers": [0], "signals": [9], "reasons": ["OOMKilled"]}},
        ),
    ),
    *bad(
        "failure-rule-matches",
        "spec.runPolicy.rules",
        (_rules(_CODES, {"action": "FailJob", "match": {}}), "holds a rule that matches nothing; write one of exitC"),
    ),
    *good("failure-rule-codes", _rules({"action": "FailJob", "match": {"exitCodes": {"notIn": [1, 2]}}})),
    *bad(
        "failure-rule-codes",
        "spec.runPolicy.rules",
        (_rules({"action": "FailJob", "match": {"exitCodes": {}}}), "holds exitCodes that need either in or notIn"),
        (_rules({"action": "FailJob", "match": {"exitCodes": {"in": [1], "notIn": [2]}}}), "write one of them"),
    ),
    *good("failure-rule-may-exclude", _rules(_CODES | {"action": "ExcludeNodeAndRestart"})),
    *bad(
        "failure-rule-may-exclude",
        "spec.runPolicy.nodeExclusion.enabled",
        (
            {
                "spec.runPolicy": {
                    "rules": [_CODES | {"action": "ExcludeNodeAndRestart"}],
                    "nodeExclusion": {"enabled": False},
                }
            },
            "must be true for a rule with action ExcludeNodeAndRestart",
        ),
    ),
    *good(
        "slow-nodes-may-be-excluded",
        {"spec.analyzer": {"enabled": True, "slowNode": {"action": "Exclude"}}},
        {"spec.runPolicy.nodeExclusion.enabled": False},
    ),
    *bad(
        "slow-nodes-may-be-excluded",
        "spec.runPolicy.nodeExclusion.enabled",
        (
            {
                "spec.analyzer": {"enabled": True, "slowNode": {"action": "Exclude"}},
                "spec.runPolicy.nodeExclusion.enabled": False,
            },
            "must be true for analyzer.slowNode.action Exclude",
        ),
    ),
    *good("swap-needs-a-spare", _SPARE | _SWAP | _SAVES),
    *bad("swap-needs-a-spare", "spec.analyzer.slowNode.action", (_SWAP | _SAVES, "needs runPolicy.spares")),
    *good("swap-needs-checkpoints", _SPARE | _SWAP | _SAVES),
    *bad(
        "swap-needs-checkpoints",
        "spec.analyzer.slowNode.action",
        (_SPARE | _SWAP, "needs checkpoint.save and checkpoint.saveInterval"),
    ),
    *good(
        "slow-nodes-need-the-analyzer",
        {"spec.analyzer": {"enabled": True, "slowNode": {"action": "ExcludeAndRestart", "minSlowdown": 1.5}}},
    ),
    *bad(
        "slow-nodes-need-the-analyzer",
        "spec.analyzer.slowNode.action",
        ({"spec.analyzer": {"slowNode": {"action": "Exclude"}}}, "needs analyzer.enabled: true and trace.enabled"),
        (
            {"spec.analyzer": {"enabled": True, "slowNode": {"action": "Exclude"}}, "spec.trace.enabled": False},
            "needs analyzer.enabled: true and trace.enabled: true, which find slow nodes",
        ),
    ),
]
_CHANGES = [
    *stays(
        "fbd-stays",
        "spec.fbd",
        good=[(_SUSPENDED, {"spec.fbd": _FBD}), ({}, {"spec.fbd": {}})],
        bad=[({}, {"spec.fbd": _FBD}, "may change only while the job is suspended; set suspend: true first")],
    ),
    *stays(
        "gang-stays",
        "spec.scheduling.gang",
        good=[({}, {"spec.scheduling.gang": "None"})],
        bad=[
            ({}, {"spec.scheduling.gang": "Volcano"}, "was None and is now Volcano; it cannot change"),
            ({"spec.scheduling.gang": "KAI"}, {}, "was KAI and is now None; it cannot change"),
            (
                {**_SUSPENDED, "spec.scheduling.gang": "KAI"},
                {"spec.scheduling.gang": "Volcano"},
                "as pods may be in its queue: make a new job",
            ),
        ],
    ),
    *stays(
        "manager-stays",
        "spec.managedBy",
        good=[({"spec.managedBy": "kueue.x-k8s.io/multikueue"}, {"spec.managedBy": "kueue.x-k8s.io/multikueue"})],
        bad=[
            ({}, {"spec.managedBy": "a.io/b"}, "was omitted and is now a.io/b; it cannot change"),
            ({"spec.managedBy": "a.io/b"}, {}, "was a.io/b and is now omitted; it cannot change"),
            ({**_SUSPENDED, "spec.managedBy": "a.io/b"}, {"spec.managedBy": "a.io/c"}, "make a new job"),
        ],
    ),
]
CLUSTER_EXAMPLES = (
    *_RESOURCES,
    *_VOLUMES,
    *_INITIALIZERS,
    *_PODS,
    *_NETWORK,
    *_POLICIES,
    *_CHANGES,
)
