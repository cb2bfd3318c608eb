"""Gangs of real ranks of which one is killed or stopped in the middle of transfers, and what they leave."""

import dataclasses
import json
import os
import pathlib
import re
import signal
from typing import Any

from failing_rank import Failure
from launchers import Gang, alive, wait_until

from megatronapp_common.names import ExitCode

MICROBATCHES, STEPS, SAVE_INTERVAL = 4, 6, 2
STOP_LIMIT_MINUTES = 0.25
"""Deadline of transfers and collectives where a rank is stopped."""
END_S = 240.0
STOPPED_GRACE_S = 8.0
"""Seconds after which a stopped rank is killed, which cannot end by itself."""
MODEL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --micro-batch-size 1 "
    f"--global-batch-size {MICROBATCHES} --train-iters {STEPS} --lr 2e-3 --lr-decay-style constant --mock-data "
    "--vocab-size 120 --attention-dropout 0 --hidden-dropout 0 --eval-iters 0 --log-interval 1"
)
"""Messages of 16 KiB, which threads of the transport copy."""
LOSS = re.compile(r"iteration +(\d+)/.*lm loss: (\S+) \| grad norm: (\S+)")
SUPPORT = pathlib.Path(__file__).parents[1]
Losses = dict[int, tuple[str, str]]
"""Loss and gradient norm by iteration."""


class FailingGang:
    """One worker with all ranks of a layout, its launcher, and what they leave.

    `apart`: the ranks share no memory, so that their messages take UCX.
    """

    def __init__(self, folder: pathlib.Path, python: list[str], world: int, flags: str, *, apart: bool = False) -> None:
        self.world = world
        self._apart = apart
        folder.mkdir()
        self.gang = Gang(folder, str(self.world), program=f"{' '.join(python[1:])} -m failing_rank")
        self._flags = f"{MODEL} {flags}"
        self._checkpoints = folder / "checkpoints"

    def run(self, attempt: int, flags: str = "", failure: Failure | None = None) -> int:
        """Run the launcher to its end, and return its exit code."""
        is_stopped = failure is not None and failure.signal == signal.SIGSTOP
        grace_s = STOPPED_GRACE_S if is_stopped else END_S
        saves = f"--save {self._checkpoints} --save-interval {SAVE_INTERVAL} --load {self._checkpoints}"
        self.gang.arguments = f"{self._flags} {saves} {flags}".split()
        environment = {"GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        environment["PYTHONPATH"] = os.pathsep.join(str(SUPPORT / name) for name in ("", "pipeline"))
        if self._apart:
            environment["RANKS_APART"] = "1"
        if failure is not None:
            environment["RANK_FAILURE"] = json.dumps(dataclasses.asdict(failure))
        self.gang.workers.clear()
        own = [{"INTERFACE": "lo"}] if self._apart else ()
        self.gang.start({}, grace_s=grace_s, base=environment, each=own, ATTEMPT=str(attempt))
        return self.gang.workers[0].end(END_S)

    @property
    def record(self) -> dict[str, Any]:
        return self.gang.workers[0].record()

    def file(self, name: str) -> str | None:
        path = self.gang.workers[0].run_dir / name
        return path.read_text(encoding="utf-8") if path.exists() else None

    def log(self, rank: int) -> str:
        return self.file(f"rank-{rank}.log") or ""

    def losses(self) -> Losses:
        """Return loss and gradient norm by iteration, of the newest attempt."""
        logs = [self.log(rank) for rank in range(self.world)]
        return {int(step): (loss, norm) for log in logs for step, loss, norm in LOSS.findall(log)}

    def require_nothing_left(self, attempt: int) -> None:
        """Wait for the end of all processes, and see that no file is in shared memory."""
        pids = [self.file(f"pid-{attempt}-{rank}") for rank in range(self.world)]
        for pid in pids:
            assert pid is not None
            wait_until(lambda pid=pid: not alive(int(pid)))  # type: ignore[misc]
        left = [path.name for path in self.gang.shm.rglob("*") if not path.is_dir()]
        if self._apart:  # the launcher removes the pages of ranks in its own directory alone
            left = [name for name in left if ".transport." in name]
        assert left == []


def check_failure(gang: FailingGang, failure: Failure, expected: Losses) -> None:
    """Run a gang with the failure, then the attempt that resumes; `expected`: losses of a gang without failures."""
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
