"""The simulator of bench/, and short ways to run the detector on what it makes."""

import dataclasses
import importlib.util
import pathlib
import sys
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import Any

import pytest

from megatronapp_analyzer.detect.engine import Detector
from megatronapp_analyzer.model import JobLayout, StepRecords, Verdict
from megatronapp_native import set_threads

_SIMULATOR = pathlib.Path(__file__).parents[3] / "bench" / "pipeline_simulator.py"


@pytest.fixture(scope="session")
def sim() -> ModuleType:
    """Return the module bench/pipeline_simulator.py."""
    spec = importlib.util.spec_from_file_location("pipeline_simulator", _SIMULATOR)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["pipeline_simulator"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module", params=[1, 3])
def native_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """Let native functions work in one thread, and in several however small the step is."""
    set_threads(request.param, least_items=1)
    yield request.param
    set_threads(1)


@dataclasses.dataclass(frozen=True, slots=True)
class DetectorRun:
    """Reports of the detector: every verdict with the step at which it was made."""

    verdicts: list[tuple[int, Verdict]]

    @property
    def subjects(self) -> set[tuple[str, tuple[int, ...], str]]:
        """All (type, ranks, cause) that were ever named."""
        return {(str(v.subject.type), v.subject.ranks, str(v.cause)) for _, v in self.verdicts}

    def first_step(self) -> int:
        return self.verdicts[0][0]

    @property
    def last(self) -> Verdict:
        return self.verdicts[-1][1]


@pytest.fixture
def judge() -> Callable[[JobLayout, Iterable[StepRecords]], DetectorRun]:
    """Run a fresh detector over steps."""

    def run(layout: JobLayout, views: Iterable[StepRecords]) -> DetectorRun:
        detector = Detector(layout)
        return DetectorRun([(view.step, verdict) for view in views for verdict in detector.observe(view)])

    return run


@pytest.fixture
def watch(sim: ModuleType, judge: Callable[..., DetectorRun]) -> Callable[..., DetectorRun]:
    """Simulate a job and judge it: watch(layout, seed, steps, **fields of Job)."""

    def run(layout: JobLayout, *, seed: int = 1, steps: int = 50, **job: Any) -> DetectorRun:
        simulator = sim.Simulator(sim.Job(layout=layout, **{"noise": sim.SHARED_CPU, **job}), seed)
        return judge(layout, simulator.steps(0, steps))

    return run
