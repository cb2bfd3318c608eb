"""Removal of a cluster that breaks: without a trace, as of one that works."""

import signal

import pytest
from cluster import daemons
from cluster.layout import PAUSE_IMAGE, ClusterError, default_folder
from cluster.runtime import Cluster, remains, running


@pytest.mark.timeout(600)
def test_nothing_is_left_after_a_failure(cluster: Cluster) -> None:
    folder = default_folder().with_name("megatronapp-e2e-broken")
    with pytest.raises(ClusterError, match="on purpose"), running(folder, nodes=1, images=()) as broken:
        container = {"name": "main", "image": PAUSE_IMAGE}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "left"}, "spec": {"containers": [container]}}
        broken.namespace("default", "privileged")
        broken.apply(pod)
        broken.wait(lambda: broken.get("pod", "left")["status"]["phase"] == "Running", "a pod")
        node = broken.layout.first
        daemons.send(node.folder, "kubelet", signal.SIGSTOP)
        daemons.send(node.folder, "containerd", signal.SIGKILL)
        daemons.send(broken.layout.folder, "apiserver", signal.SIGKILL)
        kinds = {each.partition(" ")[0] for each in remains(folder)}
        assert kinds == {"network", "control", "mount", "program", "folder"}
        raise ClusterError("broken on purpose")
    assert remains(folder) == []
