"""The entry in fresh processes: asked to stop, losing a peer, resuming."""

import contextlib
import itertools
import os
import pathlib
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from megatronapp_common.names import Env, ExitCode
from megatronapp_common.shared_documents import DocumentReader
from megatronapp_trainer.checkpoint.directory import CheckpointDirectory, OwnershipClaim
from megatronapp_trainer.launch.config.address import reserved_port

pytestmark = pytest.mark.torch

FLAGS = (
    "--pipeline-model-parallel-size 2 --num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 "
    "--micro-batch-size 1 --global-batch-size 4 --train-iters 100000 --lr 2e-3 --mock-data --vocab-size 100 "
    "--log-interval 1 --eval-iters 0"
)
LIMIT_S = 600

Start = Callable[..., list["subprocess.Popen[str]"]]


@pytest.fixture
def start(tmp_path: pathlib.Path) -> Iterator[Start]:
    """Start two ranks; rank 1 reports on its stdout. Remaining ranks are killed."""
    started: list[subprocess.Popen[str]] = []

    def ranks(flags: str) -> list[subprocess.Popen[str]]:
        port = ports.enter_context(reserved_port("127.0.0.1"))
        shared = {
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "CUDA_VISIBLE_DEVICES": "",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "WORLD_SIZE": "2",
            Env.SHM_DIR: str(tmp_path),
            Env.SHM_PREFIX: "test",
        }
        for rank in range(2):
            started.append(
                subprocess.Popen(
                    [sys.executable, "-m", "megatronapp_trainer.pretrain", *flags.split()],
                    env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        return started[-2:]

    with contextlib.ExitStack() as ports:
        yield ranks
        for process in started:
            process.kill()
            process.communicate()


def meeting_at_a_taken_port() -> tuple[int, str]:
    """Return the exit code and the message of a rank 0 whose port belongs to another process."""
    import io
    import warnings

    from megatronapp_trainer.pretrain import main

    warnings.simplefilter("ignore")
    with socket.socket() as taken, contextlib.redirect_stderr(io.StringIO()) as errors:
        taken.bind(("", 0))
        taken.listen()
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(taken.getsockname()[1]))
        return main(FLAGS.replace("--pipeline-model-parallel-size 2", "").split()), errors.getvalue()


def test_a_port_in_use_is_not_a_lost_peer(run_ranks: Callable[..., list[tuple[int, str]]]) -> None:
    ((code, errors),) = run_ranks(1, meeting_at_a_taken_port)
    assert code == ExitCode.RENDEZVOUS
    assert "is in use, so that rank 0 cannot listen there" in errors


def wait_for_steps(process: "subprocess.Popen[str]", steps: int) -> None:
    assert process.stdout is not None
    for _ in range(steps):
        assert "iteration" in process.stdout.readline()


@pytest.mark.full("four processes of torch; test_preemption stops a gang, test_trainer_sigterm resumes")
def test_sigterm_saves_and_a_new_start_continues(start: Start, tmp_path: pathlib.Path) -> None:
    flags = f"{FLAGS} --save {tmp_path / 'checkpoints'}"
    ranks = start(flags)
    wait_for_steps(ranks[1], 3)
    ranks[0].send_signal(signal.SIGTERM)
    for rank in ranks:
        _, errors = rank.communicate(timeout=LIMIT_S)
        assert rank.returncode == ExitCode.PREEMPTED, errors
    page = DocumentReader(tmp_path / "test.progress").read()
    assert page is not None
    done = page["iteration"]
    assert done >= 3
    again = start(f"{flags} --exit-interval {done + 2}")
    output, errors = again[1].communicate(timeout=LIMIT_S)
    assert again[1].returncode == ExitCode.OK, errors
    announced, *lines = output.splitlines()
    assert announced.startswith(f"resumes after step {done} of ")
    assert [int(line.split("iteration")[1].split("/")[0]) for line in lines] == [done + 1, done + 2]


def superseded_while_training(folder: str) -> tuple[int, str]:
    """Return the exit code and the message of a rank that is stopped when the folder belongs to another attempt."""
    import io
    import warnings

    from megatronapp_trainer.pipeline.megatron_schedules import StaticSchedule
    from megatronapp_trainer.pretrain import main

    warnings.simplefilter("ignore")
    train, steps = StaticSchedule.train, itertools.count(1)

    def stopping(*arguments: Any, **options: Any) -> Any:
        if next(steps) == 2 and os.environ["RANK"] == "0":
            CheckpointDirectory(pathlib.Path(folder)).claim(OwnershipClaim(uid="", attempt=1))
            os.kill(os.getpid(), signal.SIGTERM)
        return train(*arguments, **options)

    StaticSchedule.train = stopping  # type: ignore[method-assign]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as errors:
        return main([*FLAGS.split(), "--save", folder]), errors.getvalue()


def test_ranks_of_a_superseded_attempt_write_nothing_and_report_it(
    run_ranks: Callable[..., list[tuple[int, str]]], tmp_path: pathlib.Path
) -> None:
    for code, errors in run_ranks(2, superseded_while_training, str(tmp_path / "checkpoints")):
        assert code == ExitCode.SUPERSEDED, errors
        assert "now belongs to attempt 1" in errors
    assert not list((tmp_path / "checkpoints").glob("iter_*"))


def killed_while_training() -> tuple[int, str]:
    """Return the exit code and the message of a rank 1 whose peer is killed in its second step, and of a waiting
    parent in place of the peer."""
    import io
    import warnings

    from megatronapp_trainer.pipeline.megatron_schedules import StaticSchedule
    from megatronapp_trainer.pretrain import main

    warnings.simplefilter("ignore")
    train, steps = StaticSchedule.train, itertools.count(1)

    def dying(*arguments: Any, **options: Any) -> Any:
        if next(steps) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return train(*arguments, **options)

    if os.environ["RANK"] == "0":
        if peer := os.fork():
            return os.waitpid(peer, 0)[1], ""
        StaticSchedule.train = dying  # type: ignore[method-assign]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as errors:
        return main(FLAGS.split()), errors.getvalue()


def test_a_rank_that_loses_its_peer_reports_it(run_ranks: Callable[..., list[tuple[int, str]]]) -> None:
    (status, _), (code, errors) = run_ranks(2, killed_while_training)
    assert os.WTERMSIG(status) == signal.SIGKILL
    assert code == ExitCode.PEER_LOST
    assert "error (rank 1): a peer was lost" in errors
