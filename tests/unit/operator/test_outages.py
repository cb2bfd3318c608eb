"""Waiting for a job, and following its events, while requests to the API server fail."""

import logging
import types
from typing import Any, cast

import pytest

from megatronapp.client.job import Job
from megatronapp_operator.backends.kubernetes.client.errors import ForbiddenError, ThrottledError, UnavailableError
from megatronapp_operator.cli import wait
from megatronapp_operator.cli.cluster import run
from megatronapp_operator.cli.cluster.connection import Cluster, ClusterJob
from megatronapp_operator.cli.wait import WaitCondition, wait_for
from megatronapp_operator.errors import JobNotFoundError, OperatorError

Capture = pytest.CaptureFixture[str]
DOWN, FAULT = UnavailableError("GET job: connection refused"), UnavailableError("GET job: 503", status=503)
BUSY = ThrottledError("GET job: 429", status=429)
COMPLETE = WaitCondition("Complete")


def job(phase: str = "Running", uid: str = "u") -> ClusterJob:
    conditions = [{"type": "Complete", "status": "True"}] if phase == "Succeeded" else []
    metadata = {"name": "gpt", "namespace": "team", "uid": uid}
    return ClusterJob({"metadata": metadata, "status": {"phase": phase, "conditions": conditions}})


class Answers:
    """A place that gives one answer after another, and then the last again."""

    POLL_S = 0.0

    def __init__(self, *answers: ClusterJob | Exception, events: tuple[Exception, ...] = ()) -> None:
        self._answers = list(answers)
        self._events = list(events)

    def view(self, _name: str) -> ClusterJob:
        found = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(found, Exception):
            raise found
        return found

    def views(self) -> list[ClusterJob]:
        return []

    def events(self, _job: ClusterJob) -> list[dict[str, Any]]:
        if self._events:
            raise self._events.pop(0)
        return []


def waited(*answers: ClusterJob | Exception, timeout_s: float = -1) -> list[str]:
    """Wait until the job is complete; return the warnings."""
    warnings: list[str] = []
    wait_for(Answers(*answers), "gpt", COMPLETE, timeout_s=timeout_s, poll_s=0, report=warnings.append)
    return warnings


def test_requests_may_fail_after_the_first_with_a_warning_for_each_outage() -> None:
    warnings = waited(job(), DOWN, FAULT, job(), BUSY, BUSY, job("Succeeded"))
    assert warnings == [f"{DOWN}; trying again", f"{BUSY}; trying again"]


@pytest.mark.parametrize("error", [DOWN, FAULT, BUSY])
def test_the_first_request_must_succeed(error: Exception) -> None:
    with pytest.raises(type(error)):
        waited(error, job("Succeeded"))


def test_a_refusal_is_no_outage() -> None:
    with pytest.raises(ForbiddenError):
        waited(job(), ForbiddenError("no right", status=403), job("Succeeded"))
    with pytest.raises(JobNotFoundError):
        waited(job(), DOWN, JobNotFoundError("gpt"))


def test_an_outage_lasts_until_the_deadline_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(100))
    monkeypatch.setattr(wait, "time", types.SimpleNamespace(monotonic=lambda: next(clock), sleep=lambda _s: None))
    with pytest.raises(OperatorError, match="timed out waiting"):
        waited(job(), DOWN, timeout_s=5)


def test_the_python_client_logs_an_outage(caplog: pytest.LogCaptureFixture) -> None:
    place = Answers(job(), DOWN, job("Succeeded"))
    with caplog.at_level(logging.WARNING, logger="megatronapp.client"):
        assert Job(cast(Any, place), "gpt").wait().phase == "Succeeded"
    assert caplog.messages == [f"{DOWN}; trying again"]


def test_a_job_in_the_foreground_is_followed_over_an_outage(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setattr(run, "POLL_S", 0.0)
    place = Answers(DOWN, job(), BUSY, job(), job("Succeeded"), events=(FAULT,))
    assert run._follow(cast(Cluster, place), job(), verbose=False) == 0
    out, err = capsys.readouterr()
    assert out.splitlines() == ["gpt: Running", "gpt: Succeeded"]
    assert err.splitlines() == [f"warning: {DOWN}; trying again"]


@pytest.mark.parametrize("answer", [JobNotFoundError("gpt"), job(uid="other")])
def test_a_job_that_was_deleted_during_an_outage_is_reported(
    answer: ClusterJob | Exception, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr(run, "POLL_S", 0.0)
    assert run._follow(cast(Cluster, Answers(job(), DOWN, answer)), job(), verbose=False) == 1
    assert capsys.readouterr().out.splitlines() == ["gpt: Running", "gpt was deleted"]
