"""Figures of a training in Weights & Biases: by its real package, without its server."""

import json
import pathlib
import struct
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from megatronapp_common.names import Env
from megatronapp_trainer.config import TrainerConfig, parse
from megatronapp_trainer.errors import UsageError, UsageErrors
from megatronapp_trainer.training.watch.events import open_events

MODEL = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --micro-batch-size 1 --global-batch-size 1 "
    "--train-iters 4 --lr 1e-3 --mock-data --vocab-size 64"
)
BLOCK = 32768


def config_of(flags: str) -> TrainerConfig:
    return parse(f"{MODEL} {flags}".split())


def records_of(file: pathlib.Path) -> Iterator[bytes]:
    """Yield the records of a run's file: after 7 bytes a log in LevelDB's format."""
    data, place, record = file.read_bytes(), 7, b""
    while place < len(data):
        if BLOCK - place % BLOCK < 7:  # the rest of a block that is too short for a header
            place += BLOCK - place % BLOCK
            continue
        _, length, kind = struct.unpack_from("<IHB", data, place)
        record += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            yield record
            record = b""


def history_of(file: pathlib.Path) -> list[dict[str, float]]:
    import wandb.proto.wandb_internal_pb2

    protocol: Any = wandb.proto.wandb_internal_pb2
    rows = []
    for record in records_of(file):
        message = protocol.Record()
        message.ParseFromString(record)
        if message.WhichOneof("record_type") == "history":
            items = message.history.item
            rows.append({(item.key or "/".join(item.nested_key)): json.loads(item.value_json) for item in items})
    return rows


@pytest.mark.full("the package takes seconds to import and starts a process")
def test_a_run_has_the_figures_by_iteration_and_is_that_of_the_job(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import wandb

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv(Env.JOB_UID, "uid-of-the-job")
    monkeypatch.setenv(Env.JOB, "llama")
    events = open_events(config_of(f"--wandb-project training --save {tmp_path}"))
    try:
        events.add({"lm loss": 2.5, "learning-rate": 1e-3}, 10)
        events.add({"lm loss": 2.25}, 5)  # a training that resumed from an earlier checkpoint
    finally:
        events.close()
        wandb.teardown()
    (file,) = tmp_path.glob("wandb/wandb/offline-run-*/run-uid-of-the-job.wandb")
    rows = history_of(file)
    assert [(row["iteration"], row["lm loss"]) for row in rows if "lm loss" in row] == [(10, 2.5), (5, 2.25)]
    assert b"llama" in file.read_bytes()


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UsageError, match=r"install megatronapp-trainer\[wandb\]"):
        open_events(config_of("--wandb-project training"))


def test_flags_of_runs_need_a_project() -> None:
    with pytest.raises(UsageErrors, match="--wandb-exp-name needs --wandb-project"):
        config_of("--wandb-exp-name first")


@pytest.mark.full("the package takes seconds to import and starts a process")
def test_a_run_that_cannot_start_names_a_remedy(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    with pytest.raises(UsageError, match="set WANDB_API_KEY, or WANDB_MODE=offline"):
        open_events(config_of(f"--wandb-project training --wandb-save-dir {tmp_path}"))
