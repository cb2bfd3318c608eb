"""Files of other programs are named, with the command that makes them usable; only files are inspected."""

import json
import pathlib
import pickle
from argparse import Namespace

import pytest

from megatronapp_trainer.checkpoint.foreign import MegatronLayout, answer, megatron_checkpoint, rank_files
from megatronapp_trainer.errors import CheckpointError
from megatronapp_trainer.serve.settings import newest_arguments


def legacy(folder: pathlib.Path, *ranks: str) -> pathlib.Path:
    for rank in ranks:
        (folder / rank).mkdir(parents=True)
        (folder / rank / "model_optim_rng.pt").touch()
    return folder


def torch_dist(folder: pathlib.Path, backend: str = "torch_dist") -> pathlib.Path:
    folder.mkdir(parents=True)
    (folder / ".metadata").touch()
    (folder / "common.pt").write_bytes(pickle.dumps({"args": Namespace(num_layers=2)}))
    (folder / "metadata.json").write_text(json.dumps({"sharded_backend": backend}))
    return folder


def test_the_legacy_layout(tmp_path: pathlib.Path) -> None:
    folder = legacy(tmp_path / "iter_0000020", "mp_rank_00_000", "mp_rank_01_000", "mp_rank_00_001", "mp_rank_01_001")
    (folder / "mp_rank_02").mkdir()  # without a file
    assert sorted(rank_files(folder)) == [(0, 0, 0), (0, 1, 0), (1, 0, 0), (1, 1, 0)]
    assert megatron_checkpoint(tmp_path) == (folder, MegatronLayout.LEGACY)
    assert megatron_checkpoint(folder) == (folder, MegatronLayout.LEGACY)


def test_the_tracker_file_selects_the_iteration(tmp_path: pathlib.Path) -> None:
    old, new = (torch_dist(tmp_path / f"iter_{number:07d}") for number in (20, 40))
    assert megatron_checkpoint(tmp_path) == (new, MegatronLayout.TORCH_DIST)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("20\n")
    assert megatron_checkpoint(tmp_path) == (old, MegatronLayout.TORCH_DIST)
    assert megatron_checkpoint(tmp_path, 40) == (new, MegatronLayout.TORCH_DIST)
    assert megatron_checkpoint(tmp_path, 41) is None
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("release")
    assert megatron_checkpoint(tmp_path) == (new, MegatronLayout.TORCH_DIST)
    release = legacy(tmp_path / "release", "mp_rank_00")
    assert megatron_checkpoint(tmp_path) == (release, MegatronLayout.LEGACY)


@pytest.mark.parametrize("kind", ["torch_dist", "legacy", "hugging face", "zarr", "one of ours"])
def test_the_answer_names_it_and_the_command(tmp_path: pathlib.Path, kind: str) -> None:
    path = tmp_path / "there"
    advice = f"megatronapp checkpoint convert --load-dir {path} --save-dir {path}-megatronapp; then give --load"
    if kind == "torch_dist":
        torch_dist(path / "iter_0000020")
    elif kind == "legacy":
        legacy(path / "iter_0000020", "mp_rank_00")
    elif kind == "zarr":
        torch_dist(path / "iter_0000020", "zarr")
        advice = "--dist-ckpt-format torch_dist"
    elif kind == "hugging face":
        path.mkdir()
        (path / "config.json").touch()
        (path / "model.safetensors").touch()
    else:
        path.mkdir()
        (path / "megatronapp.json").touch()
        advice = f"give its directory: {tmp_path}"
    assert advice in str(answer(path))
    with pytest.raises(CheckpointError) as caught:
        newest_arguments(path)
    assert str(caught.value) == answer(path)


def test_own_checkpoints_and_empty_folders_give_no_foreign_answer(tmp_path: pathlib.Path) -> None:
    assert answer(tmp_path / "absent") is None
    assert answer(tmp_path) is None
    half = tmp_path / "iter_0000020"
    half.mkdir()
    (half / ".metadata").touch()
    (half / "common.pt").write_bytes(pickle.dumps({"iteration": 20}))
    (tmp_path / "latest_checkpointed_iteration.txt").write_bytes(b"\xff")
    assert answer(tmp_path) is None
