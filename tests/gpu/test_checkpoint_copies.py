"""Copies of a checkpoint by way of the device: of the step at which they began, also without room for a snapshot."""

import io
import os
import pathlib
import tempfile
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import small_training
from device_training import MODEL

RunRanks = Callable[..., list[Any]]


def copy_and_change(case: str) -> dict[str, Any]:
    """Begin a copy, change the tensors after `before_change`, and return what the host has."""
    import torch

    from megatronapp_trainer.checkpoint.saving import device_snapshot, host_copy

    torch.cuda.set_device(0)
    generator = torch.Generator(device="cuda").manual_seed(1)
    large = torch.randn(50_000_000, device="cuda", generator=generator)
    tensors = [large, large[:7].bfloat16(), torch.tensor(3, device="cuda"), large[:12].view(3, 4).t(), torch.ones(5)]
    if case == "less":
        del tensors[3]  # whose copy to the host takes memory for a moment
    expected = [tensor.clone().cpu() for tensor in tensors]
    if case == "none":
        device_snapshot.fits = lambda *_, **__: False
    if case == "less":  # than there seems to be
        device_snapshot.fits = lambda *_, **__: True
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(0.0001)
    torch.cuda.synchronize()
    copies = host_copy.HostCopies(device_snapshot.SnapshotMemory())
    places, size_bytes = host_copy.places_of(tensors)
    copies.reserve(size_bytes)
    rounds = []
    for _ in range(2):
        copies.begin(tensors, places)
        copies.before_change()
        for tensor in tensors[:-1]:
            tensor.zero_()
        copies.wait()
        assert copies.done()
        memory = copies._memory
        assert memory is not None
        rounds.append(
            all(
                torch.equal(host_copy.tensor_at(memory, place), values)
                for place, values in zip(places, expected, strict=True)
            )
        )
        for tensor, values in zip(tensors, expected, strict=True):
            tensor.copy_(values)
    return {"equal": rounds, "kind": type(copies._copy).__name__}


@pytest.mark.parametrize(
    ("case", "kind"), [("there", "SnapshotCopy"), ("none", "_StreamCopy"), ("less", "_StreamCopy")]
)
def test_the_host_has_the_tensors_of_before_the_change(run_ranks: RunRanks, case: str, kind: str) -> None:
    (found,) = run_ranks(1, copy_and_change, case)
    assert found == {"equal": [True, True], "kind": kind}


def save_both_ways(folder: str, memory_folder: str, flags: str) -> list[str]:
    """Save step 3 at once, in the background and in memory, while training continues; return the kinds of copies."""
    from megatronapp_common.names import Env
    from megatronapp_trainer.checkpoint.manager import CheckpointManager
    from megatronapp_trainer.config import parse

    os.environ |= {Env.WORKER_INDEX: "0", Env.SHM_DIR: memory_folder, Env.JOB_UID: "uid"}
    options = f"{MODEL} --train-iters 100000 {flags}"
    memory = "--non-persistent-save-interval 1000000"
    run = small_training.prepare(f"{options} --save {folder}/async --async-save {memory}")
    manager = CheckpointManager(run.config, run.layout)
    manager.load(run.state)
    at_once = CheckpointManager(parse(f"{options} --save {folder}/sync".split()), run.layout)
    trainer = small_training.trainer_of(run, checkpoints=manager)
    while run.state.iteration < 3:
        trainer._at_boundary(trainer.step())
    at_once.save(run.state)
    trainer._save()
    trainer._save_in_memory()
    background, saves = manager.background, manager.memory.saves  # type: ignore[union-attr]
    assert background is not None
    while background.pending is not None or saves.report.iteration != 3:
        trainer._at_boundary(trainer.step())
    kinds = [type(copy).__name__ for copy in (background._copies._copy, saves._running.copy)]  # type: ignore[union-attr]
    manager.close()
    return kinds


def differences(first: str, second: str) -> list[str]:
    """Return the names of tensors and objects that are not the same, to the last bit, in two checkpoints."""
    import torch
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    warnings.simplefilter("ignore")
    found: list[dict[str, Any]] = [{}, {}]
    for contents, folder in zip(found, (first, second), strict=True):
        planner = _EmptyStateDictLoadPlanner()  # type: ignore[no-untyped-call] # torch's own gap
        _load_state_dict(contents, storage_reader=FileSystemReader(folder), planner=planner, no_dist=True)
    pickled: list[dict[str, bytes]] = [{}, {}]
    for into, contents in zip(pickled, found, strict=True):
        for name, value in contents.items():
            stream = io.BytesIO()
            torch.save(value.clone() if isinstance(value, torch.Tensor) else value, stream)
            into[name] = stream.getvalue()
    assert len(pickled[0]) > 40, "weights and the state of the optimizer"
    return sorted(name for name in pickled[0] | pickled[1] if pickled[0].get(name) != pickled[1].get(name))


@pytest.mark.parametrize(
    ("memory_folder", "flags"),
    [
        ("/dev/shm", "--bf16"),
        ("/dev/shm", "--bf16 --use-distributed-optimizer"),
        ("/dev/shm", ""),
        (None, "--bf16"),  # may be on a disk, whose memory CUDA does not pin
    ],
)
def test_checkpoints_are_those_of_a_save_at_once(
    run_ranks: RunRanks, tmp_path: pathlib.Path, memory_folder: str | None, flags: str
) -> None:
    with tempfile.TemporaryDirectory(dir=memory_folder) as memory:
        assert run_ranks(1, save_both_ways, str(tmp_path), memory, flags) == [["SnapshotCopy", "SnapshotCopy"]]
    assert run_ranks(1, differences, *(str(tmp_path / kind / "iter_0000003") for kind in ("async", "sync"))) == [[]]
