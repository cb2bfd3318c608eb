"""Effects of the answer of a check before the start."""

import json
import pathlib
import sys
from typing import Any

import pytest

from megatronapp_common.job import MegatronJob, load_job
from megatronapp_operator.backends.process.preflight import preflight
from megatronapp_operator.cli.run import read_job
from megatronapp_operator.errors import ManifestError

EXAMPLE = pathlib.Path(__file__).parents[3] / "examples" / "demo.yaml"


def make_job(**spec: Any) -> MegatronJob:
    job = read_job(str(EXAMPLE), (), name=None).job.to_dict()
    job["spec"] |= spec
    return load_job(job)


def answer(*problems: dict[str, Any]) -> tuple[str, ...]:
    """A check that gives these problems."""
    report = {"problems": [{"code": 65, "flags": [], "value": None, "message": "no"} | problem for problem in problems]}
    return (sys.executable, "-S", "-c", f"import sys; print({json.dumps(report)!r}); sys.exit(65)")


def refusal(job: MegatronJob, *problems: dict[str, Any]) -> str:
    with pytest.raises(ManifestError) as refused:
        preflight(job, answer(*problems))
    return str(refused.value)


def test_problems_are_reported_with_their_fields() -> None:
    job = make_job(args=["--seed", "1", "--fp-16"])
    corpus = job.spec.data.path[0]
    message = refusal(
        job,
        {"flags": ["--fp-16", "--seed"], "message": "unknown flag --fp-16"},
        {"flags": ["--data-path"], "value": corpus, "message": f"{corpus}.bin is bad; or take --split 1"},
        {"flags": ["--vocab-size"], "message": "--vocab-size 5 is below 6; write --vocab-size 6"},
        {"flags": ["--no-such"], "message": "nobody knows"},
    )
    assert message.splitlines() == [
        "spec.args[2]: unknown flag --fp-16",
        f"spec.data.path[0]: {corpus}.bin is bad; or take data.split 1",
        "spec.model.vocabSize: 5 is below 6; write model.vocabSize 6",
        "spec.args: nobody knows",
    ]


def test_a_job_without_problems_or_without_a_check_continues(capsys: pytest.CaptureFixture[str]) -> None:
    preflight(make_job(), answer())
    preflight(make_job(), ())
    assert capsys.readouterr().err == ""


def test_a_missing_trainer_is_left_to_its_launcher(capsys: pytest.CaptureFixture[str]) -> None:
    preflight(make_job(), (sys.executable, "-S", "-m", "no_such_trainer.check"))
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("command", [("-c", "raise SystemExit('broken')"), ("-c", "print('[]')")])
def test_a_check_that_does_not_work_is_warned_of(capsys: pytest.CaptureFixture[str], command: tuple[str, ...]) -> None:
    preflight(make_job(), (sys.executable, "-S", *command))
    assert capsys.readouterr().err.startswith("warning: flags and data could not be checked before the start: ")


def test_a_check_sees_the_environment_of_the_job(capsys: pytest.CaptureFixture[str]) -> None:
    code = "import os; raise SystemExit(os.environ['MINE'])"
    preflight(make_job(env=[{"name": "MINE", "value": "seen"}]), (sys.executable, "-S", "-c", code))
    assert capsys.readouterr().err.rstrip().endswith("seen")
