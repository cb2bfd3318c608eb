"""Commands other than `run`, against a backend that runs."""

import json
import pathlib
import re
import signal
import socket
import subprocess
from typing import Any

import pytest
import yaml

pytestmark = pytest.mark.process


@pytest.fixture
def shown(process_backend: Any) -> Any:
    """Start a detached job with its agents and its hub, which stays after the end."""
    started = process_backend.cli("run", process_backend.manifest(analyzer=True, grace_s=5, retain_s=3600), "--detach")
    assert started.returncode == 0, started.stderr
    process_backend.until_phase("Running")
    return process_backend


def output_of(process_backend: Any, *arguments: str) -> str:
    """Output of a command that must succeed."""
    done = process_backend.cli(*arguments)
    assert done.returncode == 0, done.stderr
    return str(done.stdout)


def test_get_and_describe_show_the_running_job(shown: Any) -> None:
    heading, row = output_of(shown, "get").splitlines()
    assert heading.split() == ["NAME", "PHASE", "WORKERS", "RESTARTS", "ITERATION", "SLOW", "AGE"]
    assert row.split()[:5] == ["job", "Running", "2/2", "0", "3/5"]
    assert output_of(shown, "get", "job", "-o", "name") == "megatronjob.megatronapp.io/job\n"
    job = json.loads(output_of(shown, "get", "job", "-o", "json"))
    assert (job["kind"], job["status"]["worldSize"], job["metadata"]["name"]) == ("MegatronJob", 2, "job")
    many = yaml.safe_load(output_of(shown, "get", "-o", "yaml"))
    assert [item["metadata"]["uid"] for item in many["items"]] == [job["metadata"]["uid"]]
    assert job["status"]["hubUrl"] in output_of(shown, "get", "--no-headers", "-o", "wide")
    text = output_of(shown, "describe", "job")
    assert re.search(r"^Backend: +running$", text, re.MULTILINE)
    assert "GangCreated" in text
    shown.until(lambda: "jane cancelled run ab" in output_of(shown, "describe", "job"), "a control action is told")
    (line,) = (line for line in output_of(shown, "describe", "job").splitlines() if "jane" in line)
    assert "ScopeControl" in line


def test_logs_are_of_the_reporting_rank_unless_another_is_named(shown: Any) -> None:
    assert output_of(shown, "logs", "job") == "line of rank 1, attempt 0\n"
    assert output_of(shown, "logs", "job", "--rank", "0") == "line of rank 0, attempt 0\n"
    assert output_of(shown, "logs", "job", "--worker", "1", "--tail", "1") == "launcher says hello\n"
    for arguments, message in (
        (("--rank", "2"), "rank 2 is outside"),
        (("--worker", "2"), "has no worker 2; take 0 to 1"),
        (("--attempt", "4"), "attempt 4 does not exist; known attempts: 0"),
    ):
        refused = shown.cli("logs", "job", *arguments)
        assert (refused.returncode, message in refused.stderr) == (1, True), refused.stderr


def test_an_empty_log_names_a_log_that_has_content(shown: Any) -> None:
    (shown.job() / "attempt-0" / "worker-0" / "rank-0.log").write_text("")
    done = shown.cli("logs", "job", "--rank", "0")
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr.startswith("note: the log of rank 0 is empty; rank 1 reports the loss, and the launchers")


def test_followed_logs_go_over_to_the_next_attempt_and_end_with_the_job(shown: Any) -> None:
    command = shown.command("logs", "job", "-f")
    with subprocess.Popen(command, env=shown.environment, stdout=subprocess.PIPE, text=True) as following:
        assert following.stdout is not None
        assert following.stdout.readline() == "line of rank 1, attempt 0\n"
        shown.end(1, "-0-0")
        assert following.stdout.readline() == "line of rank 1, attempt 1\n"
        shown.end(0)
        assert following.wait(180) == 0


def test_the_pages_have_an_address_with_a_code_and_the_hub_takes_the_commands_token(shown: Any) -> None:
    address = output_of(shown, "ui", "job", "--print").strip()
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/#code=[\w-]{32}", address)
    fault = ("--kind", "compute", "--factor", "3", "--from-step", "2", "--steps", "3")
    assert output_of(shown, "inject", "job", "--rank", "1", *fault) == "fault f1: rank 1, compute x 3, steps 2 to 4\n"
    refused = shown.cli("inject", "job", "--rank", "7", *fault)
    assert (refused.returncode, refused.stderr) == (
        1,
        "error: rank 7 is outside of this world of 2; take 0 to 1\n",
    )


def test_wait_ends_when_the_condition_is_met_and_when_it_cannot_be(shown: Any) -> None:
    assert "condition met" in output_of(shown, "wait", "job", "--for=condition=Running", "--timeout=200s")
    late = shown.cli("wait", "job", "--for=condition=Complete", "--timeout=0s")
    assert (late.returncode, "timed out waiting" in late.stderr) == (1, True)
    shown.end(64)
    hopeless = shown.cli("wait", "job", "--for=condition=Complete", "--timeout=200s")
    assert hopeless.returncode == 1
    assert "has ended as Failed" in hopeless.stderr


def test_a_finished_job_with_open_pages_is_replaced_by_a_new_job(shown: Any) -> None:
    first = shown.uid()
    shown.end(0)
    shown.until_phase("Succeeded")
    assert "#code=" in output_of(shown, "ui", "job", "--print")
    (shown.control / "end").unlink()
    assert shown.cli("run", shown.manifest(), "--detach").returncode == 0
    shown.until_nothing_of(first)
    shown.until_phase("Running")
    assert shown.uid() != first
    output_of(shown, "delete", "job")
    assert "deleted" in output_of(shown, "wait", "job", "--for=delete")


def test_the_pages_of_a_job_that_has_ended_are_opened_until_ctrl_c(process_backend: Any) -> None:
    backend = process_backend.run(process_backend.manifest(analyzer=True))
    process_backend.until_phase("Running")
    process_backend.end(0)
    assert backend.wait(180) == 0
    command = process_backend.command("ui", "job", "--print")
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=process_backend.environment, text=True, stdout=pipe, stderr=pipe) as showing:
        assert showing.stdout is not None and showing.stderr is not None
        address = showing.stdout.readline().strip()
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/#code=x{32}", address)
        assert showing.stderr.readline() == "job has ended as Succeeded; Ctrl-C closes its pages\n"
        showing.send_signal(signal.SIGINT)
        assert showing.wait(180) == 0
    port = int(address.partition("/#")[0].rpartition(":")[2])
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0, "its hub has ended with it"


def test_a_job_without_stored_pages_reports_it(process_backend: Any) -> None:
    backend = process_backend.run(process_backend.manifest())
    process_backend.until_phase("Running")
    process_backend.end(0)
    assert backend.wait(180) == 0
    refused = process_backend.cli("ui", "job")
    assert (refused.returncode, "no pages are stored" in refused.stderr) == (1, True)


def test_a_missing_job_is_reported(process_backend: Any) -> None:
    for arguments in (("get", "no"), ("describe", "no"), ("logs", "no"), ("delete", "no"), ("ui", "no")):
        refused = process_backend.cli(*arguments)
        assert (refused.returncode, '"no" not found' in refused.stderr) == (1, True), arguments
    assert process_backend.cli("delete", "no", "--ignore-not-found").returncode == 0
    empty = process_backend.cli("get")
    assert (empty.returncode, empty.stdout, empty.stderr) == (0, "", "No jobs found.\n")


def test_a_port_in_use_is_a_single_clear_error_and_a_failed_job(process_backend: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        refused = process_backend.cli("run", process_backend.manifest(analyzer=True, port=port))
        assert refused.returncode == 1
        assert f"error: job: the backend had to give up: 127.0.0.1:{port}: cannot listen there" in refused.stderr
        assert "have no effect" not in refused.stderr
        with_image = pathlib.Path(process_backend.manifest(analyzer=True, port=port))
        with_image.write_text(with_image.read_text().rstrip() + "\n  image: trainer:1\n")
        detached = process_backend.cli("run", str(with_image), "--detach")
        assert "note: without a cluster these have no effect: spec.image\n" in detached.stderr
        assert (detached.returncode, f"127.0.0.1:{port}: cannot listen" in detached.stderr) == (1, True)
    status = process_backend.status()
    assert status["phase"] == "Failed"
    assert (
        next(condition for condition in status["conditions"] if condition["type"] == "Failed")["reason"]
        == "BackendFailed"
    )
    assert process_backend.shared_memory() == []


def test_a_job_runs_over_a_profile_and_its_fields_have_origins(process_backend: Any) -> None:
    profile = process_backend.folder / "profile.yaml"
    template = {"nodes": 1, "env": [{"name": "TEAM", "value": "a"}], "training": {"logInterval": 7}}
    document = {
        "apiVersion": "megatronapp.io/v1alpha1",
        "kind": "ClusterMegatronProfile",
        "metadata": {"name": "laptop"},
        "spec": {"template": template, "locked": ["training.logInterval"]},
    }
    profile.write_text(yaml.safe_dump(document))
    started = process_backend.cli("run", process_backend.manifest(), "--detach", "--profile", str(profile))
    assert started.returncode == 0, started.stderr
    process_backend.until_phase("Running")
    job = json.loads(output_of(process_backend, "get", "job", "-o", "json"))
    assert (job["spec"]["nodes"], job["spec"]["training"]["logInterval"]) == (2, 7)
    assert {variable["name"] for variable in job["spec"]["env"]} == {"TEAM", "CONTROL"}
    text = output_of(process_backend, "describe", "job", "--fields")
    lines = [line.split() for line in text.splitlines() if line.startswith("  ")]
    rows = {line[0]: line[1:] for line in lines}
    assert rows["ClusterMegatronProfile/laptop"] == ["-", "2", "training.logInterval"]
    assert rows["nodes"] == ["2", "job"]
    assert rows["env[TEAM].value"] == ["a", "ClusterMegatronProfile/laptop"]
    assert rows["training.logInterval"] == ["7", "ClusterMegatronProfile/laptop"]
    assert rows["imagePullPolicy"] == ["IfNotPresent", "default"]
    process_backend.end(0)
    process_backend.until_phase("Succeeded")
