"""Ranks of real gangs under --use-dpp that are killed or stopped in the middle of transfers.

Every other rank ends by itself with the error of a lost peer, nothing is left, and the next attempt resumes from the
last checkpoint with the losses of a run that nothing disturbed.

A failing case prints its seed; `DPP_FAILURE_SEED=SEED` in front of pytest repeats it.
"""

import dataclasses
import os
import pathlib
import random
import secrets
import signal
from collections.abc import Callable
from typing import Any

import pytest
from failing_gang import MICROBATCHES, STEPS, FailingGang, Losses, check_failure
from failing_rank import MOMENTS, Failure

from megatronapp_common.names import ExitCode

pytestmark = [pytest.mark.torch, pytest.mark.process, pytest.mark.timeout(600)]
KILLS, STOPS = 50, 20
LAYOUTS = {
    "PP2": (2, "--pipeline-model-parallel-size 2"),
    "VPP2": (2, "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"),
    "PP4": (4, "--pipeline-model-parallel-size 4 --trace"),
    "TP2xPP2": (4, "--pipeline-model-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel"),
}
SCHEDULES = ("auto", "dfc", "static")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A gang and the failure of one of its ranks."""

    layout: str
    schedule: str
    failure: Failure


def draw(seed: int, number: signal.Signals) -> Case:
    """Return the case of a seed. Each rank sends and receives at least as many messages as there are microbatches."""
    choice = random.Random(seed)
    layout = choice.choice(list(LAYOUTS))
    failure = Failure(
        rank=choice.randrange(LAYOUTS[layout][0]),
        step=choice.randrange(STEPS),
        transfer=1 + choice.randrange(MICROBATCHES),
        moment=choice.choice(MOMENTS),
        signal=number,
    )
    return Case(layout=layout, schedule=choice.choice(SCHEDULES), failure=failure)


Undisturbed = Callable[[Case], Losses]


def gang_of(case: Case, folder: pathlib.Path, python: list[str], schedule: str) -> FailingGang:
    world, layout = LAYOUTS[case.layout]
    return FailingGang(folder, python, world, f"{layout} --use-dpp --dpp-schedule {schedule}")


@pytest.fixture(scope="module")
def undisturbed(forkserver: Any, tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """Losses of a case's layout without failures, run once each; schedules do not change them."""
    known: dict[str, Losses] = {}

    def losses(case: Case) -> Losses:
        if case.layout not in known:
            folder = tmp_path_factory.mktemp("undisturbed") / case.layout
            gang = gang_of(case, folder, forkserver.python(), "static")
            assert gang.run(0) == ExitCode.OK, gang.log(0)
            gang.require_nothing_left(0)
            known[case.layout] = gang.losses()
        return known[case.layout]

    return losses


def run_drawn(number: signal.Signals, folder: pathlib.Path, forkserver: Any, undisturbed: Undisturbed) -> None:
    seed = int(os.environ.get("DPP_FAILURE_SEED") or secrets.randbits(32))
    case = draw(seed, number)
    print(f"DPP_FAILURE_SEED={seed}: {case}")
    check_failure(gang_of(case, folder / "gang", forkserver.python(), case.schedule), case.failure, undisturbed(case))


@pytest.mark.full("50 gangs and their next attempts; test_dynamic_schedules kills a rank")
@pytest.mark.parametrize("index", range(KILLS))
def test_a_killed_rank_ends_its_gang_which_resumes(
    forkserver: Any, tmp_path: pathlib.Path, undisturbed: Undisturbed, index: int
) -> None:
    del index
    run_drawn(signal.SIGKILL, tmp_path, forkserver, undisturbed)


@pytest.mark.full("20 gangs that wait for a deadline; test_dynamic_schedules kills and stops a rank")
@pytest.mark.parametrize("index", range(STOPS))
def test_a_stopped_rank_ends_its_gang_which_resumes(
    forkserver: Any, tmp_path: pathlib.Path, undisturbed: Undisturbed, index: int
) -> None:
    del index
    run_drawn(signal.SIGSTOP, tmp_path, forkserver, undisturbed)
