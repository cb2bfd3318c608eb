"""Trainings in which a site of a layer becomes NaN in one step, whose captures are returned instead of sent."""

from collections.abc import Callable
from typing import Any

from captured_training import frames_of, jobs_instead_of_frames
from evaluated_training import MODEL, EvaluationRecorder

LAYER = 2
"""Layer in whose second MLP layer a number becomes NaN in each microbatch, counted from 0."""
STEP = 3
"""Step in which it does, counted from 1."""
FLAGS = "--train-iters 4 --eval-iters 0 --hidden-dropout 0.1 --attention-dropout 0.1"


def train(flags: str) -> dict[str, Any]:
    """Train on this rank as `pretrain` does it: losses, the error, and frames that would go to the agent."""
    import warnings

    warnings.simplefilter("ignore")
    from megatronapp_trainer import pretrain
    from megatronapp_trainer.config import parse
    from megatronapp_trainer.errors import TrainerError
    from megatronapp_trainer.training import progress

    recorder = EvaluationRecorder()
    progress.make_reporter = lambda _config, layout: recorder if layout.is_reporter else None  # type: ignore[assignment, return-value]
    jobs = jobs_instead_of_frames()
    poison_models()
    error = ""
    try:
        pretrain.pretrain(parse(f"{MODEL} {FLAGS} {flags}".split()))
    except TrainerError as raised:
        error = f"{type(raised).__name__}: {raised}"
    return {"losses": recorder.losses, "error": error, "frames": frames_of(jobs)}


def poison_models() -> None:
    """Let models of this process compute NaN once the steps before have been done."""
    from megatronapp_trainer.fbd.forward_rank import ForwardRank
    from megatronapp_trainer.training import build
    from megatronapp_trainer.training.perturbation.trained_perturbation import model_of

    build_run, create = build.build_run, ForwardRank.__init__
    forward_ranks: list[Any] = []

    def poisoned(*arguments: Any, **options: Any) -> Any:
        run = build_run(*arguments, **options)

        def steps_done() -> int:
            done: int = forward_ranks[0]._iteration if forward_ranks else run.state.iteration
            return done

        for model in map(model_of, run.state.chunks):
            for layer in model.decoder.layers:
                if layer.layer_number == LAYER + 1:
                    layer.mlp.linear_fc2.register_forward_hook(poison(steps_done))
        return run

    def created(self: Any, *arguments: Any, **options: Any) -> None:
        create(self, *arguments, **options)
        forward_ranks.append(self)

    build.build_run, ForwardRank.__init__ = poisoned, created  # type: ignore[method-assign]


def poison(steps_done: Callable[[], int]) -> Callable[[Any, Any, Any], None]:
    """A hook that changes numbers of the output alone, and nothing that autograd knows."""

    def hook(_module: Any, _inputs: Any, output: Any) -> None:
        if steps_done() >= STEP - 1:
            output[0].data[1, 0, 3] = float("nan")

    return hook
