"""One process of a real job is killed or stopped: one case of each main kind; `bench/bench_kill.py` runs many.

The first four cases share a job, as they leave it healthy; the last one ends it.
"""

import pathlib
from collections.abc import Iterator

import pytest
from chaos import KILL, STOP, Chaos, ChaosCase
from chaos_job import Cli

pytestmark = [
    pytest.mark.process,
    pytest.mark.timeout(900),
    pytest.mark.full("kills of processes of a real job: a minute; of stand-ins in test_process_kills"),
]

CASES = [
    ChaosCase(role="agent", number=KILL, after_s=0.3, pick=0.6),
    ChaosCase(role="hub", number=KILL, after_s=0.7),
    ChaosCase(role="rank", number=STOP, after_s=0.2, pick=0.3),
    ChaosCase(role="rank", number=KILL, after_s=0.5, pick=0.8),
    ChaosCase(role="backend", number=KILL, after_s=0.1),
]


@pytest.fixture(scope="module")
def chaos(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chaos]:
    made = Chaos(Cli(pathlib.Path(tmp_path_factory.mktemp("kill"))), cases_per_job=len(CASES))
    yield made
    if made.job is not None:
        made.job.wipe()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.kind)
def test_what_must_hold_holds(chaos: Chaos, case: ChaosCase) -> None:
    chaos.run(case)


def test_nothing_is_left_after_delete(chaos: Chaos) -> None:
    """A stopped rank does not hold it up."""
    chaos.run(ChaosCase(role="rank", number=STOP, pick=0.5, leave=True))
    assert chaos.job is None
