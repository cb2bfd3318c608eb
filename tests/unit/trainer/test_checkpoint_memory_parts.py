"""Files of checkpoints in memory, the choice of the step to resume from, and settings that cannot work."""

import os
import pathlib
import resource
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import small_training
from hypothesis import given
from hypothesis import strategies as st

from megatronapp_trainer.checkpoint.memory.selection import (
    Stored,
    Transfer,
    copy_holders,
    describe_ranks,
    generations,
    ranks_with_useless_copies,
    transfers,
    without,
)
from megatronapp_trainer.config import parse
from megatronapp_trainer.errors import UsageError

pytestmark = [pytest.mark.torch, pytest.mark.timeout(600)]

FLAGS = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 1 --lr 2e-3 "
    "--global-batch-size 2 --mock-data --train-iters 100 --vocab-size 60 --eval-iters 0 "
    "--non-persistent-save-interval 2"
)


def test_copies_are_at_distances_of_the_jump() -> None:
    assert copy_holders(1, 8, jump=2, factor=3) == (3, 5)
    assert copy_holders(7, 8, jump=4, factor=2) == (3,)
    assert copy_holders(0, 4, jump=4, factor=2) == ()


def test_a_copy_on_its_own_worker_is_useless() -> None:
    pairs = ["w0", "w0", "w1", "w1", "w2", "w2"]
    assert ranks_with_useless_copies(pairs, jump=2, factor=3) == []
    assert ranks_with_useless_copies(pairs, jump=1, factor=2) == [0, 2, 4]
    assert ranks_with_useless_copies(["w0"] * 4 + ["w1"] * 2, jump=4, factor=2) == [2, 3]


SAVES = st.lists(st.tuples(st.integers(1, 3), st.sampled_from("ab")), min_size=1, max_size=4, unique=True)


@given(
    saves=SAVES,
    ranks_of_worker=st.integers(1, 3),
    workers=st.integers(1, 4),
    data=st.data(),
)
def test_a_rank_gets_the_part_of_the_save_that_all_take(
    saves: list[tuple[int, str]], ranks_of_worker: int, workers: int, data: st.DataObject
) -> None:
    """The newest save without a missing part is the one that a plain search finds; senders have what they send."""
    names = [f"w{rank // ranks_of_worker}" for rank in range(workers * ranks_of_worker)]
    every = [(step, save, rank) for step, save in saves for rank in range(len(names))]
    stored: dict[str, set[Stored]] = {
        name: set(data.draw(st.lists(st.sampled_from(every), unique=True))) for name in dict.fromkeys(names)
    }
    there = set().union(*stored.values())
    whole = [save for save in saves if all((*save, rank) in there for rank in range(len(names)))]
    found = generations(stored, len(names))
    assert [(entry.step, entry.save) for entry in found] == sorted({entry[:2] for entry in there}, reverse=True)
    assert [(entry.step, entry.save) for entry in found if not entry.missing] == sorted(whole, reverse=True)
    for entry in found:
        assert entry.missing == tuple(rank for rank in range(len(names)) if (entry.step, entry.save, rank) not in there)
        for transfer in transfers(entry, names):
            part = (entry.step, entry.save, transfer.receiver)
            assert part in stored[names[transfer.sender]]
            assert part not in stored[names[transfer.receiver]]


def test_a_damaged_part_is_taken_from_elsewhere_or_is_missing() -> None:
    stored = {"w0": {(4, "a", 0), (4, "a", 1)}, "w1": {(4, "a", 0), (4, "a", 1)}}
    (save,) = generations(stored, 2)
    assert transfers(save, ["w0", "w1"]) == []
    damaged = without(save, {("w0", 0)})
    assert transfers(damaged, ["w0", "w1"]) == [Transfer(sender=1, receiver=0)]
    assert without(save, {("w0", 0), ("w1", 0)}).missing == (0,)


def test_ranks_are_described_shortly() -> None:
    assert describe_ranks([3]) == "rank 3"
    assert describe_ranks([0, 1]) == "ranks 0, 1"
    assert describe_ranks(range(20)) == "ranks 0, 1, 2, 3, 4, 5, 6, 7, ..."


def written_part(folder: pathlib.Path) -> tuple[Any, pathlib.Path]:
    """A whole file of 5000 bytes of state, in a slot for 9000."""
    import torch

    from megatronapp_trainer.checkpoint.memory.parts import MappedPart, PartHeader, file_bytes, part_name

    part = MappedPart.create(folder / "draft", file_bytes(9000))
    part.content[:5000] = torch.arange(5000, dtype=torch.uint8)
    header = PartHeader(
        step=7,
        save="ab",
        rank=1,
        world=2,
        flags="f",
        payload_bytes=5000,
        objects=(4000, 1000),
        checksum=part.checksum(5000),
    )
    part.write_header(header, 9000)
    part.rename(folder / f"p.{part_name(header)}")
    part.close()
    return header, part.path


def read_parts(folder: str) -> list[str]:
    """Return what is wrong with files that are not whole, after what must hold of those that are."""
    from megatronapp_trainer.checkpoint.memory.parts import BrokenPartError, MappedPart, parts_of, read_header

    header, path = written_part(pathlib.Path(folder))
    assert parts_of(path.parent, "p") == [path]
    assert read_header(path) == header
    part = MappedPart.open(path)
    assert part.checksum(5000) == header.checksum
    part.content[4999] ^= 1
    assert part.checksum(5000) != header.checksum
    part.close()
    found = []

    def refusal(change: Callable[[], None]) -> None:
        written_part(path.parent)
        change()
        try:
            read_header(path)
        except BrokenPartError as error:
            found.append(str(error))
        else:
            found.append("")

    def rewrite() -> None:
        path.write_bytes(path.read_bytes().replace(b'"step": 7', b'"step": 8'))

    def erase() -> None:
        slot = MappedPart.open(path)
        slot.erase_header()
        slot.close()

    refusal(lambda: os.truncate(path, path.stat().st_size - 1))
    refusal(lambda: os.truncate(path, path.stat().st_size + 1))
    refusal(lambda: os.truncate(path, 3))
    refusal(rewrite)
    refusal(erase)
    return found


def test_a_part_that_is_not_whole_is_refused(run_ranks: Callable[..., list[Any]], tmp_path: pathlib.Path) -> None:
    """Shorter or longer by a byte, a stub, of another step, and one that is being written again."""
    shorter, longer, stub, other, erased = run_ranks(1, read_parts, str(tmp_path))[0]
    assert shorter == longer == erased == "it is shorter or longer than it was written"
    assert stub.startswith("it cannot be read")
    assert other == "its header is damaged"


def free_by_blocks() -> list[int]:
    """Return the free bytes of a file system without a limit, and of one with a free block."""
    from megatronapp_trainer.checkpoint.memory.place import free_bytes

    found = []
    for blocks in (0, 1):
        space = mock.Mock(f_blocks=blocks, f_bavail=blocks, f_frsize=4096)
        with mock.patch.object(os, "statvfs", lambda _path, space=space: space):
            found.append(free_bytes(pathlib.Path("/")))
    return found


def test_a_file_system_in_memory_may_have_no_limit(run_ranks: Callable[..., list[Any]]) -> None:
    """Such a file system has 0 blocks, and none of them is free."""
    ((unlimited, limited),) = run_ranks(1, free_by_blocks)
    assert limited == 4096
    assert unlimited > limited


@pytest.mark.parametrize(
    ("flags", "answer"),
    [
        ("--non-persistent-save-interval 5", "--non-persistent-save-interval needs --save DIRECTORY"),
        ("--replication", "--replication needs --non-persistent-save-interval STEPS"),
        ("--replication-jump 2", "--replication-jump needs --replication"),
        ("--replication-factor 3", "--replication-factor needs --replication"),
        ("--non-persistent-ckpt-type global", "argument --non-persistent-ckpt-type: invalid choice: 'global'"),
        ("--non-persistent-local-ckpt-algo fully_parallel", "argument --non-persistent-local-ckpt-algo: invalid"),
        ("--save d --non-persistent-save-interval 0", "--non-persistent-save-interval 0 must be 1 or more"),
        ("--save d --non-persistent-save-interval 5 --no-save-rng", "leave --no-save-rng out"),
    ],
)
def test_flags_that_do_not_fit_are_refused(flags: str, answer: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse([*FLAGS.removesuffix("--non-persistent-save-interval 2").split(), *flags.split()])
    assert answer in str(caught.value)


def test_megafbd_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match="--non-persistent-save-interval does not work with MegaFBD"):
        parse([*FLAGS.split(), "--save", "d", "--forward-backward-disaggregating"])


def refused_settings(folder: str) -> list[str]:
    """Why these settings cannot work: too little memory, twice, and copies on the same worker or on too few."""
    from megatronapp_common.names import Env
    from megatronapp_trainer.checkpoint.manager import CheckpointManager
    from megatronapp_trainer.checkpoint.memory import saves
    from megatronapp_trainer.errors import TrainerError

    os.environ |= {Env.WORKER_INDEX: os.environ["RANK"], Env.SHM_DIR: folder, Env.JOB_UID: "uid"}
    found = []

    def refusal(flags: str) -> None:
        run = small_training.prepare(f"{FLAGS} --save {folder}/save {flags}")
        try:
            CheckpointManager(run.config, run.layout).load(run.state)
        except TrainerError as error:
            found.append(f"{type(error).__name__}: {error}")

    with mock.patch.object(saves, "free_bytes", lambda _directory: 1 << 20):
        refusal("--replication")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
    refusal("--replication")
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    refusal("--replication --replication-jump 2")
    refusal("--replication --replication-factor 3")
    refusal(f"--non-persistent-local-ckpt-dir {folder}/missing")
    return [*found, *sorted(path.name for path in pathlib.Path(folder).glob("*memory*"))]


def test_settings_that_cannot_work_are_refused_before_the_start(
    run_ranks: Callable[..., list[Any]], tmp_path: pathlib.Path
) -> None:
    free, limited, jump, factor, directory = run_ranks(2, refused_settings, str(tmp_path))[0]
    assert free.startswith("UsageError: --non-persistent-save-interval: two saves of the state of rank 0, and of each")
    assert free.endswith("or leave the flag (checkpoint.memorySaveInterval) out")
    assert f"{tmp_path} has 1024KiB free, and " in free and "(spec.shm.sizeLimit" in free
    assert f"{tmp_path} has less (File too large)" in limited
    assert jump.startswith("UsageError: --replication-jump 2: copies of the state of rank 0 would not all be on other")
    assert "give --replication-jump 1, or a multiple" in jump
    assert factor.startswith(
        "UsageError: --replication stores each state on 3 workers (--replication-factor), and the job"
    )
    assert factor.endswith("has 2; give --replication-factor 2, or start more workers")
    assert f"files in {tmp_path}/missing, which is no directory" in directory
