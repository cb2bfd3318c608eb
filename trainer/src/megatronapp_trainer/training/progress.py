"""Output of the reporting rank: log lines, the progress document, events. The other ranks write none of it."""

import dataclasses
import datetime
import logging
import os
import pathlib
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from megatronapp_common.errors import DocumentError
from megatronapp_common.names import Env, ShmFile
from megatronapp_common.shared_documents import DocumentWriter
from megatronapp_trainer.checkpoint.saving.report import CheckpointReport
from megatronapp_trainer.config import TrainerConfig
from megatronapp_trainer.hooks.step_observer import LM_LOSS, StepMetrics
from megatronapp_trainer.models.experts.statistics import ExpertStatistics
from megatronapp_trainer.parallel.layout import Layout
from megatronapp_trainer.pipeline.planning.report import PlanReport
from megatronapp_trainer.training.forward_backward_report import ForwardBackwardReport
from megatronapp_trainer.training.metrics import (
    expert_events,
    experts_line,
    log_line,
    perplexity,
    validation_line,
)
from megatronapp_trainer.training.watch.events import Events, open_events
from megatronapp_trainer.training.watch.spike_alerts import SpikeDetector

if TYPE_CHECKING:  # imported only where a training obeys orders
    from megatronapp_trainer.training.control.report import ControlReport

log = logging.getLogger(__name__)
Print = Callable[[str], None]
MAX_PLANS = 8
"""Plans in the progress document: the newest; the document is small."""


MAX_LOSSES = 32
"""Losses of corpora, and of validation sets, in the progress document."""
_NAME_LENGTH = 64


class ProgressWriter:
    """Writer of this worker's progress document (docs/contracts.md, section 5)."""

    def __init__(self, writer: DocumentWriter, *, attempt: int, total_iterations: int) -> None:
        self._writer = writer
        self._document: dict[str, Any] = dict.fromkeys(
            (
                "loss",
                "learningRate",
                "gradNorm",
                "tokensPerSecond",
                "tflopsPerGpu",
                "mfu",
                "secondsLeft",
                "validationLoss",
            )
        )
        self._document |= {"attempt": attempt, "totalIterations": total_iterations}
        self._document |= {"iteration": 0, "consumedSamples": 0, "state": "starting", "plans": []}

    @property
    def iteration(self) -> int:
        """Return the number of finished steps."""
        iteration: int = self._document["iteration"]
        return iteration

    def add_plan(self, plan: PlanReport) -> None:
        """Write the plan of the steps from here on. It replaces an entry that is the same but for what was measured."""
        plans: list[dict[str, Any]] = self._document["plans"]
        entry = plan.to_json(self.iteration)
        if plans and _unmeasured(plans[-1]) == _unmeasured(entry):
            entry["fromStep"] = plans[-1]["fromStep"]
            plans = plans[:-1]
        self._document["plans"] = [*plans, entry][-MAX_PLANS:]
        self.update()

    def set_forward_backward(self, report: ForwardBackwardReport) -> None:
        """Write how the ranks of both roles work from here on; what was measured later replaces it from its step on."""
        entry = report.to_json(self.iteration)
        former = self._document.get("forwardBackward")
        if former is not None and (former["ship"], former["chosen"]) == (entry["ship"], entry["chosen"]):
            entry["fromStep"] = former["fromStep"]
        self._document["forwardBackward"] = entry
        self.update()

    def update(self, **values: float | str | dict[str, Any] | None) -> None:
        """Change some values and write the document."""
        self._document |= values | {"updatedAt": datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")}
        self._writer.write(self._document)


def _unmeasured(entry: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in entry.items() if name not in {"fromStep", "measuredSeconds"}}


def open_progress(total_iterations: int) -> ProgressWriter | None:
    """Open the document of this worker; None outside a worker or, with a warning, without space for it."""
    prefix = os.environ.get(Env.SHM_PREFIX)
    if not prefix:
        return None
    path = pathlib.Path(os.environ.get(Env.SHM_DIR, "/dev/shm")) / f"{prefix}.{ShmFile.PROGRESS}"
    try:
        writer = DocumentWriter(path)
    except DocumentError as error:
        log.warning("no progress is published: %s", error)
        return None
    return ProgressWriter(writer, attempt=int(os.environ.get(Env.ATTEMPT, "0")), total_iterations=total_iterations)


class Reporter:
    """Reports steps; created on the reporting rank only."""

    def __init__(
        self,
        config: TrainerConfig,
        *,
        progress: ProgressWriter | None,
        events: Events | None,
        print_line: Print = print,
    ) -> None:
        self._config = config
        self._total_iterations = config.training.train_iters
        self._progress = progress
        self._events = events
        self._print = print_line
        self._published_iteration: int | None = None
        thresholds = {
            "loss": config.watch.loss_spike_threshold,
            "grad norm": config.watch.grad_norm_spike_threshold,
        }
        self._detectors = {name: SpikeDetector(value) for name, value in thresholds.items() if value is not None}
        self._elapsed_s: list[float] = []
        self._losses: list[float] = []
        self._named_losses: list[Mapping[str, float]] = []

    def state(self, state: str) -> None:
        """Set the state: starting, training, evaluating, saving or done."""
        if self._progress is not None:
            self._progress.update(state=state)

    def plan(self, plan: PlanReport) -> None:
        """Publish the plan of the steps that follow."""
        if self._progress is not None:
            self._progress.add_plan(plan)

    def forward_backward(self, report: ForwardBackwardReport) -> None:
        """Publish how the ranks of both roles of MegaFBD work in the steps that follow."""
        if self._progress is not None:
            self._progress.set_forward_backward(report)

    def resumed(self, iteration: int, consumed_samples: int, *, total_iterations: int) -> None:
        """Report that the checkpoint of `iteration` finished steps was loaded."""
        total = self._total_iterations = total_iterations
        if iteration < total:
            self._print(f"resumes after step {iteration} of {total}, from its checkpoint")
        else:
            self._print(
                f"nothing is left to train: the checkpoint has {iteration} steps, and {total} are requested; request "
                "more (--train-iters or --train-samples), or start over with another or an emptied --save"
            )
        if self._progress is not None:
            self._progress.update(iteration=iteration, consumedSamples=consumed_samples, totalIterations=total)

    def step(
        self,
        metrics: StepMetrics,
        *,
        elapsed_s: float,
        batch_size: int,
        skipped_steps: int,
        experts: ExpertStatistics | None = None,
    ) -> None:
        """Report the end of a step: document, event file, and the log line if one is due."""
        self._elapsed_s.append(elapsed_s)
        self._losses.append(metrics.loss)
        self._named_losses.append(metrics.named_losses)
        self._alert(metrics)
        seconds_left = self._seconds_left(metrics.iteration)
        self._publish(metrics, seconds_left, experts)
        if metrics.iteration % self._config.logging.tensorboard_log_interval == 0:
            self._add_events(metrics, elapsed_s=elapsed_s, batch_size=batch_size)
            if experts is not None:
                self._write_events(expert_events(experts), metrics.iteration)
        if metrics.iteration % self._config.logging.log_interval == 0:
            self._interval(metrics, batch_size=batch_size, skipped=skipped_steps, seconds_left=seconds_left)
            if experts is not None:
                self.line(f" {experts_line(experts)}")

    def _alert(self, metrics: StepMetrics) -> None:
        """Report a loss or a gradient norm far above those of the steps before."""
        for name, value in (("loss", metrics.loss), ("grad norm", metrics.grad_norm)):
            detector = self._detectors.get(name)
            spike = None if detector is None or value is None else detector.judge(value)
            if spike is not None:
                self.line(
                    f" ALERT: the {name} of step {metrics.iteration} is {spike.value:.6E}, {spike.deviations:.1f} "
                    f"standard deviations above the median of the steps before, {spike.median:.6E}"
                )
                self._write_events({f"alert/{name}": spike.deviations}, metrics.iteration)

    def _seconds_left(self, iteration: int) -> float:
        """Estimate the rest by the median step since the last log line; a mean would trust the first step."""
        return statistics.median(self._elapsed_s) * (self._total_iterations - iteration)

    def _publish(self, metrics: StepMetrics, seconds_left: float, experts: ExpertStatistics | None) -> None:
        if self._progress is None:
            return
        further: dict[str, Any] = {} if experts is None else {"experts": experts.to_json()}
        if self._config.logging.log_loss_per_source:
            further["sourceLosses"] = _shown(losses_of_sources(metrics.named_losses))
        self._progress.update(
            iteration=metrics.iteration,
            loss=metrics.loss,
            learningRate=metrics.learning_rate,
            gradNorm=metrics.grad_norm,
            tokensPerSecond=metrics.tokens_per_second,
            tflopsPerGpu=metrics.tflops_per_gpu,
            mfu=metrics.mfu,
            secondsLeft=seconds_left,
            consumedSamples=metrics.consumed_samples,
            state="training",
            **further,
        )

    def _interval(self, metrics: StepMetrics, *, batch_size: int, skipped: int, seconds_left: float) -> None:
        """Print the log line: means over the steps since the last one."""
        elapsed_s = statistics.fmean(self._elapsed_s)
        speed_up = self._elapsed_s[-1] / elapsed_s
        means = dataclasses.replace(
            metrics,
            loss=statistics.fmean(self._losses),
            losses=_mean_by_name(self._named_losses),
            tokens_per_second=metrics.tokens_per_second * speed_up,
            tflops_per_gpu=metrics.tflops_per_gpu * speed_up,
            mfu=None if metrics.mfu is None else metrics.mfu * speed_up,
        )
        self.line(
            log_line(
                means,
                train_iters=self._total_iterations,
                elapsed_s=elapsed_s,
                batch_size=batch_size,
                skipped=skipped,
                seconds_left=seconds_left,
            )
        )
        self._elapsed_s.clear()
        self._losses.clear()
        self._named_losses.clear()

    def validation(
        self, iteration: int, loss: float, split: str, *, by_name: Mapping[str, float] | None = None
    ) -> None:
        """Report the end of an evaluation; `by_name`: each loss, where there are several."""
        losses = by_name or {LM_LOSS: loss}
        self.line(validation_line(iteration, losses, split))
        if self._progress is not None and split == "validation":
            self._progress.update(validationLoss=loss)
        for name, mean in losses.items():
            self._write_events({f"{name} {split}": mean, f"{name} {split} ppl": perplexity(mean)}, iteration)

    def checkpoints(self, report: CheckpointReport) -> None:
        """Report the figures of checkpoints: document, and event file once one is published."""
        if self._progress is not None:
            self._progress.update(checkpoint=report.to_json())
        if report.iteration is not None and report.iteration != self._published_iteration:
            self._published_iteration = report.iteration
            figures = {"checkpoint-blocked-time": report.blocked_s, "checkpoint-write-time": report.written_s}
            self._write_events({tag: value for tag, value in figures.items() if value is not None}, report.iteration)

    def validation_sets(self, mean: float, by_set: Mapping[str, float]) -> None:
        """Publish the losses of the sets of an evaluation, and their mean as its loss."""
        if self._progress is not None:
            self._progress.update(validationLoss=mean, validationLosses=_shown(by_set))

    def control(self, report: "ControlReport") -> None:
        """Report the state of a training that obeys orders."""
        if self._progress is not None:
            self._progress.update(state="paused" if report.is_paused else "training", control=report.to_json())

    def line(self, text: str) -> None:
        """Print a line with the time before it."""
        self._print(f" [{datetime.datetime.now():%Y-%m-%d %H:%M:%S}]{text}")

    def close(self) -> None:
        """Close the writers of events."""
        if self._events is not None:
            self._events.close()

    def _write_events(self, values: dict[str, float], iteration: int) -> None:
        if self._events is not None:
            self._events.add(values, iteration)

    def _add_events(self, metrics: StepMetrics, *, elapsed_s: float, batch_size: int) -> None:
        values = {
            **metrics.named_losses,
            "learning-rate": metrics.learning_rate,
            "tokens-per-second": metrics.tokens_per_second,
            "throughput": metrics.tflops_per_gpu,
            "iteration-time": elapsed_s,
            "batch-size": batch_size,
        }
        if metrics.mfu is not None:
            values["mfu"] = metrics.mfu
        if metrics.memory_gib is not None:
            values["memory-allocated-gib"], values["memory-reserved-gib"] = metrics.memory_gib
        if metrics.grad_norm is not None:
            values["grad-norm"] = metrics.grad_norm
        self._write_events(values, metrics.iteration)


def _shown(losses: Mapping[str, float]) -> dict[str, float]:
    """Return the first losses by the ends of their names, as many as have room in the document."""
    return {name[-_NAME_LENGTH:]: loss for name, loss in list(losses.items())[:MAX_LOSSES]}


def losses_of_sources(named_losses: Mapping[str, float]) -> dict[str, float]:
    """Return the loss of each corpus of a blend in this step by its name."""
    prefix = f"{LM_LOSS} "
    return {name.removeprefix(prefix): loss for name, loss in named_losses.items() if name.startswith(prefix)}


def _mean_by_name(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each loss over the steps that have it."""
    names = dict.fromkeys(name for step in steps for name in step)
    return {name: statistics.fmean(step[name] for step in steps if name in step) for name in names}


def make_reporter(config: TrainerConfig, layout: Layout) -> Reporter | None:
    """Create the reporter on the reporting rank; None on the others."""
    if not layout.is_reporter:
        return None

    def print_line(text: str) -> None:
        print(text, flush=True)

    return Reporter(
        config,
        progress=open_progress(config.training.train_iters),
        events=open_events(config),
        print_line=print_line,
    )
