"""Each schedule of MegaDPP trains as megatron-core's does, to the last bit, also where inputs are late."""

import contextlib
import dataclasses
import os
import pathlib
import re
import signal
from collections.abc import Callable
from typing import Any

import late_inputs
import pytest
import small_training

from megatronapp_common.names import Env, ExitCode
from megatronapp_trainer.pipeline.planning.report import PlanReport

pytestmark = pytest.mark.torch

RunRanks = Callable[..., list[Any]]
Record = tuple[list[float], list[float]]

MODEL = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 1 "
    "--global-batch-size 8 --train-iters 3 --lr 2e-3 --lr-decay-style cosine --lr-warmup-iters 2 --mock-data "
    "--vocab-size 120 --attention-dropout 0 --hidden-dropout 0 --eval-iters 1 --eval-interval 2"
)
PP2 = "--pipeline-model-parallel-size 2"
VPP2 = f"{PP2} --num-virtual-stages-per-pipeline-rank 2"
SHARDED = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 2000"
LAYOUTS = {
    "PP2": (2, PP2),
    "PP2-tied-clipped-recomputed": (2, f"{PP2} --clip-grad 0.5 --recompute-activations"),
    "VPP2": (2, f"{VPP2} --untie-embeddings-and-output-weights"),
    "VPP3": (2, f"{PP2} --num-layers 6 --num-virtual-stages-per-pipeline-rank 3"),
    "PP4": (4, "--pipeline-model-parallel-size 4 --calculate-per-token-loss"),
    "DP2xVPP2": (4, f"{VPP2} {SHARDED}"),
    "TP2xPP2+SP": (4, f"{PP2} --tensor-model-parallel-size 2 --sequence-parallel"),
    "TP2xVPP2": (4, f"{VPP2} --tensor-model-parallel-size 2"),
    "bf16": (2, f"{VPP2} --bf16"),
    "VPP2-ramp-up-recomputed": (
        2,
        f"{VPP2} --rampup-batch-size 4 4 8 --recompute-granularity full --recompute-method uniform "
        "--recompute-num-layers 1",
    ),
}
SCHEDULES = ("auto", "dfc", "bfc", "static", "zero-bubble")
CASES = [
    (layout, schedule)
    for layout, (_, flags) in LAYOUTS.items()
    for schedule in SCHEDULES
    if schedule != "zero-bubble" or "virtual" not in flags
]
VEES = {layout: LAYOUTS[layout] for layout in ("VPP2", "DP2xVPP2", "TP2xVPP2", "bf16", "VPP2-ramp-up-recomputed")} | {
    "PP4xVPP2": (
        4,
        "--pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2 --num-layers 8 "
        "--global-batch-size 7",
    ),
}
"""Layouts of two chunks; a vee takes any number of microbatches."""
CORNERS = ("auto-DP2xVPP2", "zero-bubble-PP2")


def train(flags: str, seed: int | None = None) -> Record | None:
    """Losses and gradient norms of a run on the reporting rank; with a seed, inputs are late."""
    run = small_training.prepare(f"{MODEL} {flags}")
    if seed is not None:
        late_inputs.install(seed + run.layout.rank)
    recorder = small_training.train(run)
    return None if recorder is None else (recorder.losses, recorder.grad_norms)


def train_counting(flags: str, seed: int | None) -> tuple[Record | None, int]:
    """`train`, and the number of tasks that this rank has run before their turn in the plan."""
    from megatronapp_trainer.pipeline.task_passes import TaskPasses

    early_tasks: list[object] = []
    announce = TaskPasses.announce

    def counting(passes: TaskPasses, task: Any, *, early: bool) -> None:
        if early:
            early_tasks.append(task)
        announce(passes, task, early=early)

    TaskPasses.announce = counting  # type: ignore[assignment, method-assign]
    return train(flags, seed), len(early_tasks)


def record_of(run_ranks: RunRanks, world: int, *arguments: Any) -> Record:
    (record,) = [record for record in run_ranks(world, train, *arguments) if record is not None]
    return tuple(record)


@pytest.fixture(scope="module")
def megatron(run_ranks: RunRanks) -> Callable[[str], Record]:
    """Record of megatron-core's schedule, once for each layout."""
    known: dict[str, Record] = {}

    def record(layout: str) -> Record:
        if layout not in known:
            known[layout] = record_of(run_ranks, *LAYOUTS[layout])
        return known[layout]

    return record


@pytest.mark.full("a sweep of layouts and schedules", but=CORNERS)
@pytest.mark.parametrize(("layout", "schedule"), CASES, ids=[f"{schedule}-{layout}" for layout, schedule in CASES])
def test_schedules_are_bit_equal_to_that_of_megatron_core(
    run_ranks: RunRanks, megatron: Any, layout: str, schedule: str
) -> None:
    world, flags = LAYOUTS[layout]
    seed = None if schedule in {"static", "zero-bubble"} else 7
    results = run_ranks(world, train_counting, f"{flags} --use-dpp --dpp-schedule {schedule}", seed)
    (record,) = [tuple(record) for record, _ in results if record is not None]
    assert len(record[0]) == 3
    assert record == megatron(layout)
    assert (sum(early for _, early in results) > 0) == (schedule == "auto"), "tasks run before their turn in the plan"


def train_on_fused_products(flags: str) -> Record | None:
    """`train` with weight gradients that are added within the matrix product, as on a GPU."""
    from megatronapp_trainer.pipeline import split_backward, task_passes, weight_gradients

    for module in (split_backward, task_passes):
        module.fused_gradients = lambda _context: weight_gradients.sum_rows  # type: ignore[attr-defined]
    task_passes.uses_small_kernels = lambda _config: False  # type: ignore[assignment, attr-defined] # they need a GPU
    split_backward.DirectGradients = refuse_direct_gradients  # type: ignore[assignment, attr-defined]
    return train(flags)


def refuse_direct_gradients(*_arguments: object, **_options: object) -> None:
    raise AssertionError("layers of tasks were replaced by layers that never leave a gradient for later")


def test_split_passes_with_fused_products_follow_megatron_core(run_ranks: RunRanks, megatron: Any) -> None:
    """Evaluations of MegaDPP run megatron-core's schedule, whose layers must not replace those of the tasks."""
    world, flags = LAYOUTS["PP2"]
    results = run_ranks(world, train_on_fused_products, f"{flags} --use-dpp --dpp-schedule zero-bubble")
    (found,) = [record for record in results if record is not None]
    for values, expected in zip(found, megatron("PP2"), strict=True):
        assert values == pytest.approx(expected, rel=1e-5)


@pytest.mark.full("a sweep of layouts", but=("VPP2",))
@pytest.mark.parametrize("layout", VEES)
def test_a_guided_vee_is_bit_equal_to_zero_bubble_v(run_ranks: RunRanks, layout: str) -> None:
    world, flags = VEES[layout]
    results = run_ranks(world, train_counting, f"{flags} --use-dpp --dpp-placement vee", 7)
    (record,) = [tuple(record) for record, _ in results if record is not None]
    assert len(record[0]) == 3
    assert record == record_of(run_ranks, world, f"{flags} --use-dpp --dpp-schedule zero-bubble")
    assert sum(early for _, early in results) > 0, "tasks run before their turn in the plan"


@pytest.mark.full("three runs with dropout")
def test_dropout_does_not_depend_on_what_is_late(run_ranks: RunRanks) -> None:
    flags = f"{VPP2} --use-dpp --hidden-dropout 0.1 --attention-dropout 0.1 --recompute-activations"
    planned = record_of(run_ranks, 2, f"{flags} --dpp-schedule static")
    assert record_of(run_ranks, 2, flags, 3) == planned
    assert planned != record_of(run_ranks, 2, f"{VPP2} --use-dpp --dpp-schedule static")


def reported(flags: str) -> tuple[list[str], list[PlanReport]]:
    """Lines and plans that the schedule of a run reports on this rank."""
    from megatronapp_trainer.training.build import build_iterators, build_schedule
    from megatronapp_trainer.training.loop import Trainer
    from megatronapp_trainer.training.signals import StopRequest

    run = small_training.prepare(f"{MODEL} {flags}")
    lines: list[str] = []
    plans: list[PlanReport] = []
    schedule = build_schedule(run, report=lines.append, publish_plan=plans.append)
    Trainer(run, build_iterators(run.config, run.layout, 0), schedule, stop_request=StopRequest()).train()
    schedule.close()
    return lines, plans


@pytest.mark.full("a second placement of chunks", but=("loop",))
@pytest.mark.parametrize(
    ("placement", "order", "spare"), [("loop", "megatron-core", 3), ("vee", "ZB-V", 4)], ids=["loop", "vee"]
)
def test_auto_chooses_its_plan_by_the_times_of_the_first_steps(
    run_ranks: RunRanks, placement: str, order: str, spare: int
) -> None:
    flags = f"{VPP2} --use-dpp --train-iters 14 --lr-decay-iters 14 --dpp-placement {placement}"
    (first, _), (last, plans) = run_ranks(2, reported, f"{flags} --dpp-memory-cap 4")
    advice = [line for line in last if "by the same times" in line]
    assert advice == [line for line in first if line in advice]
    for line in advice:
        assert re.fullmatch(
            r" dpp: 8 microbatches: by the same times they take [\d.]+ ms with (one chunk on each rank|"
            r"--num-virtual-stages-per-pipeline-rank \d( --dpp-placement vee)?), which the model is built with",
            line,
        )
    first, last = ([line for line in lines if line not in advice] for lines in (first, last))
    assert first == last, "the ranks of a pipeline choose alike"
    assert len(last) == (2 if "never left;" in last[0] else 4)
    assert re.fullmatch(
        rf" dpp: 8 microbatches: order of {order}, weight gradients (fill waits|at planned places), "
        rf"([0-{spare}] chunks of memory to spare|never left); "
        r"the passes of a step take [\d.]+ ms in simulation, \d+% of them waiting, and [\d.]+ ms in the static order",
        first[0],
    )
    for line in last[1:3]:
        assert re.fullmatch(r" dpp: the passes of a step take [\d.]+ ms, [\d.]+ times the simulated time", line)
    before, chosen, measured = plans[:3]
    assert (before.schedule, before.microbatches, before.chunks, before.spare_chunks) == ("auto", 8, 2, spare)
    assert not before.is_chosen
    assert before.simulated_seconds is None
    assert chosen.is_chosen
    assert f"{chosen.microbatches} microbatches: {chosen.plan};" in last[0]
    assert chosen.cap_chunks == before.cap_chunks - before.spare_chunks + chosen.spare_chunks
    assert f"take {1e3 * chosen.simulated_seconds:.1f} ms in simulation, {chosen.simulated_bubble:.0%}" in last[0]
    assert 0 < chosen.static_bubble < 1
    if len(last) == 2:
        assert dataclasses.replace(measured, measured_seconds=None) == chosen
        assert f"take {1e3 * measured.measured_seconds:.1f} ms, " in last[1]
        return
    assert measured.plan.endswith("never left"), "the next trial begins as soon as the first one has ended"
    assert measured.measured_seconds is None
    final = plans[-1]
    assert final.plan == (chosen.plan if last[3].endswith("the first one is kept") else measured.plan)
    assert f"{1e3 * final.measured_seconds:.1f} ms with the " in last[3]


@pytest.mark.full("a second choice of the plan")
def test_each_size_of_a_ramp_up_has_a_plan_of_its_own(run_ranks: RunRanks) -> None:
    ramp = "--rampup-batch-size 4 4 40 --train-iters 16 --lr-decay-iters 16"
    (lines, plans), _ = run_ranks(2, reported, f"{VPP2} --use-dpp {ramp}")
    tried = [plan.microbatches for plan in plans if plan.is_chosen and plan.measured_seconds is None]
    assert tried == sorted(tried), "a trial ends with the steps of its size"
    assert set(tried) == {4, 8}
    chosen = [line.split()[1] for line in lines if "ms in simulation" in line]
    assert chosen == ["4", "8"]
    assert sum("times the simulated time" in line for line in lines) >= 1


def test_a_cap_below_the_static_order_is_refused(run_ranks: RunRanks) -> None:
    with pytest.raises(Exception, match="--dpp-memory-cap 2: a rank keeps the activations of 3 microbatches"):
        run_ranks(2, reported, f"{VPP2} --use-dpp --dpp-memory-cap 2")


@pytest.mark.full("a sweep of layouts", but=("VPP2",))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_megatron_core_over_the_native_transport_is_bit_equal(run_ranks: RunRanks, megatron: Any, layout: str) -> None:
    world, flags = LAYOUTS[layout]
    record = record_of(run_ranks, world, f"{flags} --transport native")
    assert len(record[0]) == 3
    assert record == megatron(layout)


def copy_threads(flags: str) -> int:
    """Threads that copy messages of this rank."""
    from megatronapp_trainer.training.build import build_schedule

    schedule: Any = build_schedule(small_training.prepare(f"{MODEL} {flags}"))
    threads: int = schedule._transport._transport.options.threads
    schedule.close()
    return threads


def test_workload_is_the_number_of_threads_of_the_transport(run_ranks: RunRanks) -> None:
    assert run_ranks(2, copy_threads, f"{PP2} --use-dpp --workload 3") == [3, 3]


def be_killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail() -> None:
    raise ZeroDivisionError


def be_stopped() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


FAILURES = {"killed": be_killed, "failed": fail, "stopped": be_stopped}


def lose_a_rank(failure: str, flags: str, ended: str) -> tuple[int, str]:
    """Return the exit code and the message of a rank whose peer, a child of rank 0, ends or stops in the middle of a
    step. `ended`: named pipe that the rank closes at its end, for the parent of a stopped peer."""
    import io
    import itertools
    import warnings

    from megatronapp_trainer.pipeline.transport.tensor_transport import TensorTransport
    from megatronapp_trainer.pretrain import main

    warnings.simplefilter("ignore")
    send, sends = TensorTransport.send, itertools.count(1)

    def failing(*arguments: Any) -> None:
        if next(sends) == 12:
            FAILURES[failure]()
        send(*arguments)

    if os.environ["RANK"] == "0":
        if peer := os.fork():
            _, status = os.waitpid(peer, os.WUNTRACED)
            if os.WIFSTOPPED(status):
                pathlib.Path(ended).read_bytes()
                os.kill(peer, signal.SIGKILL)
                os.waitpid(peer, 0)
            return status, ""
        TensorTransport.send = failing  # type: ignore[assignment, method-assign]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as errors:
        try:
            code = main(flags.split())
        except ZeroDivisionError:
            os._exit(ExitCode.OWN_FAILURE)
    if failure == "stopped":
        pathlib.Path(ended).write_bytes(b"")
    return code, errors.getvalue()


ENDS = {
    "killed": (os.WTERMSIG, signal.SIGKILL, "^rank 0 died"),
    "failed": (os.WEXITSTATUS, ExitCode.OWN_FAILURE, "^rank 0 closed its transport"),
    "stopped": (os.WSTOPSIG, signal.SIGSTOP, "nothing (arrived for|within) 15 s"),
}
"""Wait status of the rank, and what the other one reports."""


@pytest.mark.full("one failure shows the way; a stop needs a deadline that a busy machine keeps", but=("killed-dpp",))
@pytest.mark.parametrize("transport", ["--use-dpp", "--transport native"], ids=["dpp", "native"])
@pytest.mark.parametrize("failure", ENDS)
def test_a_rank_that_ends_within_a_step_is_reported_and_leaves_no_memory(
    run_ranks: RunRanks, tmp_path: pathlib.Path, failure: str, transport: str
) -> None:
    status_of, expected, text = ENDS[failure]
    flags = f"{MODEL} {VPP2} {transport} --distributed-timeout-minutes {0.25 if failure == 'stopped' else 10}"
    memory, ended = tmp_path / "shm", tmp_path / "ended"
    memory.mkdir()
    os.mkfifo(ended)
    (status, _), (code, errors) = run_ranks(
        2, lose_a_rank, failure, flags, str(ended), environment={Env.SHM_DIR: str(memory)}
    )
    assert status_of(status) == expected
    assert code == ExitCode.PEER_LOST, errors
    assert re.search(text, errors.partition("error (rank 1): ")[2]), errors
    assert not list(memory.iterdir())
