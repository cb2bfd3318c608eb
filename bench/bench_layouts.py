"""Losses of 50 steps at each layout compared with those of one process, on the CPU.

    python bench/bench_layouts.py [--steps N] [--model-type bert]

Bit-equal is asked of pipelines with untied embeddings, no clipping and no dropout; elsewhere 1e-5 relative. With
`--trace` the layouts run once more with the tracer, which must change no bit. Ends with 1 where something differs.
"""

import argparse
import importlib.util
import pathlib
import sys
import tempfile
from collections.abc import Callable
from typing import Any

MODEL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 2 "
    "--global-batch-size 8 --lr 2e-3 --lr-decay-style cosine --lr-warmup-iters 2 --mock-data "
    "--vocab-size 120 --attention-dropout 0 --hidden-dropout 0 --eval-iters 0"
)
UNTIED = "--untie-embeddings-and-output-weights --clip-grad 0"
TOLERANCE = 1e-5
LIMIT_S = 900.0
"""Limit of a run."""
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


Record = tuple[list[float], list[float]]
"""Losses and gradient norms by step."""


def train(flags: str) -> Record | None:
    """Train as a rank of a job does. Returns what the reporting rank has seen, None on the others."""
    from pretrained import train as run  # of tests/support, on the path of the fork server's ranks

    record: Record | None = run(flags)
    return record


def record_of(
    server: Any,  # noqa: ANN401 - see fork_server
    world: int,
    flags: str,
    *,
    function: Callable[[str], Record | None] = train,
    environment: dict[str, str] | None = None,
) -> Record:
    """Return what the reporting rank of a run has seen."""
    results = server.run(world, function, flags, timeout_s=LIMIT_S, environment=environment)
    (record,) = [found for found in results if found is not None]
    losses, norms = record
    return losses, norms


def fork_server(directory: pathlib.Path, *, devices: bool = False) -> Any:  # noqa: ANN401 - of a file outside the packages
    """Return the fork server of the tests, whose ranks use NVIDIA devices if `devices` is set."""
    path = pathlib.Path(__file__).parents[1] / "tests" / "support" / "training" / "torch_forkserver.py"
    support = path.parents[1]
    sys.path += [str(support), str(support / "training"), str(support / "pipeline")]  # for the server and its ranks
    spec = importlib.util.spec_from_file_location("torch_forkserver", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["torch_forkserver"] = module
    spec.loader.exec_module(module)
    return module.ForkServer(directory, devices=devices)


def largest_difference(values: list[float], anchor: list[float]) -> float:
    """Return the largest relative difference."""
    return max(abs(value - other) / abs(other) for value, other in zip(values, anchor, strict=True))


def compare(server: Any, base: str, directory: str) -> list[str]:  # noqa: ANN401 - see fork_server
    """Print a row per layout of a model with these flags; what is wrong."""
    anchors = {model: record_of(server, 1, f"{base} {model}")[0] for model in ("", UNTIED)}
    wrong = []
    print("| layout | ranks | largest relative difference | asked | with tracing |\n|---|---|---|---|---|")
    for name, world, model, layout, exact in LAYOUTS:
        flags = f"{base} {model} {layout}"
        losses, _ = record_of(server, world, flags)
        environment = {"MEGATRONAPP_SHM_DIR": directory, "MEGATRONAPP_SHM_PREFIX": "bench"}
        traced, _ = record_of(server, world, f"{flags} --trace", environment=environment)
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
    parser.add_argument("--model-type", choices=("gpt", "bert"), default="gpt")
    arguments = parser.parse_args()
    base = f"{MODEL} --model-type {arguments.model_type} --train-iters {arguments.steps}"
    with tempfile.TemporaryDirectory() as directory:
        server = fork_server(pathlib.Path(directory))
        try:
            wrong = compare(server, base, directory)
        finally:
            server.stop()
    print("all as asked" if not wrong else f"not as asked: {', '.join(wrong)}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
