"""Tests that need NVIDIA devices; skipped where there are fewer than a test asks for (``@pytest.mark.gpus(2)``).

Run by hand on a GPU host: ``python -m pytest tests/gpu``. docs/benchmarks.md says at which commit they last passed.
"""

import pathlib
from collections.abc import Callable
from typing import Any

import pytest


def devices() -> int:
    """Return the number of NVIDIA devices, without starting CUDA in this process."""
    return sum(path.name.removeprefix("nvidia").isdigit() for path in pathlib.Path("/dev").glob("nvidia*"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = pathlib.Path(__file__).parent
    found = devices()
    for item in items:
        if here not in item.path.parents:
            continue
        marker = item.get_closest_marker("gpus")
        required = marker.args[0] if marker else 1
        if found < required:
            item.add_marker(pytest.mark.skip(reason=f"needs {required} NVIDIA devices, and this machine has {found}"))


@pytest.fixture(scope="session")
def run_ranks(device_forkserver: Any) -> Callable[..., list[Any]]:
    """Run a top-level function of the test's file on ranks with a device each."""
    run: Callable[..., list[Any]] = device_forkserver.run
    return run


@pytest.fixture(scope="session")
def on_processor(run_ranks: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """The same on ranks without a device, over gloo."""

    def run(world: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        return run_ranks(world, function, *arguments, environment={"CUDA_VISIBLE_DEVICES": ""})

    return run
