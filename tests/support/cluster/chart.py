"""The chart on the cluster, installed as the README says."""

import subprocess

import kube
from cluster.layout import ROOT
from cluster.runtime import Cluster

HOME = "megatronapp"
"""Namespace of the release, and its name."""
CHART = ROOT / "charts" / "megatronapp"
READY_S = 400


def helm(cluster: Cluster, *arguments: object, seconds: float = READY_S) -> str:
    """Run helm and return its output. Fails with all that is known of the cluster."""
    program = kube.programs("helm") / "helm"
    config = ("--kubeconfig", cluster.layout.kubeconfig("admin"), "--namespace", HOME)
    done: subprocess.CompletedProcess[str] = cluster.inside(program, *arguments, *config, seconds=seconds)
    assert done.returncode == 0, f"{done.stderr}\n{cluster.problems()}"
    return done.stdout


def install(cluster: Cluster, *flags: str) -> None:
    """Install or upgrade the release, and wait until operator and gateway are ready."""
    helm(cluster, "upgrade", "--install", HOME, CHART, "--reset-values", "--wait", *flags)
