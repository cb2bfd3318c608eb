"""Kernels of training, in Triton's interpreter on a processor, next to plain torch: values, gradients, whole steps."""

import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import pytest

pytestmark = pytest.mark.torch

SCRIPT = pathlib.Path(__file__).parents[3] / "support" / "kernels" / "interpreted_kernels.py"
TOLERANCE = 2e-5
"""Relative to the largest number of a tensor, in fp32: sums are added up in another order."""


FLAGS = {"gelu": "", "swiglu": "--swiglu --normalization RMSNorm --disable-bias-linear"}


def start(*calls: str) -> "subprocess.Popen[str]":
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    environment = os.environ | rank | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(SCRIPT), *calls]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def results_of(running: "subprocess.Popen[str]") -> list[Any]:
    output, _ = running.communicate(timeout=270)
    assert running.returncode == 0
    results: list[Any] = json.loads(output.splitlines()[-1])
    return results


@pytest.fixture(scope="module")
def found() -> list[Any]:
    """Errors of kernels, and losses of a training, of the same process: it imports torch for three seconds."""
    return results_of(start("errors", f"losses={FLAGS['gelu']}"))


def test_kernels_are_those_of_torch(found: list[Any]) -> None:
    errors = found[0]
    assert len(errors) == 10
    assert {name: error for name, error in errors.items() if not error < TOLERANCE} == {}


@pytest.mark.full("two processes; the kernel itself is compared always, and this sum over ranks on GPUs")
def test_the_loss_of_a_split_vocabulary(tmp_path: pathlib.Path) -> None:
    ranks = [start(f"split_loss={rank}:{tmp_path / 'store'}") for rank in range(2)]
    for rank in ranks:
        (errors,) = results_of(rank)
        assert errors["losses"] == pytest.approx([0.0] * 4, abs=1e-6)
        assert errors["gradients"] == pytest.approx([0.0] * 20, abs=1e-6)


@pytest.mark.full("starts a process for each case", but=("gelu",))
@pytest.mark.parametrize("case", FLAGS)
def test_a_training_on_kernels_has_the_losses_of_torch(case: str, found: list[Any]) -> None:
    losses = found[1] if case == "gelu" else results_of(start(f"losses={FLAGS[case]}"))[0]
    assert losses["kernels"] == pytest.approx(losses["torch"], rel=1e-5)
    assert losses["torch"][2] < losses["torch"][0]
