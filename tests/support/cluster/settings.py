"""Settings of the programs of a node and of the cluster's names."""

import json
from typing import Any

import yaml
from cluster.host import PLUGINS
from cluster.layout import PAUSE_IMAGE, POD_RANGE, ClusterNode, Layout

_RUNTIME = """\
version = 2
root = "{folder}/images"
state = "{folder}/containers"
[grpc]
  address = "{socket}"
[ttrpc]
  address = "{socket}.ttrpc"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{pause}"
  stream_server_address = "127.0.0.1"
  stream_server_port = "0"
  restrict_oom_score_adj = true  # root may lack CAP_SYS_RESOURCE
  netns_mounts_under_state_dir = true  # else a sandbox that failed leaves its network behind
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{plugins}"
    conf_dir = "{folder}/cni"
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "overlayfs"
    default_runtime_name = "runc"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
        SystemdCgroup = false
[plugins."io.containerd.internal.v1.opt"]
  path = "{folder}/opt"
"""
_NAMES = """\
.:53 {{
  bind {address}
  errors
  ready 127.0.0.1:8181
  kubernetes cluster.local in-addr.arpa {{
    kubeconfig {kubeconfig} e2e
    pods insecure
    ttl 2
  }}
}}
"""


def runtime(node: ClusterNode) -> str:
    """Return the settings of containerd."""
    return _RUNTIME.format(folder=node.folder, socket=node.socket, pause=PAUSE_IMAGE, plugins=PLUGINS)


def pod_network(node: ClusterNode) -> str:
    """Return the network of pods: a bridge per node, every address reached unchanged."""
    addresses = {
        "type": "host-local",
        "dataDir": str(node.folder / "addresses"),
        "ranges": [[{"subnet": node.pods}]],
        "routes": [{"dst": "0.0.0.0/0"}],
    }
    bridge = {"type": "bridge", "bridge": "pods", "isGateway": True, "hairpinMode": True, "ipam": addresses}
    ports = {"type": "portmap", "capabilities": {"portMappings": True}}
    return json.dumps({"cniVersion": "0.4.0", "name": "pods", "plugins": [bridge, ports]})


def kubelet(cluster: Layout, node: ClusterNode) -> str:
    """Settings of the kubelet."""
    authority = str(cluster.keys / "ca.crt")
    document: dict[str, Any] = {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "address": "0.0.0.0",
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": authority},
        },
        "authorization": {"mode": "Webhook"},
        "tlsCertFile": str(cluster.keys / f"{node.name}.crt"),
        "tlsPrivateKeyFile": str(cluster.keys / f"{node.name}.key"),
        "containerRuntimeEndpoint": f"unix://{node.socket}",
        "failCgroupV1": False,
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{node.cgroup}",
        "cgroupsPerQOS": True,
        "enforceNodeAllocatable": ["pods"],
        "failSwapOn": False,
        "oomScoreAdj": 0,
        "maxOpenFiles": 20000,
        "clusterDomain": "cluster.local",
        "clusterDNS": [cluster.first.address],
        "resolvConf": str(cluster.folder / "resolv.conf"),
        "podLogsDir": str(node.folder / "logs"),
        "volumePluginDir": str(node.folder / "plugins"),
        "evictionHard": {"memory.available": "200Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
        "imageGCHighThresholdPercent": 100,
        "imageGCLowThresholdPercent": 99,
        "nodeStatusUpdateFrequency": "2s",
        "serializeImagePulls": False,
    }
    return yaml.safe_dump(document)


def proxy(cluster: Layout, node: ClusterNode) -> str:
    """Return the settings of kube-proxy."""
    untouched = {"maxPerCore": 0, "min": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"}
    document: dict[str, Any] = {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "mode": "nftables",
        "clusterCIDR": POD_RANGE,
        "oomScoreAdj": 0,
        "conntrack": untouched,  # those are read-only in a network namespace
        "clientConnection": {"kubeconfig": str(cluster.kubeconfig("proxy"))},
        "hostnameOverride": node.name,
        "healthzBindAddress": "127.0.0.1:10256",
        "metricsBindAddress": "127.0.0.1:10249",
    }
    return yaml.safe_dump(document)


def names(cluster: Layout) -> str:
    """Return the settings of CoreDNS."""
    return _NAMES.format(address=cluster.first.address, kubeconfig=cluster.kubeconfig("dns"))
