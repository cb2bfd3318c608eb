"""Perturbation of a training on a device: coefficient 0 and undone noise change no bit."""

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from perturbed_training import perturb, train
from perturbing_ranks import GAUSSIAN, calculation, storage

RunRanks = Callable[..., list[Any]]
NONE = {"type": "gaussian", "coefficient": 0.0}
FC1, EMBEDDING = "mlp.linear_fc1", "embedding.word_embeddings"
FLAGS = {
    "fp32": "--deterministic-mode",
    "bf16": "--deterministic-mode --bf16 --use-distributed-optimizer",
}


def trained(run_ranks: RunRanks, world: int, flags: str, script: Any) -> list[dict[str, Any]]:
    """Train on ranks with a device each; what each has seen, on the host."""
    environment = {"MEGATRONAPP_JOB_UID": f"perturb-{os.getpid()}-{world}", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    return run_ranks(world, on_host, flags, script, environment=environment)


def on_host(flags: str, script: Any) -> dict[str, Any]:
    found = train(flags, script)
    found["weights"] = [{name: value.cpu() for name, value in weights.items()} for weights in found["weights"]]
    found["optimizer"] = [value.cpu() for value in found["optimizer"]]
    return found


def check_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["losses"] == expected["losses"]
    for mine, plain in zip(found["weights"], expected["weights"], strict=True):
        assert all(torch.equal(value, plain[name]) for name, value in mine.items())
    assert all(torch.equal(*pair) for pair in zip(found["optimizer"], expected["optimizer"], strict=True))


@pytest.mark.parametrize("gpus", [1, pytest.param(2, marks=pytest.mark.gpus(2))])
@pytest.mark.parametrize("flags", FLAGS.values(), ids=list(FLAGS))
def test_coefficient_0_and_undone_noise_change_no_bit(run_ranks: RunRanks, flags: str, gpus: int) -> None:
    stored = (storage(FC1, NONE), storage(EMBEDDING, NONE))
    activations = () if "bf16" in flags else (calculation("mlp2", NONE), {"kind": "system", "action": NONE})
    script = [
        (0, perturb(1, storage(FC1, GAUSSIAN), target="master")),
        (0, {"number": 2, "kind": "undo"}),
        (0, perturb(3, *stored, target="master")),
        (1, perturb(4, *stored, *activations)),
    ]
    found, expected = (trained(run_ranks, gpus, flags, orders) for orders in (script, []))
    for rank, plain in zip(found, expected, strict=True):
        assert [rank["obeyed"][number][1] for number in (1, 2, 3, 4)] == [None] * 4
        check_equal(rank, plain)


@pytest.mark.parametrize("kind", ["model", "master", "activations"])
def test_noise_changes_losses(run_ranks: RunRanks, kind: str) -> None:
    change = calculation("mlp2", GAUSSIAN) if kind == "activations" else storage(FC1, GAUSSIAN)
    order = perturb(1, change)
    if kind != "activations":
        order["target"] = kind
    flags = f"{FLAGS['bf16']} --recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    (found,) = trained(run_ranks, 1, flags, [(0, order)])
    (expected,) = trained(run_ranks, 1, flags, [])
    assert found["obeyed"][1] == (0, None)
    assert found["losses"][0] != expected["losses"][0]
    ((_, first, last),) = found["perturbed"]
    assert (first, last) == (1, 4 if kind == "activations" else 1)
