"""Short ways to write down what a plan is given."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from worker_groups import worker_groups

from megatronapp_operator.plan import (
    Backoff,
    Deletion,
    HubPhase,
    HubState,
    JobSpec,
    JobState,
    Observed,
    Plan,
    Progress,
    RunPolicy,
    Status,
    Worker,
    WorkerOutcome,
    WorkerPhase,
    plan,
)

NOW = 1000.0


@dataclasses.dataclass
class PlanHarness:
    """A job, and what exists of it; `plan` feeds the status back, as a backend does."""

    job: JobState
    observed: Observed = dataclasses.field(default_factory=lambda: Observed(secret=True))
    now: float = NOW

    def plan(self) -> Plan:
        made = plan(self.job, self.observed, self.now)
        self.job = dataclasses.replace(self.job, status=made.status)
        return made

    def status(self, **changes: Any) -> None:
        self.job = dataclasses.replace(self.job, status=dataclasses.replace(self.job.status, **changes))

    def spec(self, **changes: Any) -> None:
        self.job = dataclasses.replace(self.job, spec=dataclasses.replace(self.job.spec, **changes))

    def see(self, *workers: Worker, **others: Any) -> None:
        self.observed = dataclasses.replace(self.observed, workers=workers, **others)


def make_worker(  # noqa: PLR0917
    index: int, phase: str = "Running", code: int | None = None, at: float = NOW, attempt: int = 0, grace: float = -1.0
) -> Worker:
    return Worker(
        index=index,
        attempt=attempt,
        phase=WorkerPhase(phase),
        finished_at=None if code is None else at,
        outcome=None if code is None else WorkerOutcome(code=code, reason="Because", message="words", rank=index * 2),
        deletion=None if grace < 0 else Deletion(since=NOW, grace_s=grace),
    )


@pytest.fixture
def worker() -> Callable[..., Worker]:
    return make_worker


@pytest.fixture
def plan_harness() -> Callable[..., PlanHarness]:
    """A job of two workers without a hub; keywords are fields of the run policy."""

    def make(**policy: Any) -> PlanHarness:
        limits = RunPolicy(backoff=Backoff(initial_s=10, max_s=40, factor=2), **policy)
        return PlanHarness(
            JobState(
                spec=JobSpec(name="job", uid="u", worker_groups=worker_groups(2), hub=False, policy=limits),
                status=Status(),
            )
        )

    return make


@pytest.fixture
def running(plan_harness: Callable[..., PlanHarness], worker: Callable[..., Worker]) -> Callable[..., PlanHarness]:
    """The same with both workers running, and training."""

    def make(**policy: Any) -> PlanHarness:
        made = plan_harness(**policy)
        made.plan()
        made.see(worker(0), worker(1), progress=Progress(attempt=0, iteration=0))
        made.plan()
        return made

    return make


@pytest.fixture
def ready_hub() -> HubState:
    return HubState(phase=HubPhase.READY)
