"""Settings of all tests, and ranks of torch: ``run_ranks(world, function, *arguments)`` gives the ranks' results.

Generated inputs have no deadline, because a loaded machine is not a failure. A property is tried on fewer than
hypothesis' own 100 inputs, unless it asks for a number or `make test-full` runs.

In continuous integration the inputs are the same in every run; elsewhere they are new each time and find more.
"""

import contextlib
import importlib.util
import os
import pathlib
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import settings

pytest_plugins = ["pytest_workers"]

os.environ.setdefault("OMP_NUM_THREADS", "1")
"""Threads of torch in a process of tests, and in what it starts: launchers give ranks the same number.

With two, they wait for each other by turning in a loop, which takes a hundred times the processor time of tiny tensors
where other processes use the processors."""

EXAMPLES = 100 if os.environ.get("MEGATRONAPP_FULL") else 25
settings.register_profile("shared", deadline=None, max_examples=EXAMPLES)
settings.register_profile("ci", deadline=None, max_examples=EXAMPLES, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "shared")

_FORK_SERVER = pathlib.Path(__file__).parent / "support" / "training" / "torch_forkserver.py"


@pytest.fixture(scope="session")
def forkserver(request: pytest.FixtureRequest) -> Iterator[Any]:
    """The fork server, which the processes of a run share; started before a test could change what it inherits."""
    with torch_forkserver(run=getattr(request.config, "workerinput", None)) as server:
        server.start()
        yield server


@pytest.fixture(scope="session")
def device_forkserver() -> Iterator[Any]:
    """The same for ranks that use the NVIDIA devices of this machine."""
    with torch_forkserver(devices=True) as server:
        yield server


@contextlib.contextmanager
def torch_forkserver(*, run: dict[str, Any] | None = None, **options: Any) -> Iterator[Any]:
    """Give a fork server; `run`: what pytest_workers gave the processes of a run, which share it."""
    spec = importlib.util.spec_from_file_location("torch_forkserver", _FORK_SERVER)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["torch_forkserver"] = module
    spec.loader.exec_module(module)
    if run is not None:
        yield module.ForkServer(pathlib.Path(run["shared_folder"]), owner=run["controller_pid"], **options)
        return
    with tempfile.TemporaryDirectory() as directory:  # a socket's path must be short, pytest's are not
        server = module.ForkServer(pathlib.Path(directory), **options)
        yield server
        server.stop()


@pytest.fixture(scope="session")
def run_ranks(forkserver: Any) -> Callable[..., list[Any]]:
    """Run a top-level function of the test's file on gloo ranks; ``timeout_s`` and ``environment`` are keywords."""
    run: Callable[..., list[Any]] = forkserver.run
    return run
