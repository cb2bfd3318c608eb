"""Kernels of MegaScope, compared with plain torch, by Triton's interpreter where there is no GPU."""

import os
import pathlib
import subprocess
import sys

import kernel_cases
import torch


def test_kernels_agree_with_plain_torch() -> None:
    if torch.cuda.is_available():
        kernel_cases.main()
        return
    # The interpreter is chosen when triton is loaded, and torch may have loaded it here.
    done = subprocess.run(
        [sys.executable, str(pathlib.Path(kernel_cases.__file__))],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("agree:") == 2 * len(kernel_cases.CASES) + 5
