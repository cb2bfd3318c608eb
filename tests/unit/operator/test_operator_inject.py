"""Refusals of `megatronapp inject` itself."""

import argparse
import pathlib

import httpx
import pytest

from megatronapp_operator.cli import commands
from megatronapp_operator.cli.inject import check, problem_of
from megatronapp_operator.cli.run import read_job
from megatronapp_operator.errors import OperatorError

JOB = read_job(str(pathlib.Path(__file__).parents[3] / "examples" / "demo.yaml"), (), name=None).job
assert JOB.spec.training is not None
SIZE, TOTAL = JOB.world.world_size, JOB.spec.training.train_iters
GOOD = {"--rank": "0", "--kind": "link", "--factor": "2", "--from-step": "1", "--steps": "5", "--peer": "1"}


def parse(changes: dict[str, str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="megatronapp")
    commands.register(parser.add_subparsers())
    flags = [argument for pair in (GOOD | changes).items() for argument in pair]
    return parser.parse_args(["inject", "demo", *flags])


def test_a_fault_that_can_act_is_let_through() -> None:
    check(JOB, parse({"--from-step": str(TOTAL - 1)}))


@pytest.mark.parametrize("args", [("--train-iters", "9999"), ("--train-samples=99999",)])
def test_a_length_in_the_arguments_of_the_job_decides(args: tuple[str, ...]) -> None:
    job = JOB.model_copy(update={"spec": JOB.spec.model_copy(update={"args": args})})
    check(job, parse({"--from-step": str(TOTAL)}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"--rank": str(SIZE)}, f"rank {SIZE} is outside of this world of {SIZE}; take 0 to {SIZE - 1}"),
        ({"--peer": "99"}, f"rank 99 is outside of this world of {SIZE}"),
        ({"--kind": "host"}, "--peer works only with --kind link"),
        ({"--peer": "0"}, "is the slow rank itself"),
        ({"--from-step": str(TOTAL)}, f"it trains {TOTAL} iterations, steps 0 to {TOTAL - 1}"),
    ],
)
def test_a_fault_that_can_never_act_is_refused(changes: dict[str, str], message: str) -> None:
    with pytest.raises(OperatorError, match=message):
        check(JOB, parse(changes))


@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [
        ("--factor", "1", "argument --factor: write a number above 1"),
        ("--factor", "nan", "argument --factor: write a number above 1"),
        ("--factor", "101", "argument --factor: write at most 100"),
        ("--steps", "0", "argument --steps: write a whole number, 1 or more"),
        ("--rank", "-1", "argument --rank: write a whole number, 0 or more"),
    ],
)
def test_bad_numbers_are_a_wrong_command_line(
    flag: str, value: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ending:
        parse({flag: value})
    assert ending.value.code == 2
    assert message in capsys.readouterr().err


def test_hints_of_the_hub_are_appended_in_lower_case() -> None:
    answer = {"code": "c", "message": "rank 1 is not running", "hint": "Running now: 0."}
    assert problem_of(httpx.Response(409, json=answer)) == "rank 1 is not running; running now: 0."
    answer["hint"] = "See /api/v1/openapi.json for the fields."
    assert problem_of(httpx.Response(422, json=answer)) == "rank 1 is not running"
