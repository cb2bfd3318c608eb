"""The training loop: steps, and the work at step boundaries."""

import contextlib
import gc
import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

from megatronapp_common.names import UNSAVED_STOP, ExitCode
from megatronapp_common.trace import RecordKind
from megatronapp_trainer.checkpoint.saving.report import CheckpointReport
from megatronapp_trainer.checkpoint.train_state import NO_STEP, TrainState
from megatronapp_trainer.config import TrainerConfig
from megatronapp_trainer.data.microbatches import DataIterators
from megatronapp_trainer.errors import NotFiniteError, UnsavedStopError
from megatronapp_trainer.hooks.boundary_control import BoundaryControl, BoundaryDecision
from megatronapp_trainer.hooks.probe_texts import ProbeTexts
from megatronapp_trainer.hooks.step_observer import StepObserver
from megatronapp_trainer.hooks.training_capture import TrainingCapture
from megatronapp_trainer.hooks.training_perturbation import TrainingPerturbation
from megatronapp_trainer.models.registry import model_family
from megatronapp_trainer.parallel.agreement import rank
from megatronapp_trainer.pipeline.schedule import PipelineSchedule
from megatronapp_trainer.training.build import TrainingRun
from megatronapp_trainer.training.evaluate import Evaluator, gathered_parameters, is_due
from megatronapp_trainer.training.loop_context import LoopContext
from megatronapp_trainer.training.monitor import StepOutcome, TrainingMonitor
from megatronapp_trainer.training.probe_texts import read_probe_texts
from megatronapp_trainer.training.progress import Reporter
from megatronapp_trainer.training.signals import StopRequest
from megatronapp_trainer.training.step import TrainingStep
from megatronapp_trainer.training.watch.device_memory import snapshot_on_out_of_memory
from megatronapp_trainer.training.watch.equal_weights import check_equal_weights
from megatronapp_trainer.training.watch.profiling import profile_window

if TYPE_CHECKING:  # imported only where checkpoints are written
    from megatronapp_trainer.checkpoint.memory.checkpoints import MemoryCheckpoints
    from megatronapp_trainer.checkpoint.saving.background import BackgroundSaves

log = logging.getLogger(__name__)


class CheckpointSaver(Protocol):
    """Methods that the loop uses of the checkpoint manager."""

    background: "BackgroundSaves | None"
    memory: "MemoryCheckpoints | None"

    @property
    def report(self) -> CheckpointReport:
        """Return the figures of the checkpoints so far."""

    def save(self, state: TrainState) -> None:
        """Write a checkpoint of this state; collective. Raises StorageError."""


class Trainer:
    """Runs steps until the training ends, a stop is requested, or a loss is not finite."""

    def __init__(
        self,
        run: TrainingRun,
        iterators: DataIterators,
        schedule: PipelineSchedule,
        *,
        stop_request: StopRequest,
        reporter: Reporter | None = None,
        checkpoints: CheckpointSaver | None = None,
        observer: StepObserver | None = None,
        control: BoundaryControl | None = None,
        capture: TrainingCapture | None = None,
        probes: ProbeTexts | None = None,
        perturbation: TrainingPerturbation | None = None,
    ) -> None:
        """Take a run with its data and schedule.

        Args:
            run: what is trained.
            iterators: its data.
            schedule: of its passes.
            stop_request: of this process.
            reporter: of the reporting rank.
            checkpoints: where a checkpoint can be saved.
            observer: of this rank's spans.
            control: decides before each step whether there is one more.
            capture: captures steps.
            probes: texts that are run after each captured step.
            perturbation: perturbs steps by order.
        """
        self._run = run
        self._config = run.config
        self._state = run.state
        self._checkpoints = checkpoints
        self._memory = None if checkpoints is None else checkpoints.memory
        self._control = control
        is_from_disk = self._memory is None or self._memory.resumed is None
        self._saved_iteration = run.state.iteration if is_from_disk else NO_STEP
        self._save_is_due = False
        self._delayed_by: int | None = None
        """Step of the pending checkpoint that the next was last delayed by."""
        self._monitor = TrainingMonitor(run, reporter, observer)
        context = LoopContext(
            run=run,
            schedule=schedule,
            source=model_family(run.config).batch_source(run.config, run.layout, run.device),
            monitor=self._monitor,
            stop_request=stop_request,
            saves=None if checkpoints is None else checkpoints.background,
            memory=None if self._memory is None else self._memory.saves,
        )
        self._context = context
        self._probes = probes
        self._stream_state = iterators.stream_state
        self._profile = profile_window(run.config, run.layout.global_rank, is_cuda=run.device.is_cuda)
        self._step = TrainingStep(context, iterators.train, capture, perturbation)
        self._evaluator = Evaluator(context, iterators)

    def train(self) -> ExitCode:
        """Train to the end, or until asked to stop.

        Raises:
            NotFiniteError: a loss or gradient is NaN or Inf.
            UnsavedStopError: asked to stop where no checkpoint can be written.
            Exception: any error of data, checkpoints and collectives.
        """
        run = self._run
        recorded = snapshot_on_out_of_memory(run.config, run.layout.global_rank, is_cuda=run.device.is_cuda)
        with _garbage_collected_by_loop(self._config), recorded, self._profiled():
            self._monitor.publish_state("training")
            self._monitor.explain_missing_mfu()
            if self._memory is not None and self._memory.resumed is not None:  # lost copies are replaced at once
                self._save_in_memory()
            if not self._evaluator.finish_interrupted():
                return self._stop()
            while self._state.iteration < self._config.training.train_iters:
                if (code := self._ordered_end()) is not None:
                    return code
                outcome = self.step()
                if outcome.is_captured and self._probes is not None:
                    read_probe_texts(self._context, self._probes, self._state.iteration, outcome.perturbation)
                if (code := self._at_boundary(outcome)) is not None:
                    return code
        return self._finish()

    def test(self) -> ExitCode:
        """Evaluate on validation and test data after training, if there are any.

        A stop ends it early: as a preemption if a restart would evaluate again, without training again.
        """
        if not self._evaluator.run_final():
            restarts_here = self._checkpoints is not None or self._config.logging.skip_train
            return ExitCode.PREEMPTED if restarts_here else ExitCode.OK
        self._monitor.publish_state("done")
        return ExitCode.OK

    def step(self) -> StepOutcome:
        """Run one optimizer step. Raises NotFiniteError on all ranks, once a pending checkpoint is written."""
        if self._profile is not None:
            self._profile.step_begin(self._state.iteration)
        try:
            outcome = self._step.run()
        except NotFiniteError:
            self._finish_saving(raises=False)
            raise
        if self._profile is not None:
            self._profile.step_end(self._state.iteration)
        return outcome

    @contextlib.contextmanager
    def _profiled(self) -> Iterator[None]:
        """Write a profile whose window is still open at the end of the context."""
        try:
            yield
        finally:
            if self._profile is not None:
                self._profile.close()

    def _ordered_end(self) -> ExitCode | None:
        """Obey orders before a step, as a pause; an exit code ends the training."""
        if self._control is None:
            return None
        self._context.wait_for_copies()  # an order may change weights
        match self._control.at_boundary(self._state.iteration):
            case BoundaryDecision.CONTINUE:
                return None
            case BoundaryDecision.STOP:
                code = self._finish()
                self._monitor.publish_state("done")
                return code
            case BoundaryDecision.PREEMPT:
                return self._stop()

    def _at_boundary(self, outcome: StepOutcome) -> ExitCode | None:
        """Do the work that is due between two steps; an exit code ends the training."""
        iteration, config = self._state.iteration, self._config
        self._continue_saving(outcome)
        if self._context.memory is not None and self._context.memory.poll():
            self._report_checkpoints()
        if config.training.manual_gc and is_due(iteration, config.training.manual_gc_interval or None):
            self._monitor.collect_garbage()
        if is_due(iteration, config.watch.check_weight_hash_across_dp_replicas_interval):
            with gathered_parameters(self._run):
                check_equal_weights(self._state.chunks, step=iteration)
        self._evaluator.mark_due()
        if outcome.loss.stop and iteration < config.training.train_iters:  # after the last step all is done
            return self._stop()
        stopped = self._state.validation_due and not self._evaluator.run("validation")
        if outcome.loss.save:  # a request that another rank has not seen yet is fulfilled by this checkpoint, too
            self._context.stop_request.save = False
        self._save_is_due |= outcome.loss.save or is_due(iteration, config.checkpoint.save_interval)
        if self._save_is_due:
            self._save_unless_writing()
        self._save_in_memory_if_due()
        if stopped and iteration < config.training.train_iters:
            return self._stop()
        if outcome.loss.time_is_up or is_due(iteration, config.training.exit_interval):
            return self._finish()
        return None

    def _stop(self) -> ExitCode:
        if self._checkpoints is None:
            raise UnsavedStopError(
                f"stopped after {self._state.iteration} steps, {UNSAVED_STOP}; "
                "a restart begins from the start, so give --save to resume where it stopped"
            )
        self._save_and_finish()
        return ExitCode.PREEMPTED

    def _finish(self) -> ExitCode:
        self._save_and_finish()
        return ExitCode.OK

    def _continue_saving(self, outcome: StepOutcome) -> None:
        """Begin the next stage of writing a checkpoint, once the ranks have agreed in this step that it can."""
        saves = self._context.saves
        if saves is None or saves.pending is None or outcome.loss.is_saving:
            return
        saves.advance()
        self._report_checkpoints()

    def _save_unless_writing(self) -> None:
        """Save; later, if the former checkpoint is still being written."""
        saves = self._context.saves
        if saves is not None and saves.pending is not None and not saves.is_failing:
            if self._delayed_by != saves.pending and rank() == 0:
                log.warning(
                    "a checkpoint is due at step %d, but that of step %d is still being written; the next is taken as "
                    "soon as it is on the disk",
                    self._state.iteration,
                    saves.pending,
                )
            self._delayed_by = saves.pending
            return
        self._save()
        self._save_is_due = False

    def _save_in_memory_if_due(self) -> None:
        """Save this step in memory, unless it is on the disk already."""
        is_on_disk = self._context.saves is None and self._saved_iteration == self._state.iteration
        if self._memory is not None and not is_on_disk and is_due(self._state.iteration, self._memory.interval):
            self._save_in_memory()

    def _save_in_memory(self) -> None:
        assert self._memory is not None, "the callers look"
        self._state.stream_state = None if self._stream_state is None else self._stream_state()
        with self._monitor.span(RecordKind.CHECKPOINT), gathered_parameters(self._run):
            self._memory.save(self._state)
        self._report_checkpoints()

    def _report_checkpoints(self) -> None:
        if self._checkpoints is not None:
            self._monitor.checkpoints(self._checkpoints.report)

    def _save_and_finish(self) -> None:
        """Write a checkpoint of this step, and wait until it is on the disk."""
        saves = self._context.saves
        is_replaced = self._saved_iteration != self._state.iteration
        if saves is not None and is_replaced and not saves.is_failing:  # a new one takes the place of a failing one
            self._finish_saving(raises=False)
        self._save()
        self._finish_saving()
        if self._context.memory is not None:
            self._context.memory.discard()  # nothing in memory is newer now

    def _finish_saving(self, *, raises: bool = True) -> None:
        """Wait until a pending checkpoint is on the disk; `raises` as of `BackgroundSaves.finish`."""
        saves = self._context.saves
        if saves is None or saves.pending is None:
            return
        self._monitor.publish_state("saving")
        saves.finish(raises=raises)
        self._report_checkpoints()
        self._monitor.publish_state("training")

    def _save(self) -> None:
        """Write a checkpoint, unless saving is off or this step has one."""
        if self._checkpoints is None or self._saved_iteration == self._state.iteration:
            return
        self._monitor.publish_state("saving")
        self._state.stream_state = None if self._stream_state is None else self._stream_state()
        with self._monitor.span(RecordKind.CHECKPOINT), gathered_parameters(self._run):
            self._checkpoints.save(self._state)
        self._saved_iteration = self._state.iteration
        self._report_checkpoints()
        self._monitor.publish_state("training")


@contextlib.contextmanager
def _garbage_collected_by_loop(config: TrainerConfig) -> Iterator[None]:
    """Collect garbage only where the loop does it, inside the context, with ``--manual-gc``."""
    if not config.training.manual_gc:
        yield
        return
    gc.disable()
    gc.collect()
    try:
        yield
    finally:
        gc.enable()
