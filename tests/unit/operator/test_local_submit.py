"""`Client.local().submit` with a command that answers in different ways."""

import logging
import pathlib
import subprocess
import types
from typing import Any

import pytest
from rule_example import BASE

from megatronapp.client import Client, Job, JobConflictError, ManifestError, OperatorError
from megatronapp_operator.backends.process.state import registry

RUNNING = types.SimpleNamespace(name="small", alive=True, ended=False)


@pytest.fixture
def submit(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Submit a job whose command ends with a code and this text, and while these jobs run before and after it."""

    def submitted(code: int, text: str, *, before: tuple[Any, ...] = (), after: tuple[Any, ...] = ()) -> Job:
        states = [before]
        monkeypatch.setattr(registry, "views", lambda: states[-1])

        def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
            states.append(after)
            return subprocess.CompletedProcess(command, code, "", text)

        monkeypatch.setattr(subprocess, "run", run)
        with Client.local() as client:
            return client.submit(BASE)

    return submitted


def test_notes_and_warnings_are_logged(submit: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="megatronapp.client"):
        assert submit(0, "note: spec.network has no effect\nTraceback\nwarning: little memory\n").name == "small"
    assert caplog.messages == ["note: spec.network has no effect", "warning: little memory"]


def test_a_conflict_has_its_documented_type(submit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(JobConflictError, match='"small" is running'):
        submit(0, "", before=(RUNNING,))
    with pytest.raises(JobConflictError, match='"small" is running'):  # it began in the meantime
        submit(1, "error: refused\n", after=(RUNNING,))
    other = types.SimpleNamespace(name="other", alive=True, ended=False)
    monkeypatch.setattr(registry, "_saves", lambda _spec: "/checkpoints")
    monkeypatch.setattr(registry, "_save_folder", lambda _job: pathlib.Path("/checkpoints"))
    with pytest.raises(JobConflictError, match='belongs to the running job "other"'):
        submit(0, "", before=(other,))


@pytest.mark.parametrize(("code", "kind"), [(2, ManifestError), (1, OperatorError)])
def test_another_failure_has_the_errors_of_the_command(submit: Any, code: int, kind: type[Exception]) -> None:
    with pytest.raises(kind, match=r"^first\nsecond$") as caught:
        submit(code, "note: x\nerror: first\nerror: second\n")
    assert not isinstance(caught.value, JobConflictError)
