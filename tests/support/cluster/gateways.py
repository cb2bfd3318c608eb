"""Ways to the gateway, as users reach it, and a browser for each: all in the first node's network."""

import contextlib
import os
import pathlib
import subprocess
import sys
from collections.abc import Iterator

import playwright.sync_api as pw
from cluster.chart import HOME
from cluster.jobs import E2eJob
from cluster.layout import ClusterError
from cluster.runtime import Cluster

CHROMIUM = "/usr/bin/chromium"
ARGUMENTS = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"]
CLI = [sys.executable, "-m", "megatronapp_common.cli"]


def cli(cluster: Cluster, *arguments: str) -> list[str]:
    """`megatronapp` with the administrator's kubeconfig."""
    return cluster.layout.first.inside(*CLI, *arguments, "--kubeconfig", cluster.layout.kubeconfig("admin"))


def run_cli(cluster: Cluster, *arguments: str) -> str:
    """Run `megatronapp` to its end, and return what it prints."""
    command = cli(cluster, *arguments)
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=_environment(cluster)).stdout


@contextlib.contextmanager
def forwarded(cluster: Cluster) -> Iterator[str]:
    """`kubectl port-forward svc/megatronapp 8080`; the address that it leads from."""
    forward = cluster.layout.first.inside(*cluster.command(), "-n", HOME, "port-forward", "svc/megatronapp", "8080")
    with _output_lines(cluster, forward) as line:
        yield f"http://{line.partition(' -> ')[0].rpartition(' ')[2]}"


@contextlib.contextmanager
def opened(cluster: Cluster, job: E2eJob) -> Iterator[str]:
    """`megatronapp ui JOB -n NAMESPACE`; the address that it prints."""
    with _output_lines(cluster, cli(cluster, "ui", job.name, "-n", job.namespace, "--print")) as line:
        yield line


@contextlib.contextmanager
def chromium(cluster: Cluster, folder: pathlib.Path) -> Iterator[pw.Browser]:
    """A browser in the first node's network."""
    program = folder / "chromium"
    program.write_text(f'#!/bin/sh\nexec {" ".join(cluster.layout.first.inside(CHROMIUM))} "$@"\n', encoding="utf-8")
    program.chmod(0o755)
    with pw.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=ARGUMENTS)
        yield browser
        browser.close()


def person(cluster: Cluster, namespace: str, role: str, name: str = "ada") -> str:
    """Return a token of a user who has this role in a namespace, and no other rights."""
    cluster.kubectl("create", "serviceaccount", name, "-n", namespace)
    account = f"--serviceaccount={namespace}:{name}"
    cluster.kubectl("create", "rolebinding", name, "-n", namespace, f"--clusterrole={role}", account)
    cluster.wait(lambda: _sees_jobs(cluster, namespace, name), f"the rights of {name}")
    return cluster.kubectl("create", "token", name, "-n", namespace).strip()


def _sees_jobs(cluster: Cluster, namespace: str, name: str) -> bool:
    """Return whether an account may list jobs: the API server acts by a binding a moment after its creation."""
    account = f"system:serviceaccount:{namespace}:{name}"
    try:
        cluster.kubectl("auth", "can-i", "list", "megatronjobs.megatronapp.io", "-n", namespace, "--as", account)
    except ClusterError:
        return False
    return True


def _environment(cluster: Cluster) -> dict[str, str]:
    return os.environ | {"PATH": f"{cluster.programs}:{os.environ.get('PATH', '')}"}


@contextlib.contextmanager
def _output_lines(cluster: Cluster, command: list[str]) -> Iterator[str]:
    """Yield the first line of a program that runs until the block ends."""
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=_environment(cluster)
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline().strip()
        if not line:
            raise ClusterError(f"{' '.join(command)}: {process.communicate()[1]}")
        yield line
    finally:
        process.terminate()
        process.communicate()
