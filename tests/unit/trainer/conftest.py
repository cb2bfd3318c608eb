"""Ranks of torch for tests: ``run_ranks(world, function, *arguments)`` gives the ranks' results."""

import importlib.util
import pathlib
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import pytest

_FORK_SERVER = pathlib.Path(__file__).parents[2] / "support" / "torch_forkserver.py"


@pytest.fixture(scope="session")
def forkserver() -> Iterator[Any]:
    """The fork server of this test session, started at its first use."""
    spec = importlib.util.spec_from_file_location("torch_forkserver", _FORK_SERVER)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["torch_forkserver"] = module
    spec.loader.exec_module(module)
    with tempfile.TemporaryDirectory() as directory:  # a socket's path must be short, pytest's are not
        server = module.ForkServer(pathlib.Path(directory))
        yield server
        server.stop()


@pytest.fixture(scope="session")
def run_ranks(forkserver: Any) -> Callable[..., list[Any]]:
    """Run a top-level function of the test's file on gloo ranks; ``timeout_s`` and ``environment`` are keywords."""
    run: Callable[..., list[Any]] = forkserver.run
    return run
