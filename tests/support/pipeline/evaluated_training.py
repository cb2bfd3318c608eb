"""A short training with evaluations, of which the losses and gradient norms are compared to the last bit."""

from typing import Any

from pytest_workers import FULL
from recording_reporter import RecordingReporter

Record = tuple[list[float], list[float], list[float]]
"""Losses, gradient norms, and losses of evaluations."""

BATCH = 8 if FULL else 4
"""Samples of a step: two microbatches for each of two stages are the fewest with which passes take turns."""
MODEL = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 1 "
    f"--global-batch-size {BATCH} --train-iters 3 --lr 2e-3 --lr-decay-style cosine --lr-warmup-iters 2 --mock-data "
    "--vocab-size 120 --eval-iters 1 --eval-interval 2"
)


class EvaluationRecorder(RecordingReporter):
    """A reporter that also collects the losses of evaluations, and reports of both roles of MegaFBD."""

    def __init__(self) -> None:
        super().__init__()
        self.evaluations: list[float] = []
        self.reports: list[dict[str, Any]] = []

    def validation(self, iteration: int, loss: float, split: str, **_details: object) -> None:
        self.evaluations.append(loss)

    def forward_backward(self, report: Any) -> None:
        self.reports.append(report.to_json(len(self.losses)))

    def line(self, text: str) -> None: ...

    def plan(self, report: object) -> None: ...

    def resumed(self, *arguments: object, **options: object) -> None: ...

    def close(self) -> None: ...


def train(flags: str) -> tuple[int, Record | None]:
    """Exit code of this rank, and what the reporting rank has seen."""
    code, recorder = train_recorded(flags)
    return code, (recorder.losses, recorder.grad_norms, recorder.evaluations) if recorder.losses else None


def train_recorded(flags: str) -> tuple[int, EvaluationRecorder]:
    """Exit code of this rank, and its recorder, which only the reporting rank has used.

    Weight gradients that run later than their backward pass are not empty.
    """
    import warnings

    warnings.simplefilter("ignore")
    from megatronapp_trainer import pretrain
    from megatronapp_trainer.pipeline.weight_gradients import WeightGradientStore

    run = WeightGradientStore.run

    def run_some(store: WeightGradientStore, microbatch: int) -> None:
        before = store.retained_bytes
        run(store, microbatch)
        assert store.retained_bytes < before

    WeightGradientStore.run = run_some  # type: ignore[method-assign, assignment]
    from megatronapp_trainer.config import parse
    from megatronapp_trainer.training import progress

    recorder = EvaluationRecorder()
    progress.make_reporter = lambda config, layout: recorder if layout.is_reporter else None  # type: ignore[assignment, return-value]
    return pretrain.pretrain(parse(f"{MODEL} {flags}".split())), recorder
