"""The progress document: state, figures and plans, as readers find them in shared memory."""

import dataclasses
import json
import pathlib
import shlex
from typing import Any, cast

import pytest

from megatronapp_analyzer.hub.state.progress import Progress
from megatronapp_common.names import Env
from megatronapp_common.shared_documents import DocumentReader
from megatronapp_operator.plan_io.hub_summary import read_forward_backward, read_plans
from megatronapp_trainer.config import parse
from megatronapp_trainer.hooks.step_observer import StepMetrics
from megatronapp_trainer.models.experts.statistics import ExpertStatistics
from megatronapp_trainer.pipeline.planning.report import PlanReport
from megatronapp_trainer.training.forward_backward_report import ForwardBackwardReport, ModeReport
from megatronapp_trainer.training.progress import Reporter, open_progress

FLAGS = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 2 --train-iters 10 "
    "--lr 1e-3 --mock-data --vocab-size 128"
)
CONFIG = parse(shlex.split(FLAGS))


def metrics_of(iteration: int, loss: float) -> StepMetrics:
    return StepMetrics(
        iteration=iteration,
        loss=loss,
        learning_rate=1e-3,
        grad_norm=None,
        tokens_per_second=1000.0,
        tflops_per_gpu=0.5,
        mfu=None,
        consumed_samples=16 * iteration,
        skipped=False,
    )


def test_the_progress_document_has_state_and_figures(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(Env.SHM_DIR, str(tmp_path))
    monkeypatch.setenv(Env.SHM_PREFIX, "job.0")
    monkeypatch.setenv(Env.ATTEMPT, "3")
    reporter = Reporter(CONFIG, progress=open_progress(10), events=None, print_line=lambda _: None)
    reader = DocumentReader(tmp_path / "job.0.progress")
    reporter.state("starting")
    document = reader.read()
    assert document is not None
    assert document["loss"] is None
    assert (document["attempt"], document["totalIterations"], document["state"]) == (3, 10, "starting")
    reporter.step(metrics_of(4, 2.5), elapsed_s=0.5, batch_size=16, skipped_steps=0)
    document = reader.read()
    assert document is not None
    assert (document["iteration"], document["loss"], document["state"]) == (4, 2.5, "training")
    assert document["gradNorm"] is None
    assert document["secondsLeft"] == 3.0
    json.dumps(document)


def test_the_progress_document_has_the_load_of_experts_and_stays_small(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check 60 layers of 128 experts, of which only those with the largest load fit."""
    monkeypatch.setenv(Env.SHM_DIR, str(tmp_path))
    monkeypatch.setenv(Env.SHM_PREFIX, "job.0")
    reporter = Reporter(CONFIG, progress=open_progress(10), events=None, print_line=lambda _: None)
    load = tuple((1000 + layer, *(1000 for _ in range(127))) for layer in range(60))
    experts = ExpertStatistics(losses={"z_loss": 1.0}, layers=tuple(range(60)), load=load, dropped=0.0)
    reporter.step(metrics_of(4, 2.5), elapsed_s=0.5, batch_size=16, skipped_steps=0, experts=experts)
    document = DocumentReader(tmp_path / "job.0.progress").read()
    assert document is not None
    shown = Progress.model_validate(document).experts
    assert shown is not None
    assert [entry.layer for entry in shown.layers] == list(range(52, 60))
    assert shown.layers[-1].load[:2] == [1059, 1000]
    assert shown.losses == {"z_loss": 1.0}


def test_the_progress_document_has_the_newest_plans(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(Env.SHM_DIR, str(tmp_path))
    monkeypatch.setenv(Env.SHM_PREFIX, "job.0")
    reporter = Reporter(CONFIG, progress=open_progress(100), events=None, print_line=lambda _: None)
    reader = DocumentReader(tmp_path / "job.0.progress")

    def plans() -> list[dict[str, Any]]:
        document = reader.read()
        assert document is not None
        return cast(list[dict[str, Any]], document["plans"])

    plan = PlanReport(
        schedule="auto", plan="order of megatron-core", microbatches=8, chunks=2, cap_chunks=9, spare_chunks=2
    )
    reporter.plan(plan)
    assert [entry["fromStep"] for entry in plans()] == [0]
    reporter.step(metrics_of(5, 2.5), elapsed_s=0.5, batch_size=16, skipped_steps=0)
    chosen = dataclasses.replace(plan, is_chosen=True, simulated_seconds=0.25)
    reporter.plan(chosen)
    reporter.step(metrics_of(9, 2.5), elapsed_s=0.5, batch_size=16, skipped_steps=0)
    reporter.plan(dataclasses.replace(chosen, measured_seconds=0.3))
    assert [(entry["fromStep"], entry["simulatedSeconds"], entry["measuredSeconds"]) for entry in plans()] == [
        (0, None, None),
        (5, 0.25, 0.3),
    ]
    for size in range(9, 30):
        reporter.plan(dataclasses.replace(plan, microbatches=size))
    assert [entry["microbatches"] for entry in plans()] == list(range(22, 30)), "the document is small"


@pytest.mark.parametrize(
    ("iteration", "printed"), [(7, "resumes after step 7 of 10"), (10, "nothing is left to train")]
)
def test_a_resume_is_printed_at_once(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, iteration: int, printed: str
) -> None:
    monkeypatch.setenv(Env.SHM_DIR, str(tmp_path))
    monkeypatch.setenv(Env.SHM_PREFIX, "job.0")
    lines: list[str] = []
    reporter = Reporter(CONFIG, progress=open_progress(10), events=None, print_line=lines.append)
    reporter.resumed(iteration, 16 * iteration, total_iterations=10)
    document = DocumentReader(tmp_path / "job.0.progress").read()
    assert document is not None
    assert (document["iteration"], document["state"]) == (iteration, "starting")
    assert [line.startswith(printed) for line in lines] == [True]


def test_operator_and_hub_read_the_plans_of_a_document() -> None:
    plan = PlanReport(
        schedule="auto",
        plan="order of megatron-core",
        microbatches=8,
        chunks=2,
        cap_chunks=9,
        spare_chunks=2,
        is_chosen=True,
        simulated_seconds=0.25,
        simulated_bubble=0.125,
        static_seconds=0.5,
        static_bubble=0.25,
    )
    entry = plan.to_json(5)
    (read,) = read_plans([entry])
    expected = dataclasses.asdict(plan) | {"from_step": 5, "chosen": True}
    del expected["is_chosen"]
    assert dataclasses.asdict(read) == expected
    (shown,) = Progress.model_validate({"iteration": 6, "plans": [entry]}).plans
    assert shown.model_dump() == entry
    assert read_plans([entry, {**entry, "chunks": "many"}]) == ()


FORWARD_BACKWARD = {
    "fromStep": 5,
    "ship": "selective",
    "chosen": True,
    "merged": False,
    "backwardPerForward": 2,
    "shipBytes": 4096,
    "forwardSeconds": 0.25,
    "backwardSeconds": 0.5,
    "shipSeconds": None,
    "modes": [{"ship": "saved", "shipBytes": 8192, "stepSeconds": 1.5}],
    "advisedBackwardPerForward": 3,
    "advice": "write fbd.backwardPerForward: 3",
}


def test_operator_and_hub_read_the_state_of_megafbd() -> None:
    read = read_forward_backward(FORWARD_BACKWARD)
    assert read is not None
    assert (read.ship, read.modes[0].ship_bytes, read.advised_backward_per_forward) == ("selective", 8192, 3)
    shown = Progress.model_validate({"iteration": 6, "forwardBackward": FORWARD_BACKWARD}).forward_backward
    assert shown is not None
    assert shown.model_dump() == FORWARD_BACKWARD
    assert {**dataclasses.asdict(read), "modes": list(dataclasses.asdict(read)["modes"])} == shown.model_dump(
        by_alias=False
    )
    assert read_forward_backward(None) is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"ship": "all"},
        {"ship": []},
        {"shipBytes": -1},
        {"shipBytes": 1 << 60},
        {"backwardPerForward": "many"},
        {"modes": [{"ship": "saved", "shipBytes": None}]},
        {"modes": 3},
        {"forwardSeconds": "soon"},
    ],
)
def test_a_malformed_state_of_megafbd_is_dropped(wrong: dict[str, Any]) -> None:
    entry = FORWARD_BACKWARD | wrong
    assert read_forward_backward(entry) is None
    shown = Progress.model_validate({"iteration": 6, "forwardBackward": entry})
    assert (shown.iteration, shown.forward_backward) == (6, None)


def test_the_progress_document_has_the_report_of_both_roles(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(Env.SHM_DIR, str(tmp_path))
    monkeypatch.setenv(Env.SHM_PREFIX, "job.0")
    reporter = Reporter(CONFIG, progress=open_progress(100), events=None, print_line=lambda _: None)
    reader = DocumentReader(tmp_path / "job.0.progress")

    def published() -> dict[str, Any]:
        document = reader.read()
        assert document is not None
        entry: dict[str, Any] = document["forwardBackward"]
        shown = Progress.model_validate(document).forward_backward
        assert shown is not None
        assert shown.model_dump() == entry
        assert read_forward_backward(entry) is not None
        return entry

    modes = (ModeReport(ship="saved", ship_bytes=400), ModeReport(ship="full", ship_bytes=100))
    report = ForwardBackwardReport(ship="saved", is_chosen=False, merged=False, backward_per_forward=2, modes=modes)
    reporter.forward_backward(report)
    entry = published()
    assert (entry["fromStep"], entry["ship"], entry["shipBytes"], entry["chosen"]) == (0, "saved", 400, False)
    assert entry["forwardSeconds"] is entry["advice"] is None
    reporter.step(metrics_of(3, 2.5), elapsed_s=0.5, batch_size=16, skipped_steps=0)
    reporter.forward_backward(dataclasses.replace(report, advice="fits"))
    assert published()["fromStep"] == 0, "the same mode, measured"
    chosen = dataclasses.replace(
        report, ship="full", is_chosen=True, forward_seconds=0.1, backward_seconds=0.2, ship_seconds=0.05
    )
    reporter.forward_backward(chosen)
    assert published() == {
        "fromStep": 3,
        "ship": "full",
        "chosen": True,
        "merged": False,
        "backwardPerForward": 2,
        "shipBytes": 100,
        "forwardSeconds": 0.1,
        "backwardSeconds": 0.2,
        "shipSeconds": 0.05,
        "modes": [
            {"ship": "saved", "shipBytes": 400, "stepSeconds": None},
            {"ship": "full", "shipBytes": 100, "stepSeconds": None},
        ],
        "advisedBackwardPerForward": None,
        "advice": None,
    }
