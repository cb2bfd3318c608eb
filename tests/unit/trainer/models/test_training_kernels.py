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


def start(function: str, *arguments: str) -> "subprocess.Popen[str]":
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    environment = os.environ | rank | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(SCRIPT), function, *arguments]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def result_of(running: "subprocess.Popen[str]") -> Any:
    output, _ = running.communicate(timeout=270)
    assert running.returncode == 0
    return json.loads(output.splitlines()[-1])


def test_kernels_are_those_of_torch() -> None:
    found = result_of(start("errors"))
    assert len(found) == 10
    assert {name: error for name, error in found.items() if not error < TOLERANCE} == {}


@pytest.mark.full("two processes; the kernel itself is compared always, and this sum over ranks on GPUs")
def test_the_loss_of_a_split_vocabulary(tmp_path: pathlib.Path) -> None:
    ranks = [start("split_loss", f"{rank}:{tmp_path / 'store'}") for rank in range(2)]
    for found in [result_of(rank) for rank in ranks]:
        assert found["losses"] == pytest.approx([0.0] * 4, abs=1e-6)
        assert found["gradients"] == pytest.approx([0.0] * 20, abs=1e-6)


@pytest.mark.full("starts a process for each case", but=("gelu",))
@pytest.mark.parametrize(
    "flags", ["", "--swiglu --normalization RMSNorm --disable-bias-linear"], ids=["gelu", "swiglu"]
)
def test_a_training_on_kernels_has_the_losses_of_torch(flags: str) -> None:
    found = result_of(start("losses", flags))
    assert found["kernels"] == pytest.approx(found["torch"], rel=1e-5)
    assert found["torch"][2] < found["torch"][0]
