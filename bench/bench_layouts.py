"""Losses of 50 steps at each layout compared with those of one process, on the CPU.

    python bench/bench_layouts.py [--steps N]

Bit-equal is asked of pipelines with untied embeddings, no clipping and no dropout; elsewhere 1e-5 relative. With
`--trace` the layouts run once more with the tracer, which must change no bit. Ends with 1 where something differs.
"""

import argparse
import importlib.util
import pathlib
import sys
import tempfile
import warnings
from typing import Any

MODEL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 2 "
    "--global-batch-size 8 --lr 2e-3 --lr-decay-style cosine --lr-warmup-iters 2 --mock-data "
    "--vocab-size 120 --attention-dropout 0 --hidden-dropout 0 --eval-iters 0"
)
UNTIED = "--untie-embeddings-and-output-weights --clip-grad 0"
TOLERANCE = 1e-5
TP2, PP2, PP4 = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2", "--pipeline-model-parallel-size 4"
VPP = f"{PP2} --num-virtual-stages-per-pipeline-rank 2"
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
LAYOUTS = (
    ("PP2", 2, UNTIED, PP2, True),
    ("VPP", 2, UNTIED, VPP, True),
    ("PP4", 4, UNTIED, PP4, True),
    ("TP2", 2, "", TP2, False),
    ("TP2+SP", 2, "", f"{TP2} --sequence-parallel", False),
    ("TP2xPP2", 4, "", f"{TP2} {PP2}", False),
    ("DP2", 2, "", "", False),
    ("DP2, distributed optimizer", 2, "", "--use-distributed-optimizer", False),
    ("full recompute", 1, "", FULL, False),
    ("selective recompute", 1, "", "--recompute-activations", False),
)


class LossReporter:
    """A reporter that keeps the losses."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def step(self, metrics: Any, **_details: object) -> None:  # noqa: ANN401 - StepMetrics, known in the rank only
        self.values.append(metrics.loss)

    def state(self, state: str) -> None:
        """Discard the reported state."""


def train(flags: str) -> list[float]:
    """Losses of a run; on every rank but the reporting one an empty list."""
    warnings.simplefilter("ignore")
    from megatronapp_trainer.config import parse
    from megatronapp_trainer.device import prepare_device
    from megatronapp_trainer.parallel.groups import destroy_groups, initialize_groups
    from megatronapp_trainer.pretrain import open_observer
    from megatronapp_trainer.training.build import build_iterators, build_run, build_schedule, layout_of
    from megatronapp_trainer.training.loop import Trainer
    from megatronapp_trainer.training.signals import StopRequest

    config = parse(f"{MODEL} {flags}".split())
    layout = layout_of(config)
    device = prepare_device(layout.local_rank)
    initialize_groups(config, layout, device)
    run = build_run(config, layout, device, vocab_size=120)
    reporter: Any = LossReporter() if layout.is_reporter else None
    observer = open_observer(run)
    iterators = build_iterators(config, layout, 0)
    Trainer(
        run, iterators, build_schedule(run, observer), stop_request=StopRequest(), reporter=reporter, observer=observer
    ).train()
    if observer is not None:
        observer.close()
    destroy_groups()
    values: list[float] = reporter.values if reporter is not None else []
    return values


def fork_server(directory: pathlib.Path) -> Any:  # noqa: ANN401 - a class of a file outside the packages
    path = pathlib.Path(__file__).parents[1] / "tests" / "support" / "training" / "torch_forkserver.py"
    sys.path.append(str(path.parents[1]))  # of what the server imports
    spec = importlib.util.spec_from_file_location("torch_forkserver", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["torch_forkserver"] = module
    spec.loader.exec_module(module)
    return module.ForkServer(directory)


def largest_difference(losses: list[float], anchor: list[float]) -> float:
    """Return the largest relative difference."""
    return max(abs(loss - other) / abs(other) for loss, other in zip(losses, anchor, strict=True))


def compare(server: Any, steps: int, directory: str) -> list[str]:  # noqa: ANN401 - see fork_server
    """Print a row per layout; what is wrong."""
    anchors = {model: server.run(1, train, f"{model} --train-iters {steps}")[0] for model in ("", UNTIED)}
    wrong = []
    print("| layout | ranks | largest relative difference | asked | with tracing |\n|---|---|---|---|---|")
    for name, world, model, layout, exact in LAYOUTS:
        flags = f"{model} {layout} --train-iters {steps}"
        losses = max(server.run(world, train, flags, timeout_s=600), key=len)
        environment = {"MEGATRONAPP_SHM_DIR": directory, "MEGATRONAPP_SHM_PREFIX": "bench"}
        traced = max(server.run(world, train, f"{flags} --trace", timeout_s=600, environment=environment), key=len)
        difference = largest_difference(losses, anchors[model])
        tolerance = "0" if exact else f"{TOLERANCE:g}"
        same = "bit-equal" if traced == losses else "differs"
        print(f"| {name} | {world} | {difference:.2g} | {tolerance} | {same} |", flush=True)
        if difference > (0.0 if exact else TOLERANCE) or traced != losses:
            wrong.append(name)
    print(f"\nloss of one process: {anchors[''][0]:.4f} -> {anchors[''][-1]:.4f}")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=50)
    steps = parser.parse_args().steps
    with tempfile.TemporaryDirectory() as directory:
        server = fork_server(pathlib.Path(directory))
        try:
            wrong = compare(server, steps, directory)
        finally:
            server.stop()
    print("all as asked" if not wrong else f"not as asked: {', '.join(wrong)}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
