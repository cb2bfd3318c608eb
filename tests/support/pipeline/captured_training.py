"""Short trainings with captures of statistics of layers, whose frames are returned instead of sent."""

import os
from typing import Any

from evaluated_training import MODEL, EvaluationRecorder

from megatronapp_common.frames import Frame, encode

CAPTURED = 2
"""The step that is captured: the weights are no longer the drawn ones."""
FLAGS = "--train-iters 3 --eval-interval 1 --hidden-dropout 0 --attention-dropout 0"


def train(flags: str, captures: bool) -> dict[str, Any]:
    """Train on this rank as `pretrain` does it; returns the losses, and the frames that would go to the agent."""
    import sys
    import warnings

    warnings.simplefilter("ignore")
    from megatronapp_trainer import pretrain
    from megatronapp_trainer.config import parse
    from megatronapp_trainer.training import progress

    jobs = jobs_instead_of_frames() if captures else []
    recorder = EvaluationRecorder()
    progress.make_reporter = lambda _config, layout: recorder if layout.is_reporter else None  # type: ignore[assignment, return-value]
    if captures:
        flags = f"--scope-capture-interval {CAPTURED} {flags}"
    measured = steps_that_tuners_measure()
    pretrain.pretrain(parse(f"{MODEL} {FLAGS} {flags}".split()))
    frames = frames_of(jobs)
    if not captures:
        assert not any(name.startswith("megatronapp_trainer.scope") for name in sys.modules)
    return {"losses": recorder.losses, "norms": recorder.grad_norms, "frames": frames, "measured": len(measured)}


def jobs_instead_of_frames() -> list[Any]:
    """A list that grows with each job that ranks of this process would send to their agent."""
    os.environ |= {"MEGATRONAPP_RUN_DIR": "/nowhere", "MEGATRONAPP_HUB_URL": "http://nowhere"}
    from megatronapp_trainer.scope.statistics import setup

    jobs: list[Any] = []

    class Publisher:
        def __init__(self, _path: object, _hello: Frame) -> None: ...

        def start(self) -> None: ...

        def post(self, job: Any) -> None:
            jobs.append(job)

        def close(self) -> None: ...

    setup.FramePublisher = Publisher  # type: ignore[assignment, attr-defined]
    return jobs


def frames_of(jobs: list[Any]) -> list[bytes]:
    """The frames of jobs, encoded, once the device has finished them."""
    import torch

    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
    assert all(job.ready() for job in jobs)
    return [encode(frame) for job in jobs for frame in job.build()]


def steps_that_tuners_measure() -> list[Any]:
    """A list that grows with each step whose times a tuner of MegaDPP or MegaFBD takes."""
    from megatronapp_trainer.fbd.tuning.ship_tuner import ShipTuner
    from megatronapp_trainer.pipeline.plan_tuner import PlanTuner

    measured: list[Any] = []

    def noted(end_step: Any) -> Any:
        def taken(self: Any, *arguments: Any, **options: Any) -> Any:
            measured.append(arguments)
            return end_step(self, *arguments, **options)

        return taken

    for tuner in (ShipTuner, PlanTuner):
        tuner.end_step = noted(tuner.end_step)  # type: ignore[method-assign]
    return measured
