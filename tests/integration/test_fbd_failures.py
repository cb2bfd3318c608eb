"""Forward and backward ranks of real gangs that are killed or stopped in the middle of transfers.

Every other rank ends by itself with the error of a lost peer, nothing is left, and the next attempt resumes from the
last checkpoint with the losses of plain training.

A failing case prints its seed; `FBD_FAILURE_SEED=SEED` in front of pytest repeats it.
"""

import functools
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
KILLS, STOPS = 20, 8
SWITCH = "--forward-backward-disaggregating"
LAYOUTS = {
    "pair": (2, ""),
    "PP2": (4, "--pipeline-model-parallel-size 2"),
    "one-forward-for-two": (3, "--fbd-backward-per-forward 2 --use-distributed-optimizer"),
}


APART = "-apart"
"""End of the name of a layout whose ranks share no memory: their messages take UCX."""


PlainLosses = Callable[[str], Losses]


@pytest.fixture(scope="module")
def plain_losses(forkserver: Any, tmp_path_factory: pytest.TempPathFactory) -> PlainLosses:
    """Losses of plain training in a layout that nothing disturbs, once for each layout."""

    @functools.cache
    def losses(layout: str) -> Losses:
        world, flags = LAYOUTS[layout]
        plain = 2 if world == 3 else world // 2
        folder = tmp_path_factory.mktemp("plain") / "gang"
        gang = FailingGang(folder, forkserver.python(), plain, flags.replace("--fbd-backward-per-forward 2", ""))
        try:
            assert gang.run(0) == ExitCode.OK, gang.log(0)
            return gang.losses()
        finally:
            gang.gang.close()

    return losses


def check(failure: Failure, layout: str, folder: pathlib.Path, python: list[str], plain: PlainLosses) -> None:
    world, flags = LAYOUTS[layout.removesuffix(APART)]
    expected = plain(layout.removesuffix(APART))
    gang = FailingGang(folder / "gang", python, world, f"{flags} {SWITCH}", apart=layout.endswith(APART))
    check_failure(gang, failure, expected)


def check_drawn(number: signal.Signals, folder: pathlib.Path, python: list[str], plain: PlainLosses) -> None:
    seed = int(os.environ.get("FBD_FAILURE_SEED") or secrets.randbits(32))
    choice = random.Random(seed)
    layout = choice.choice(list(LAYOUTS))
    rank = choice.randrange(LAYOUTS[layout][0])
    place = choice.choice(("", APART))
    sends = layout != "one-forward-for-two" or rank != 1  # the second backward rank of a forward rank only receives
    failure = Failure(
        rank=rank,
        step=choice.randrange(STEPS),
        transfer=1 + choice.randrange(MICROBATCHES),
        moment=choice.choice(MOMENTS) if sends else "received",
        signal=number,
    )
    print(f"FBD_FAILURE_SEED={seed}: {layout}{place} {failure}")
    check(failure, layout + place, folder, python, plain)


@pytest.mark.full("a forward rank that shares memory", but=("forward-apart",))
@pytest.mark.parametrize(
    ("rank", "layout"),
    [(0, "pair"), (1, "pair"), (1, f"pair{APART}")],
    ids=["backward", "forward", "forward-apart"],
)
def test_a_killed_rank_of_each_role_ends_its_gang_which_resumes(
    forkserver: Any, tmp_path: pathlib.Path, plain_losses: PlainLosses, rank: int, layout: str
) -> None:
    failure = Failure(rank=rank, step=3, transfer=2, moment="received", signal=signal.SIGKILL)
    check(failure, layout, tmp_path, forkserver.python(), plain_losses)


@pytest.mark.full("gangs that wait for a deadline")
@pytest.mark.parametrize("rank", [0, 1], ids=["backward", "forward"])
def test_a_stopped_rank_ends_its_gang_across_nodes(
    forkserver: Any, tmp_path: pathlib.Path, plain_losses: PlainLosses, rank: int
) -> None:
    failure = Failure(rank=rank, step=3, transfer=2, moment="received", signal=signal.SIGSTOP)
    check(failure, f"pair{APART}", tmp_path, forkserver.python(), plain_losses)


@pytest.mark.full("20 gangs and their next attempts")
@pytest.mark.parametrize("index", range(KILLS))
def test_a_drawn_killed_rank_ends_its_gang_which_resumes(
    forkserver: Any, tmp_path: pathlib.Path, plain_losses: PlainLosses, index: int
) -> None:
    del index
    check_drawn(signal.SIGKILL, tmp_path, forkserver.python(), plain_losses)


@pytest.mark.full("8 gangs that wait for a deadline")
@pytest.mark.parametrize("index", range(STOPS))
def test_a_stopped_rank_ends_its_gang_which_resumes(
    forkserver: Any, tmp_path: pathlib.Path, plain_losses: PlainLosses, index: int
) -> None:
    del index
    check_drawn(signal.SIGSTOP, tmp_path, forkserver.python(), plain_losses)
