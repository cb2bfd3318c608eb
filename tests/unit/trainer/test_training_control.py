"""Pause, resume, step and stop: all ranks obey at the same step, and the numbers are those of an undisturbed run."""

import os
import pathlib
import random
import signal
import unittest.mock
from collections.abc import Callable
from typing import Any

import pytest
from evaluated_training import MODEL, EvaluationRecorder

from megatronapp_common.control.orders import PAUSED, RUNNING, ControlState, Order, OrderKind, TrainingState
from megatronapp_common.errors import OrderError
from megatronapp_common.names import ExitCode

RunRanks = Callable[..., list[Any]]
Script = list[tuple[int, dict[str, Any]]]
"""Orders, each with the steps that are done when rank 0 first finds it in its control document."""

STEPS = 8
CONTROL = f"--train-iters {STEPS} --eval-interval 3 --training-control"
DPP = "--use-dpp --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"
FBD = "--forward-backward-disaggregating"
LAYOUTS = {
    "DP2": (2, ""),
    "TP2xPP2": (4, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"),
    "dynamic": (2, DPP),
    "pair": (2, FBD),
    "PP2-with-roles": (4, f"{FBD} --pipeline-model-parallel-size 2 --fbd-ship full"),
}


class ScriptedDocument:
    """Control document that shows each order from its step on, in place of the agent that writes it."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self.steps_done = 0

    def read_new(self) -> dict[str, Any] | None:
        orders = [order for step, order in self._script if step <= self.steps_done]
        return {"version": 1, "faults": [], "training": {"attempt": 0, "orders": orders, "renewals": 0}}


def train(flags: str, script: Script, signal_after: int | None = None) -> dict[str, Any]:
    """Train on this rank under scripted orders, as `pretrain` does it; what it has seen.

    `signal_after`: number of exchanges of a pause after which the last rank gets a SIGTERM.
    """
    import itertools
    import time
    import types
    import warnings

    warnings.simplefilter("ignore")
    from megatronapp_trainer import pretrain
    from megatronapp_trainer.config import parse
    from megatronapp_trainer.training import progress
    from megatronapp_trainer.training.control import setup, training_control
    from megatronapp_trainer.training.control.group import ControlGroup
    from megatronapp_trainer.training.control.order_reader import OrderReader

    training_control.PAUSE_ROUND_S = 0.01
    reads = itertools.count()
    training_control.time = types.SimpleNamespace(  # type: ignore[assignment, attr-defined]
        time=time.time,
        sleep=time.sleep,
        monotonic=lambda: time.monotonic() + 0.001 * next(reads),  # lengths are rounded to it: none becomes 0
    )
    page, recorder, control = ScriptedDocument(script), EvaluationRecorder(), training_control.TrainingControl
    reports: list[dict[str, Any]] = []
    recorder.control = lambda report: reports.append(report.to_json())  # type: ignore[attr-defined]
    setup._open_reader = lambda: OrderReader(page, attempt=0)
    progress.make_reporter = lambda _config, layout: recorder if layout.is_reporter else None  # type: ignore[assignment, return-value]
    boundaries: list[tuple[int, str]] = []
    obeyed: dict[int, tuple[int, bool]] = {}
    at_boundary, exchange, exchanges = control.at_boundary, ControlGroup.exchange, 0

    def observed(self: Any, iteration: int) -> Any:
        page.steps_done = iteration
        decision = at_boundary(self, iteration)
        boundaries.append((iteration, decision.name))
        obeyed.update({order.number: (order.step, order.refusal is None) for order in self.obeyed})
        return decision

    def interrupted(self: Any, *arguments: Any, **options: Any) -> Any:
        nonlocal exchanges
        exchanges += 1
        if exchanges == signal_after and os.environ["RANK"] == str(int(os.environ["WORLD_SIZE"]) - 1):
            os.kill(os.getpid(), signal.SIGTERM)
        return exchange(self, *arguments, **options)

    control.at_boundary, ControlGroup.exchange = observed, interrupted  # type: ignore[method-assign]
    code = pretrain.pretrain(parse(f"{MODEL} {flags}".split()))
    return {
        "code": code,
        "boundaries": boundaries,
        "obeyed": obeyed,
        "losses": recorder.losses,
        "norms": recorder.grad_norms,
        "evaluations": recorder.evaluations,
        "reports": reports,
    }


def undisturbed(flags: str) -> dict[str, Any]:
    """Losses of a run without control, which imports no module of it."""
    import sys
    import warnings

    warnings.simplefilter("ignore")
    from megatronapp_trainer import pretrain
    from megatronapp_trainer.config import parse
    from megatronapp_trainer.training import progress

    recorder = EvaluationRecorder()
    progress.make_reporter = lambda _config, layout: recorder if layout.is_reporter else None  # type: ignore[assignment, return-value]
    code = pretrain.pretrain(parse(f"{MODEL} {flags}".split()))
    assert not any(name.startswith("megatronapp_trainer.training.control") for name in sys.modules)
    values = {"losses": recorder.losses, "norms": recorder.grad_norms, "evaluations": recorder.evaluations}
    return {"code": code, **values}


def numbered(*orders: tuple[Any, ...]) -> Script:
    """Script of orders, each with step, kind and for `step` its steps."""
    return [
        (at, {"number": number, "kind": kind} | ({"steps": steps[0]} if steps else {}))
        for number, (at, kind, *steps) in enumerate(orders, 1)
    ]


def ranks_of(run_ranks: RunRanks, world: int, *arguments: Any) -> list[dict[str, Any]]:
    environment = {"MEGATRONAPP_JOB_UID": f"control-{os.getpid()}-{world}"}
    return run_ranks(world, train, *arguments, environment=environment)


def reported(ranks: list[dict[str, Any]], name: str) -> Any:
    """Values of the reporting rank."""
    (found,) = [rank[name] for rank in ranks if rank["losses"]]
    return found


@pytest.mark.torch
@pytest.mark.full("a sweep of layouts", but=("dynamic", "pair"))
@pytest.mark.parametrize(("world", "flags"), LAYOUTS.values(), ids=list(LAYOUTS))
def test_all_ranks_obey_at_the_same_step(run_ranks: RunRanks, world: int, flags: str) -> None:
    script = numbered((1, "pause"), (2, "step", 2), (4, "resume"), (5, "resume"), (6, "pause"), (7, "resume"))
    ranks = ranks_of(run_ranks, world, f"{CONTROL} {flags}", script)
    assert [rank["code"] for rank in ranks] == [ExitCode.OK] * world
    assert all(rank["boundaries"] == [(step, "CONTINUE") for step in range(STEPS)] for rank in ranks)
    expected = {1: (2, True), 2: (2, True), 3: (4, True), 4: (6, False), 5: (7, True), 6: (7, True)}
    assert [rank["obeyed"] for rank in ranks] == [expected] * world
    states = [(report["state"], report["stepsLeft"]) for report in reported(ranks, "reports")]
    changes = [state for index, state in enumerate(states) if not index or state != states[index - 1]]
    assert changes == [
        ("running", 0), ("paused", 0), ("stepping", 2), ("stepping", 1), ("paused", 0), ("running", 0), ("paused", 0),
        ("running", 0),
    ]  # fmt: skip
    for report in reported(ranks, "reports"):
        assert (report["state"] == "paused") == (report["pausedSince"] is not None), report
    lengths = [report["pausedSeconds"] for report in reported(ranks, "reports") if report["state"] != "paused"]
    assert lengths == sorted(lengths) and lengths[0] == 0 < lengths[1], "a pause has its length once it has ended"
    environment = {"MEGATRONAPP_JOB_UID": f"plain-{os.getpid()}-{world}"}
    plain = run_ranks(world, undisturbed, f"--train-iters {STEPS} --eval-interval 3 {flags}", environment=environment)
    for name in ("losses", "norms", "evaluations"):
        assert reported(ranks, name) == reported(plain, name)


@pytest.mark.torch
@pytest.mark.full("random orders", but=("seed-0",))
@pytest.mark.parametrize("seed", range(6), ids=[f"seed-{seed}" for seed in range(6)])
def test_any_orders_at_any_steps_keep_the_ranks_together(run_ranks: RunRanks, seed: int) -> None:
    draw = random.Random(seed)
    kinds = [draw.choice([("pause",), ("resume",), ("step", draw.randint(1, 3))]) for _ in range(33)]
    steps = sorted(draw.randint(0, STEPS) for _ in kinds)
    script = numbered(*((at, *kind) for at, kind in zip(steps, kinds, strict=True)))
    script += [(STEPS * 2, {"number": 99, "kind": "resume"})]

    ranks = ranks_of(run_ranks, 2, f"{CONTROL} --training-resume-after 0.2", script)
    assert [rank["code"] for rank in ranks] == [ExitCode.OK] * 2
    assert ranks[0]["obeyed"] == ranks[1]["obeyed"]
    assert all(rank["boundaries"] == [(step, "CONTINUE") for step in range(STEPS)] for rank in ranks)
    assert len(reported(ranks, "losses")) == STEPS


@pytest.mark.torch
@pytest.mark.full("two endings", but=("stop",))
@pytest.mark.parametrize("ending", ["stop", "signal"])
def test_a_paused_training_ends_with_a_checkpoint(run_ranks: RunRanks, tmp_path: pathlib.Path, ending: str) -> None:
    """By an order as complete, by a signal to any rank as preempted; both are resumed from the checkpoint."""
    flags = f"{CONTROL} {FBD} --save {tmp_path} --load {tmp_path}"
    orders = [(1, "pause"), (2, "step", 1), *([(3, "stop")] if ending == "stop" else [])]
    ranks = ranks_of(run_ranks, 2, flags, numbered(*orders), 4 if ending == "signal" else None)
    code, decision = (ExitCode.OK, "STOP") if ending == "stop" else (ExitCode.PREEMPTED, "PREEMPT")
    assert [rank["code"] for rank in ranks] == [code] * 2
    assert all(rank["boundaries"][-1] == (3, decision) for rank in ranks)
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "3"
    rest = ranks_of(run_ranks, 2, flags, [])
    plain = ranks_of(run_ranks, 2, f"{CONTROL} {FBD}", [])
    assert reported(ranks, "losses") + reported(rest, "losses") == reported(plain, "losses")


@pytest.mark.torch
def test_a_stop_without_a_place_to_save_is_refused_and_an_unattended_pause_ends(run_ranks: RunRanks) -> None:
    flags = f"{CONTROL} --train-iters 3 --training-start-paused --training-resume-after 0.05"
    (rank,) = run_ranks(1, train, flags, numbered((0, "stop")))
    assert rank["code"] == ExitCode.OK and len(rank["losses"]) == 3
    assert rank["obeyed"] == {1: (0, False), 0: (0, True)}
    assert rank["reports"][0]["state"] == "paused" and rank["reports"][-1]["pausedSeconds"] > 0


def test_steps_are_captured_at_an_interval_and_by_order() -> None:
    from megatronapp_trainer.hooks.scheduled_capture import ScheduledCapture

    connect = unittest.mock.Mock()
    capture = ScheduledCapture(connect, every=0)
    orders = {2: None, 4: 3, 7: None, 10: 0, 11: None}
    captured = []
    capture.begin()
    for iteration in range(14):
        if iteration in orders:
            capture.order(orders[iteration])
        if capture.step_begin(iteration):
            captured.append(iteration + 1)
    assert captured == [3, 6, 8, 9, 12]
    assert connect.call_args_list == [unittest.mock.call(0)] and capture.every == 0


def test_a_long_pause_has_several_spans() -> None:
    from megatronapp_trainer.training.control.training_control import PauseSpan

    now, calls = 0.0, []

    class SpanObserver:
        def begin(self, kind: int, chunk: int, microbatch: int) -> None:
            calls.append(("begin", now))

        def end(self, kind: int) -> None:
            calls.append(("end", now))

        def heartbeat(self) -> None: ...

    observer: Any = SpanObserver()
    span = PauseSpan(observer, lambda: now)
    for second in range(1, 75):
        now = float(second)
        span.continues()
    span.end()
    assert calls == [("begin", 0), ("end", 31), ("begin", 31), ("end", 62), ("begin", 62), ("end", 74)]
    assert all(end - begin < 34 for (_, begin), (_, end) in zip(calls[::2], calls[1::2], strict=True))


def test_an_order_that_fits_into_no_message_lets_later_ones_pass() -> None:
    from megatronapp_trainer.training.control.group import OrderMessage, fitting

    large, pause = Order(1, OrderKind.PERTURB, recipe='"' * 1020), Order(2, OrderKind.PAUSE)
    chosen = fitting([large, pause])
    assert [(order.number, order.recipe) for order in chosen] == [(1, None), (2, None)]
    assert OrderMessage.unpack(OrderMessage.pack(3, chosen), iteration=3) == chosen


def test_orders_fit_states() -> None:
    stepping = ControlState(TrainingState.STEPPING, 2)
    assert RUNNING.after(Order(1, OrderKind.PAUSE)) == PAUSED
    assert PAUSED.after(Order(1, OrderKind.STEP, 2)) == stepping
    assert [stepping.after_step(), stepping.after_step().after_step()] == [
        ControlState(TrainingState.STEPPING, 1),
        PAUSED,
    ]
    assert stepping.after(Order(1, OrderKind.RESUME)) == RUNNING
    capture = Order.from_json({"number": 1, "kind": "capture", "every": 50})
    assert capture.to_json() == {"number": 1, "kind": "capture", "every": 50}
    assert [state.after(capture) for state in (RUNNING, PAUSED, stepping)] == [RUNNING, PAUSED, stepping]
    for state, kind in ((RUNNING, "step"), (RUNNING, "resume"), (PAUSED, "pause"), (stepping, "step")):
        with pytest.raises(OrderError):
            state.after(Order(1, OrderKind(kind), 1))
    wrong: list[Any] = [[], {"number": 1, "kind": "dance"}, {"number": 1, "kind": "step"}, {"kind": "pause"}]
    wrong.append({"number": 1, "kind": "capture", "every": -1})
    for document in wrong:
        with pytest.raises(OrderError):
            Order.from_json(document)
