"""The operator as a process, with kopf's watches, probes and lease, on a real API server."""

import pathlib
import signal
import subprocess
import sys

import httpx
import kube
import pytest
from operator_process import DEADLINE_S, started
from operator_simulation import manifest
from shared_tls import SHARED_TLS


def pods(plane: kube.ControlPlane, namespace: str) -> list[str]:
    return plane.kubectl("get", "pods", "-n", namespace, "-o", "name").stdout.split()


def apply(plane: kube.ControlPlane, namespace: str, name: str = "job") -> None:
    done = plane.kubectl("create", "-f", "-", stdin=manifest(namespace, name))
    assert done.returncode == 0, done.stderr


@pytest.mark.full("starts a third operator; the handover below has all but the probes, which test_operator_health has")
def test_a_job_that_is_created_while_the_operator_runs_and_before_gets_its_pods(
    plane: kube.ControlPlane, namespace: str, tmp_path: pathlib.Path
) -> None:
    apply(plane, namespace, "early")
    with started(plane, tmp_path, namespace) as operator:
        operator.wait(operator.leads)
        apply(plane, namespace, "late")
        operator.wait(lambda: len(pods(plane, namespace)) == 4)
        assert httpx.get(f"{operator.url}/healthz", trust_env=False, verify=SHARED_TLS, timeout=DEADLINE_S).is_success
        operator.wait(
            lambda: (
                httpx.get(f"{operator.url}/readyz", trust_env=False, verify=SHARED_TLS, timeout=DEADLINE_S).is_success
            )
        )
        assert "megatron_operator_is_leader 1.0" in operator.metrics()
        phase = f'megatron_job_phase{{name="late",namespace="{namespace}",phase="Starting"}}'
        operator.wait(lambda: f"{phase} 1.0" in operator.metrics())
        operator.process.send_signal(signal.SIGTERM)
        assert operator.process.wait(DEADLINE_S) == 0, operator.text()
    assert "Traceback" not in operator.text()


def of_profile(plane: kube.ControlPlane, name: str, image: str) -> None:
    """Apply a profile of the cluster."""
    head = {"apiVersion": "megatronapp.io/v1alpha1", "kind": "ClusterMegatronProfile", "metadata": {"name": name}}
    spec = {"template": {"image": image}}
    done = plane.kubectl("apply", "--server-side", "-f", "-", stdin=head | {"spec": spec})
    assert done.returncode == 0, done.stderr


def reasons(plane: kube.ControlPlane, namespace: str) -> str:
    path = '{.status.conditions[?(@.type=="ProfileApplied")].reason}'
    return plane.kubectl("get", "mgj", "job", "-n", namespace, "-o", f"jsonpath={path}").stdout


def images(plane: kube.ControlPlane, namespace: str) -> set[str]:
    path = "{.items[*].spec.containers[0].image}"
    return set(plane.kubectl("get", "pods", "-n", namespace, "-o", f"jsonpath={path}").stdout.split())


def test_a_job_begins_by_itself_once_its_profile_is_created(
    plane: kube.ControlPlane, namespace: str, tmp_path: pathlib.Path
) -> None:
    """The watches deliver the profile, to an operator that has the rights of the whole cluster or of a namespace."""
    done = plane.kubectl("create", "-f", "-", stdin=manifest(namespace, profile=f"late-{namespace}"))
    assert done.returncode == 0, done.stderr
    with started(plane, tmp_path, namespace) as operator:
        operator.wait(lambda: reasons(plane, namespace) == "ProfileNotFound")
        assert not pods(plane, namespace)
        of_profile(plane, f"late-{namespace}", "admin/trainer:1")
        operator.wait(lambda: len(pods(plane, namespace)) == 2)
        assert images(plane, namespace) == {"admin/trainer:1"}
    assert "Traceback" not in operator.text()


@pytest.mark.full("two processes and a lease that is not released; test_operator_profiles has each cut")
def test_an_operator_that_is_killed_leaves_an_attempt_with_its_profile(
    plane: kube.ControlPlane, namespace: str, tmp_path: pathlib.Path
) -> None:
    name = f"killed-{namespace}"
    of_profile(plane, name, "admin/trainer:1")
    done = plane.kubectl("create", "-f", "-", stdin=manifest(namespace, profile=name))
    assert done.returncode == 0, done.stderr
    with started(plane, tmp_path, namespace) as first:
        first.wait(lambda: len(pods(plane, namespace)) == 2)
        before = sorted(pods(plane, namespace))
        first.process.kill()
        first.process.wait(DEADLINE_S)
        of_profile(plane, name, "admin/trainer:2")
    with started(plane, tmp_path, namespace, "two") as second:
        second.wait(second.leads)
        second.wait(lambda: reasons(plane, namespace) == "ProfileApplied")
        assert (images(plane, namespace), sorted(pods(plane, namespace))) == ({"admin/trainer:1"}, before)
        assert plane.kubectl("delete", "pod", "-n", namespace, "job-worker-0", "--grace-period=0").returncode == 0
        second.wait(lambda: len(pods(plane, namespace)) == 2)
        assert images(plane, namespace) == {"admin/trainer:1"}, "a worker of the same attempt is like the others"


@pytest.mark.full("two processes; test_lease has the handover")
def test_the_second_operator_leads_when_the_first_ends_in_order(
    plane: kube.ControlPlane, namespace: str, tmp_path: pathlib.Path
) -> None:
    with started(plane, tmp_path, namespace) as first:
        first.wait(first.leads)
        with started(plane, tmp_path, namespace, "two") as second:
            second.wait(lambda: "waiting for the lease" in second.text())
            apply(plane, namespace)
            first.wait(lambda: len(pods(plane, namespace)) == 2)
            assert not second.leads()
            assert "megatron_operator_is_leader 1.0" in first.metrics()
            first.process.send_signal(signal.SIGTERM)
            assert first.process.wait(DEADLINE_S) == 0, first.text()
            second.wait(second.leads)
            apply(plane, namespace, "next")
            second.wait(lambda: len(pods(plane, namespace)) == 4)
    assert "Traceback" not in first.text() + second.text()


@pytest.mark.full("cases that differ in the file", but=("key-zz-not 64 hex digits",))
@pytest.mark.parametrize(
    ("flag", "text", "message"), [("key", "zz", "not 64 hex digits"), ("key", None, "No such file")]
)
def test_an_operator_that_cannot_start_reports_the_reason(
    tmp_path: pathlib.Path, flag: str, text: str | None, message: str
) -> None:
    path = tmp_path / flag
    if text is not None:
        path.write_text(text, encoding="ascii")
    arguments = ["--trainer-image", "a", "--analyzer-image", "b", "--key-file", str(path)]
    command = [sys.executable, "-m", "megatronapp_operator.controller", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr
