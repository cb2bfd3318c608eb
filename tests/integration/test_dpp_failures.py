"""Ranks of real gangs under --use-dpp that are killed or stopped in the middle of transfers.

Every other rank ends by itself with the error of a lost peer, nothing is left, and the next attempt resumes from the
last checkpoint with the losses of a run that nothing disturbed.

A failing case prints its seed; `DPP_FAILURE_SEED=SEED` in front of pytest repeats it.
"""

import dataclasses
import json
import os
import pathlib
import random
import re
import secrets
import signal
from collections.abc import Callable
from typing import Any

import pytest
from failing_rank import MOMENTS, Failure
from launchers import Gang, alive, wait_until

from megatronapp_common.names import ExitCode

pytestmark = [pytest.mark.torch, pytest.mark.process, pytest.mark.timeout(600)]
KILLS, STOPS = 50, 20
MICROBATCHES, STEPS, SAVE_INTERVAL = 4, 6, 2
STOP_LIMIT_MINUTES = 0.25
"""Deadline of transfers and collectives where a rank is stopped."""
END_S = 240.0
MODEL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --micro-batch-size 1 "
    f"--global-batch-size {MICROBATCHES} --train-iters {STEPS} --lr 2e-3 --lr-decay-style constant --mock-data "
    "--vocab-size 120 --attention-dropout 0 --hidden-dropout 0 --eval-iters 0 --log-interval 1 --use-dpp"
)
"""Messages of 16 KiB, which threads of the transport copy."""
LAYOUTS = {
    "PP2": (2, "--pipeline-model-parallel-size 2"),
    "VPP2": (2, "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"),
    "PP4": (4, "--pipeline-model-parallel-size 4 --trace"),
    "TP2xPP2": (4, "--pipeline-model-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel"),
}
SCHEDULES = ("auto", "dfc", "static")
LOSS = re.compile(r"iteration +(\d+)/.*lm loss: (\S+) \| grad norm: (\S+)")


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


class FailingGang:
    """One worker with all ranks of a layout, its launcher, and what they leave."""

    def __init__(self, folder: pathlib.Path, python: list[str], layout: str, schedule: str) -> None:
        self.world, self._layout = LAYOUTS[layout]
        folder.mkdir()
        self.gang = Gang(folder, str(self.world), program=f"{' '.join(python[1:])} -m failing_rank")
        self._flags = f"{MODEL} {self._layout} --dpp-schedule {schedule}"
        self._checkpoints = folder / "checkpoints"

    def run(self, attempt: int, flags: str = "", failure: Failure | None = None) -> int:
        """Run the launcher to its end, and return its exit code."""
        saves = f"--save {self._checkpoints} --save-interval {SAVE_INTERVAL} --load {self._checkpoints}"
        self.gang.arguments = f"{self._flags} {saves} {flags}".split()
        environment = {"GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        environment["PYTHONPATH"] = os.pathsep.join(str(SUPPORT / name) for name in ("", "pipeline"))
        if failure is not None:
            environment["RANK_FAILURE"] = json.dumps(dataclasses.asdict(failure))
        self.gang.workers.clear()
        self.gang.start({}, grace_s=8.0, base=environment, ATTEMPT=str(attempt))
        return self.gang.workers[0].end(END_S)

    @property
    def record(self) -> dict[str, Any]:
        return self.gang.workers[0].record()

    def file(self, name: str) -> str | None:
        path = self.gang.workers[0].run_dir / name
        return path.read_text(encoding="utf-8") if path.exists() else None

    def log(self, rank: int) -> str:
        return self.file(f"rank-{rank}.log") or ""

    def losses(self) -> dict[int, tuple[str, str]]:
        """Return loss and gradient norm by iteration, of the newest attempt."""
        logs = [self.log(rank) for rank in range(self.world)]
        return {int(step): (loss, norm) for log in logs for step, loss, norm in LOSS.findall(log)}

    def require_nothing_left(self, attempt: int) -> None:
        """Wait for the end of all processes, and see that no file is in shared memory."""
        pids = [self.file(f"pid-{attempt}-{rank}") for rank in range(self.world)]
        for pid in pids:
            assert pid is not None
            wait_until(lambda pid=pid: not alive(int(pid)))  # type: ignore[misc]
        assert not list(self.gang.shm.iterdir())


SUPPORT = pathlib.Path(__file__).parents[1] / "support"
Undisturbed = Callable[[Case], dict[int, tuple[str, str]]]


@pytest.fixture(scope="module")
def undisturbed(forkserver: Any, tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """Losses of a case's layout without failures, run once each; schedules do not change them."""
    known: dict[str, dict[int, tuple[str, str]]] = {}

    def losses(case: Case) -> dict[int, tuple[str, str]]:
        if case.layout not in known:
            folder = tmp_path_factory.mktemp("undisturbed") / case.layout
            gang = FailingGang(folder, forkserver.python(), case.layout, "static")
            assert gang.run(0) == ExitCode.OK, gang.log(0)
            gang.require_nothing_left(0)
            known[case.layout] = gang.losses()
        return known[case.layout]

    return losses


def check(case: Case, folder: pathlib.Path, python: list[str], expected: dict[int, tuple[str, str]]) -> None:
    """Run a case: the failure, then the attempt that resumes."""
    failure = case.failure
    gang = FailingGang(folder / "gang", python, case.layout, case.schedule)
    stopped = failure.signal == signal.SIGSTOP
    try:
        limit = f"--distributed-timeout-minutes {STOP_LIMIT_MINUTES}" if stopped else ""
        code = gang.run(0, limit, failure)
        reason = ("PeerLost", ExitCode.PEER_LOST) if stopped else ("RankKilled", ExitCode.OWN_FAILURE)
        assert (gang.record["reason"], code) == reason, gang.record
        for rank in set(range(gang.world)) - {failure.rank}:
            assert gang.file(f"code-0-{rank}") == str(int(ExitCode.PEER_LOST)), gang.log(rank)
            assert f"error (rank {rank}): " in gang.log(rank)
        assert gang.file(f"code-0-{failure.rank}") is None
        gang.require_nothing_left(0)
        before = gang.losses()
        assert all(before[step] == expected[step] for step in before)
        saved = failure.step // SAVE_INTERVAL * SAVE_INTERVAL

        assert gang.run(1) == ExitCode.OK, [gang.log(rank) for rank in range(gang.world)]
        gang.require_nothing_left(1)
        assert (f"resumes after step {saved} of " in "".join(map(gang.log, range(gang.world)))) == (saved > 0)
        assert gang.losses() == {step: expected[step] for step in range(saved + 1, STEPS + 1)}
    finally:
        gang.gang.close()


def run_drawn(number: signal.Signals, folder: pathlib.Path, forkserver: Any, undisturbed: Undisturbed) -> None:
    seed = int(os.environ.get("DPP_FAILURE_SEED") or secrets.randbits(32))
    case = draw(seed, number)
    print(f"DPP_FAILURE_SEED={seed}: {case}")
    check(case, folder, forkserver.python(), undisturbed(case))


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
