"""Reports of training to the log and progress of the reporting rank, and to an observer."""

import contextlib
import dataclasses
import gc
import statistics
from collections.abc import Iterator, Mapping, Sequence

from megatronapp_common.trace import NO_MICROBATCH, RecordKind
from megatronapp_trainer.checkpoint.saving.report import CheckpointReport
from megatronapp_trainer.hooks.step_observer import StepMetrics, StepObserver
from megatronapp_trainer.models.experts.statistics import ExpertStatistics
from megatronapp_trainer.models.language_model_loss import StepLoss
from megatronapp_trainer.training.build import TrainingRun
from megatronapp_trainer.training.learning_rate import learning_rate
from megatronapp_trainer.training.metrics import device_count, flops_per_token, peak_tflops, why_no_mfu
from megatronapp_trainer.training.progress import Reporter
from megatronapp_trainer.training.watch.device_memory import take_peak_gib


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StepOutcome:
    """Result of a step, before it is reported."""

    loss: StepLoss
    grad_norm: float | None
    skipped: bool
    batch_size: int
    elapsed_s: float
    is_captured: bool = False
    """True if statistics of its layers were captured."""
    perturbation: str | None = None
    """Digest of the recipe that was in force in it."""
    experts: ExpertStatistics | None = None
    """Losses and load of the experts; None in a model without any."""


class TrainingMonitor:
    """Reports to a reporter and an observer, either of which may be absent."""

    def __init__(self, run: TrainingRun, reporter: Reporter | None, observer: StepObserver | None) -> None:
        self.observer = observer
        self._reporter = reporter
        self._run = run
        self._state = run.state
        self._flops = flops_per_token(run.config.model, run.padded_vocab_size)
        self._peak_tflops = peak_tflops(run.device.name, is_half=run.config.precision.is_half)

    def publish_state(self, state: str) -> None:
        """Write what the run does now into the progress document."""
        if self._reporter is not None:
            self._reporter.state(state)

    def explain_missing_mfu(self) -> None:
        """Log why no MFU is reported, if none is."""
        reason = why_no_mfu(self._run.device.name, is_half=self._run.config.precision.is_half)
        if reason is not None and self._reporter is not None:
            self._reporter.line(f" {reason}")

    @contextlib.contextmanager
    def span(self, kind: RecordKind) -> Iterator[None]:
        """Open a span of the observer, if any; for work that is done at most a few times per step."""
        if self.observer is None:
            yield
            return
        self.observer.begin(kind, 0, NO_MICROBATCH)
        yield
        self.observer.end(kind)

    def collect_garbage(self) -> None:
        """Collect garbage within a span."""
        with self.span(RecordKind.GC):
            gc.collect()

    def step_begin(self) -> None:
        """Announce the next step."""
        if self.observer is not None:
            self.observer.step_begin(self._state.iteration)

    def announcement(self) -> Sequence[float]:
        """Return the observer's figures that are added up over all ranks in this step."""
        return () if self.observer is None else self.observer.announcement()

    def agreed(self, sums: Sequence[float]) -> None:
        """Pass the sums of these figures on to the observer."""
        if self.observer is not None:
            self.observer.agreed(sums)

    def step_end(self, outcome: StepOutcome) -> None:
        """Report the figures of a step."""
        metrics = self._metrics(outcome)
        if self.observer is not None:
            self.observer.step_end(metrics)
        if self._reporter is not None:
            self._reporter.step(
                metrics,
                elapsed_s=outcome.elapsed_s,
                batch_size=outcome.batch_size,
                skipped_steps=self._state.skipped_iterations,
                experts=outcome.experts,
            )

    def evaluated(self, split: str, losses: Mapping[str, StepLoss]) -> None:
        """Report the losses of an evaluation by the names of its sets; the figure for all is their mean."""
        mean = statistics.fmean(loss.mean for loss in losses.values())
        if self.observer is not None and split == "validation":
            self.observer.validation(mean)
        if self._reporter is None:
            return
        for name, loss in losses.items():
            place = f"{split}-{name}" if name else split
            self._reporter.validation(self._state.iteration, loss.mean, place, by_name=loss.by_name)
        if split == "validation" and "" not in losses:
            self._reporter.validation_sets(mean, {name: loss.mean for name, loss in losses.items()})

    def checkpoints(self, report: CheckpointReport) -> None:
        """Report the figures of checkpoints."""
        if self._reporter is not None:
            self._reporter.checkpoints(report)

    def _memory(self) -> tuple[float, float] | None:
        """Return the peaks of memory since the last log line, where one is due on a GPU."""
        is_logged = self._state.iteration % self._run.config.logging.log_interval == 0
        reports = self._reporter is not None and self._run.device.is_cuda
        return take_peak_gib() if is_logged and reports else None

    def _metrics(self, outcome: StepOutcome) -> StepMetrics:
        tokens_per_second = outcome.batch_size * self._run.config.model.seq_length / outcome.elapsed_s
        tflops = tokens_per_second * self._flops / device_count(self._run.config, self._run.layout) / 1e12
        return StepMetrics(
            iteration=self._state.iteration,
            loss=outcome.loss.mean,
            losses={**outcome.loss.by_name, **({} if outcome.experts is None else outcome.experts.losses)},
            learning_rate=learning_rate(self._state.optimizer),
            grad_norm=outcome.grad_norm,
            tokens_per_second=tokens_per_second,
            tflops_per_gpu=tflops,
            mfu=None if self._peak_tflops is None else tflops / self._peak_tflops,
            consumed_samples=self._state.consumed_samples,
            skipped=outcome.skipped,
            memory_gib=self._memory(),
            loss_scale=float(self._state.optimizer.get_loss_scale()) if self._run.config.precision.fp16 else None,
        )
