"""Events at step boundaries: stopping, evaluating, refusing losses that are not finite, being observed."""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import small_training
from recording_observer import RecordingObserver
from recording_reporter import BackgroundServices, RecordingServices

from megatronapp_common.names import ExitCode

pytestmark = pytest.mark.torch

RunRanks = Callable[..., list[Any]]

MODEL = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 1 "
    "--global-batch-size 4 --train-iters 8 --lr 2e-3 --mock-data --vocab-size 120 --eval-iters 0"
)
PP2 = "--pipeline-model-parallel-size 2"
VPP = f"{PP2} --num-virtual-stages-per-pipeline-rank 2"


def prepared(flags: str) -> tuple[Any, Any]:
    """A run and its iterators on this rank."""
    from megatronapp_trainer.training.build import build_iterators

    run = small_training.prepare(f"{MODEL} {flags}")
    return run, build_iterators(run.config, run.layout, 0)


def train(flags: str) -> dict[str, Any]:
    """Return what a run reported on this rank."""
    from megatronapp_trainer.training.build import build_schedule
    from megatronapp_trainer.training.loop import Trainer
    from megatronapp_trainer.training.signals import StopRequest

    run, iterators = prepared(flags)
    recorder: Any = RecordingServices()
    code = Trainer(
        run, iterators, build_schedule(run), stop_request=StopRequest(), reporter=recorder, checkpoints=recorder
    ).train()
    modules = [name for name in sys.modules if name.startswith("megatronapp_trainer.scan")]
    return {**vars(recorder), "code": int(code), "scan": modules, "timers": run.core_config.timers}


def at_step(iterator: Iterator[Any], microbatches: int, step: int, act: Callable[[], None]) -> Iterator[Any]:
    """The same iterator, which acts before the first microbatch of a step."""
    for number, batch in enumerate(iterator):
        if number == microbatches * step:
            act()
        yield batch


def train_with_a_signal_and_no_checkpoints() -> tuple[int, str]:
    """Return the exit code and the message of a run that was requested to stop and cannot save."""
    from megatronapp_trainer.data.microbatches import DataIterators
    from megatronapp_trainer.errors import UnsavedStopError
    from megatronapp_trainer.training.build import build_schedule
    from megatronapp_trainer.training.loop import Trainer
    from megatronapp_trainer.training.signals import StopRequest

    run, iterators = prepared("")
    with StopRequest() as stop, pytest.raises(UnsavedStopError) as caught:
        hooked = at_step(iterators.train, 4, 1, lambda: os.kill(os.getpid(), signal.SIGTERM))
        Trainer(run, DataIterators(train=hooked, valid=None, test=None), build_schedule(run), stop_request=stop).train()
    return int(caught.value.exit_code), str(caught.value)


def train_with_a_signal_in_the_last_step() -> int:
    from megatronapp_trainer.data.microbatches import DataIterators
    from megatronapp_trainer.training.build import build_schedule
    from megatronapp_trainer.training.loop import Trainer
    from megatronapp_trainer.training.signals import StopRequest

    run, iterators = prepared("--train-iters 2")
    with StopRequest() as stop:
        hooked = at_step(iterators.train, 4, 1, lambda: os.kill(os.getpid(), signal.SIGTERM))
        iterators = DataIterators(train=hooked, valid=None, test=None)
        return int(Trainer(run, iterators, build_schedule(run), stop_request=stop).train())


def train_with_a_signal_on_rank_0() -> tuple[int, list[int], int]:
    from megatronapp_trainer.data.microbatches import DataIterators
    from megatronapp_trainer.training.build import build_schedule
    from megatronapp_trainer.training.loop import Trainer
    from megatronapp_trainer.training.signals import StopRequest

    run, iterators = prepared(PP2)
    recorder: Any = RecordingServices()
    with StopRequest() as stop:
        if run.layout.rank == 0:
            hooked = at_step(iterators.train, 2, 3, lambda: os.kill(os.getpid(), signal.SIGTERM))
            iterators = DataIterators(train=hooked, valid=None, test=None)
        code = Trainer(
            run, iterators, build_schedule(run), stop_request=stop, reporter=recorder, checkpoints=recorder
        ).train()
    return int(code), recorder.saved, run.state.iteration


def train_with_a_request_to_save_on_rank_1(flags: str) -> tuple[int, list[int], list[bool]]:
    """Return the exit code, the steps that were saved, and whether a request was pending before each microbatch."""
    from megatronapp_trainer.data.microbatches import DataIterators
    from megatronapp_trainer.parallel.peer_loss import SAVE
    from megatronapp_trainer.training.build import build_schedule
    from megatronapp_trainer.training.loop import Trainer
    from megatronapp_trainer.training.signals import StopRequest

    run, iterators = prepared(f"{PP2} {flags}")
    recorder: Any = RecordingServices()
    pending: list[bool] = []
    with StopRequest() as stop:

        def act() -> None:
            os.kill(os.getpid(), SAVE)

        hooked = at_step(iterators.train, 4, 2, act) if run.layout.rank == 1 else iterators.train

        def noted() -> Iterator[Any]:
            for batch in hooked:
                pending.append(stop.save)
                yield batch

        iterators = DataIterators(train=noted(), valid=None, test=None)
        code = Trainer(
            run, iterators, build_schedule(run), stop_request=stop, reporter=recorder, checkpoints=recorder
        ).train()
    return int(code), recorder.saved, pending


def evaluate_with_a_signal(flags: str) -> tuple[int, list[int], int, int, list[tuple[int, float, str]]]:
    """A signal on rank 0 at the third batch of the evaluation after step 2: code, saves, steps, batches, results."""
    from megatronapp_trainer.data.microbatches import DataIterators
    from megatronapp_trainer.training.build import build_schedule
    from megatronapp_trainer.training.loop import Trainer
    from megatronapp_trainer.training.signals import StopRequest

    run, iterators = prepared(flags)
    recorder: Any = RecordingServices()
    taken = 0

    def counted(batches: Iterator[Any] | None) -> Iterator[Any]:
        nonlocal taken
        for batch in batches or ():
            taken += 1
            if run.layout.rank == 0 and taken == 9:  # four microbatches a batch
                os.kill(os.getpid(), signal.SIGTERM)
            yield batch

    iterators = DataIterators(train=iterators.train, valid=counted(iterators.valid), test=None)
    with StopRequest() as stop:
        trainer = Trainer(
            run, iterators, build_schedule(run), stop_request=stop, reporter=recorder, checkpoints=recorder
        )
        code = trainer.test() if run.config.logging.skip_train else trainer.train()
    return int(code), recorder.saved, run.state.iteration, taken // 4, recorder.validations


def stop_where_an_evaluation_is_due() -> tuple[int, list[int], list[str]]:
    """A signal in the step before an evaluation: code, saves, states."""
    from megatronapp_trainer.data.microbatches import DataIterators
    from megatronapp_trainer.training.build import build_schedule
    from megatronapp_trainer.training.loop import Trainer
    from megatronapp_trainer.training.signals import StopRequest

    run, iterators = prepared("--eval-iters 2 --eval-interval 2")
    recorder: Any = RecordingServices()
    with StopRequest() as stop:
        hooked = at_step(iterators.train, 4, 1, lambda: os.kill(os.getpid(), signal.SIGTERM))
        iterators = DataIterators(train=hooked, valid=iterators.valid, test=None)
        code = Trainer(
            run, iterators, build_schedule(run), stop_request=stop, reporter=recorder, checkpoints=recorder
        ).train()
    return int(code), recorder.saved, recorder.states


def train_with_poisoned_weights() -> str:
    """Replica 1 computes NaN from step 2 on."""
    from megatronapp_trainer.data.microbatches import DataIterators
    from megatronapp_trainer.errors import NotFiniteError
    from megatronapp_trainer.training.build import build_schedule
    from megatronapp_trainer.training.loop import Trainer
    from megatronapp_trainer.training.signals import StopRequest

    run, iterators = prepared(PP2)
    if run.layout.is_first_stage and run.layout.data_rank == 1:

        def poison() -> None:
            next(run.state.chunks[0].parameters()).data.fill_(float("nan"))

        iterators = DataIterators(train=at_step(iterators.train, 2, 2, poison), valid=None, test=None)
    with pytest.raises(NotFiniteError) as caught:
        Trainer(run, iterators, build_schedule(run), stop_request=StopRequest()).train()
    return str(caught.value)


def train_with_poisoned_gradients(flags: str) -> tuple[str, list[int], list[str], bool]:
    """Return the error, saves, what was announced, and if weights are finite, where in step 2 a gradient of replica 1
    is NaN and its loss finite."""
    import torch

    from megatronapp_trainer.data.microbatches import DataIterators
    from megatronapp_trainer.errors import NotFiniteError
    from megatronapp_trainer.training.build import build_schedule
    from megatronapp_trainer.training.loop import Trainer
    from megatronapp_trainer.training.signals import StopRequest

    run, iterators = prepared(flags)
    if run.layout.data_rank == 1:

        def poison() -> None:
            next(run.state.chunks[0].parameters()).register_hook(lambda gradient: torch.full_like(gradient, torch.nan))

        iterators = DataIterators(train=at_step(iterators.train, 2, 2, poison), valid=None, test=None)
    recorder: Any = RecordingServices()
    recorder.background = BackgroundServices(recorder)
    with pytest.raises(NotFiniteError) as caught:
        Trainer(
            run, iterators, build_schedule(run), stop_request=StopRequest(), reporter=recorder, checkpoints=recorder
        ).train()
    finite = all(bool(weight.isfinite().all()) for weight in run.state.chunks[0].parameters())
    return str(caught.value), recorder.saved, recorder.states, finite


def end_with_a_pending_checkpoint() -> list[tuple[list[str], list[int]]]:
    """Return what is announced and saved at the end of a training while an earlier checkpoint is pending: one that is
    being written, and one whose write has failed."""
    from megatronapp_trainer.training.build import build_schedule
    from megatronapp_trainer.training.loop import Trainer
    from megatronapp_trainer.training.signals import StopRequest

    run, iterators = prepared("--train-iters 2")
    schedule, found = build_schedule(run), []
    for is_failing in (False, True):
        recorder: Any = RecordingServices()
        recorder.background = BackgroundServices(recorder, pending=1, is_failing=is_failing)
        trainer = Trainer(run, iterators, schedule, stop_request=StopRequest(), reporter=recorder, checkpoints=recorder)
        run.state.iteration += 2
        trainer.train()
        found.append((recorder.states, recorder.saved))
    return found


def train_and_test(flags: str) -> Any:
    """Return the states that a whole run passes through."""
    from megatronapp_trainer.training.build import build_schedule
    from megatronapp_trainer.training.loop import Trainer
    from megatronapp_trainer.training.signals import StopRequest

    run, iterators = prepared(flags)
    recorder: Any = RecordingServices()
    trainer = Trainer(
        run, iterators, build_schedule(run), stop_request=StopRequest(), reporter=recorder, checkpoints=recorder
    )
    trainer.train()
    trainer.test()
    return recorder.states


def observed(flags: str) -> tuple[list[tuple[str, str, int, int]], list[float], list[tuple[int, int]]]:
    from megatronapp_trainer.pipeline.megatron_schedules import backward_order
    from megatronapp_trainer.training.build import build_schedule
    from megatronapp_trainer.training.loop import Trainer
    from megatronapp_trainer.training.signals import StopRequest

    run, iterators = prepared(flags)
    observer = RecordingObserver()
    Trainer(run, iterators, build_schedule(run, observer), stop_request=StopRequest(), observer=observer).train()  # type: ignore[arg-type]
    return observer.events, observer.losses, list(backward_order(run.layout, 4))


def feed_of_a_step(microbatches: int, flags: str = "") -> tuple[list[int], list[int], list[tuple[str, str, int, int]]]:
    """First tokens of what was read and of what two chunks took, in order, and the spans of that."""
    from megatronapp_trainer.data.microbatches import BatchSource, ChunkFeed, HostMicrobatch, StepFeed

    run, iterators = prepared(flags)
    read: list[int] = []

    def noted() -> Iterator[HostMicrobatch]:
        for batch in iterators.train:
            read.append(int(batch["tokens"][0, 0]))
            yield batch

    observer: Any = RecordingObserver()
    source = BatchSource(run.config, run.layout, run.device)
    source.reading_chunks = frozenset({0, 1})
    feed = StepFeed(source, noted(), microbatches, observer=observer)
    chunks = [ChunkFeed(feed, chunk) for chunk in (0, 1)]
    batches = [chunk.next() for _ in range(microbatches) for chunk in chunks]
    with pytest.raises(ValueError, match=f"microbatch {microbatches} was requested in a step of {microbatches}"):
        chunks[0].next()
    return read, [int(batch.tokens[0, 0]) for batch in batches if batch is not None], observer.events


def test_a_signal_on_any_rank_stops_all_at_the_same_step_boundary(run_ranks: RunRanks) -> None:
    results = run_ranks(4, train_with_a_signal_on_rank_0)
    assert results == [(int(ExitCode.PREEMPTED), [4], 4)] * 4


@pytest.mark.parametrize(
    ("flags", "saved"), [("", [3, 8]), ("--save none --save-interval 3", [3, 6, 8])], ids=["alone", "due"]
)
def test_a_request_on_any_rank_saves_once_on_all_and_training_continues(
    run_ranks: RunRanks, flags: str, saved: list[int]
) -> None:
    for code, steps, pending in run_ranks(2, train_with_a_request_to_save_on_rank_1, flags):
        assert (code, steps) == (int(ExitCode.OK), saved)
        assert not any(pending[12:]), "the checkpoint fulfils it"


@pytest.mark.parametrize(("world", "flags"), [(1, "--micro-batch-size 1"), (2, PP2)])
def test_a_signal_ends_an_evaluation_after_a_few_batches(run_ranks: RunRanks, world: int, flags: str) -> None:
    more = f"{flags} --eval-iters 50 --eval-interval 2"
    for code, saved, steps, batches, validations in run_ranks(world, evaluate_with_a_signal, more):
        assert (code, saved, steps) == (int(ExitCode.PREEMPTED), [2], 2)
        assert batches <= 5
        assert validations == []


def test_a_signal_in_an_evaluation_without_training_is_a_preemption(run_ranks: RunRanks) -> None:
    ((code, saved, steps, batches, _),) = run_ranks(1, evaluate_with_a_signal, "--skip-train --eval-iters 50")
    assert (code, saved, steps) == (int(ExitCode.PREEMPTED), [], 0)
    assert batches <= 5


def test_a_stop_does_not_wait_for_an_evaluation_that_is_due(run_ranks: RunRanks) -> None:
    ((code, saved, states),) = run_ranks(1, stop_where_an_evaluation_is_due)
    assert (code, saved) == (int(ExitCode.PREEMPTED), [2])
    assert "evaluating" not in states


def test_a_stop_without_a_checkpoint_is_no_preemption(run_ranks: RunRanks) -> None:
    """Check that no preemption is reported: the operator restarts preempted jobs for free, this one without end."""
    ((code, messages),) = run_ranks(1, train_with_a_signal_and_no_checkpoints)
    assert code == ExitCode.OWN_FAILURE
    assert "stopped after 2 steps, as asked, without a checkpoint (no --save)" in messages


def test_a_stop_in_the_last_step_finds_all_done(run_ranks: RunRanks) -> None:
    assert run_ranks(1, train_with_a_signal_in_the_last_step) == [int(ExitCode.OK)]


def test_not_finite_losses_name_step_rank_and_microbatch(run_ranks: RunRanks) -> None:
    messages = run_ranks(4, train_with_poisoned_weights)
    assert len(set(messages)) == 1
    assert "the loss of step 2 is nan (rank 3, microbatch 0)" in messages[0]


@pytest.mark.full("kinds of optimizers", but=("unclipped-distributed", "clipped"))
@pytest.mark.parametrize(
    "flags",
    [
        pytest.param("--clip-grad 0", id="unclipped"),
        pytest.param("--clip-grad 0 --use-distributed-optimizer", id="unclipped-distributed"),
        pytest.param("", id="clipped"),
    ],
)
def test_not_finite_gradients_are_never_saved(run_ranks: RunRanks, flags: str) -> None:
    results = run_ranks(2, train_with_poisoned_gradients, f"--save unused --save-interval 1 {flags}")
    for message, saved, states, weights_are_finite in results:
        assert "the gradient norm of step 2 is nan" in message
        assert saved == [1, 2]
        assert states[-4:] == ["saving", "finish 2 False", "report", "training"], "ranks that wait are no hung ranks"
        assert weights_are_finite


def test_the_last_checkpoint_replaces_that_whose_write_has_failed(run_ranks: RunRanks) -> None:
    """A checkpoint that is being written is waited for; one that waits to be tried again costs time."""
    ((written, failing),) = run_ranks(1, end_with_a_pending_checkpoint)
    begun = ["saving", "report", "training"]
    earlier = ["saving", "finish 1 False", "report", "training"]
    assert written[0] == ["training", *earlier, *begun, "saving", "finish 2 True", "report", "training"]
    assert failing[0] == ["training", *begun, "saving", "finish 4 True", "report", "training"]
    assert (written[1], failing[1]) == ([2], [4])


def test_evaluation_and_last_checkpoint_are_announced(run_ranks: RunRanks) -> None:
    (states,) = run_ranks(1, train_and_test, "--train-iters 2 --eval-iters 1")
    assert states == ["training", "saving", "training", "evaluating", "training", "evaluating", "training", "done"]


@pytest.mark.full("without overlap and chunks there is less to disturb", but=("VPP",))
@pytest.mark.parametrize(
    ("world", "flags"),
    [
        pytest.param(1, "", id="alone"),
        pytest.param(2, "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather", id="overlap"),
        pytest.param(2, VPP, id="VPP"),
    ],
)
def test_evaluation_leaves_training_as_it_was(run_ranks: RunRanks, world: int, flags: str) -> None:
    plain = run_ranks(world, train, flags)[-1]
    evaluated = run_ranks(world, train, f"{flags} --eval-interval 3 --eval-iters 2".replace("--eval-iters 0", ""))[-1]
    assert evaluated["losses"] == plain["losses"]
    assert [validation[0] for validation in evaluated["validations"]] == [3, 6]
    assert evaluated["validations"][1][1] < evaluated["validations"][0][1]


def test_intervals_save_and_exit(run_ranks: RunRanks) -> None:
    (result,) = run_ranks(
        1, train, "--save unused --save-interval 2 --exit-interval 5 --manual-gc --manual-gc-interval 2"
    )
    assert (result["code"], result["saved"]) == (0, [2, 4, 5])
    assert len(result["losses"]) == 5


def test_a_duration_ends_training_on_all_ranks(run_ranks: RunRanks) -> None:
    results = run_ranks(2, train, "--save unused --exit-duration-in-mins 1e-9")
    assert [(result["code"], result["saved"]) for result in results] == [(0, [1])] * 2


def test_the_batch_grows(run_ranks: RunRanks) -> None:
    results = run_ranks(2, train, "--global-batch-size 8 --rampup-batch-size 2 2 12")
    assert results[0]["consumed"] == [2, 4, 8, 14, 22, 30, 38, 46]
    assert results[0]["losses"] == results[1]["losses"]


def test_without_an_observer_nothing_of_the_tracer_exists(run_ranks: RunRanks) -> None:
    (result,) = run_ranks(1, train, "")
    assert result["scan"] == []
    assert result["timers"] is None


@pytest.mark.full("chunks have all that stages have", but=("VPP",))
@pytest.mark.parametrize("flags", [pytest.param(PP2, id="PP2"), pytest.param(VPP, id="VPP")])
def test_an_observer_sees_every_span_and_changes_nothing(run_ranks: RunRanks, flags: str) -> None:
    plain = run_ranks(2, train, flags)
    chunks = 2 if flags == VPP else 1
    for rank, (events, losses, backwards) in enumerate(run_ranks(2, observed, flags)):
        assert losses == plain[rank]["losses"]
        steps = split_steps(events)
        assert len(steps) == 8
        for step in steps:
            check_step(step, chunks, backwards)


def split_steps(events: list[tuple[str, str, int, int]]) -> list[list[tuple[str, str, int, int]]]:
    starts = [index for index, event in enumerate(events) if event[0] == "step_begin"]
    assert [events[index][2] for index in starts] == list(range(len(starts)))
    return [events[start:end] for start, end in zip(starts, [*starts[1:], len(events)], strict=True)]


def check_step(step: list[tuple[str, str, int, int]], chunks: int, backwards: list[tuple[int, int]]) -> None:
    assert step[-1][0] == "step_end"
    begun = [event[1:] for event in step if event[0] == "begin"]
    forwards = sorted(event[1:] for event in begun if event[0] == "FORWARD")
    assert forwards == [(chunk, microbatch) for chunk in range(chunks) for microbatch in range(4)]
    assert [event[1:] for event in begun if event[0] == "BACKWARD"] == backwards
    kinds = [event[0] for event in begun]
    for kind in ("GRAD_REDUCE", "GRAD_NORM", "OPTIMIZER", "LOSS_REDUCE"):
        assert kinds.count(kind) == 1
    compute = [event for event in step if event[1] in {"FORWARD", "BACKWARD", "DATA"}]
    assert [event[0] for event in compute] == ["begin", "end"] * (len(compute) // 2)
    assert all(forward[1] == backward[1] for forward, backward in zip(compute[::2], compute[1::2], strict=True))


def test_microbatches_are_read_together_but_never_those_of_the_next_step(run_ranks: RunRanks) -> None:
    ((read, taken, spans),) = run_ranks(1, feed_of_a_step, 11)
    assert len(read) == 11
    assert taken == [token for token in read for _ in range(2)]
    end = ("end", "DATA", -1, -1)
    assert spans == [("begin", "DATA", 0, 0), end, ("begin", "DATA", 0, 8), end]


def test_without_prefetching_threads_microbatches_are_read_on_demand(run_ranks: RunRanks) -> None:
    ((_, _, spans),) = run_ranks(1, feed_of_a_step, 3, "--num-workers 0")
    assert [span[3] for span in spans if span[0] == "begin"] == [0, 1, 2]
