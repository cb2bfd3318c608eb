"""Figures of a training in Weights & Biases: by its real package, without its server."""

import contextlib
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
from megatronapp_trainer.training.watch.events import Events, WandbWriter, open_events

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
    rows = [{tag: value for tag, value in row.items() if not tag.startswith("_")} for row in history_of(file)]
    assert rows == [{"iteration": 10, "lm loss": 2.5, "learning-rate": 1e-3}, {"iteration": 5, "lm loss": 2.25}]
    assert b"llama" in file.read_bytes()


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UsageError, match=r"install megatronapp-trainer\[wandb\]"):
        open_events(config_of("--wandb-project training"))


class OpenRun:
    """Fake of a run that notes its end."""

    def __init__(self) -> None:
        self.finished = False

    def define_metric(self, *_names: str, **_options: str) -> None:
        """Do nothing with an axis."""

    def finish(self) -> None:
        self.finished = True


@pytest.mark.parametrize("fails", [False, True])
def test_the_end_by_an_error_does_not_wait_for_the_server(fails: bool) -> None:
    run = OpenRun()
    events = Events({"run": WandbWriter(run)})
    with contextlib.suppress(ZeroDivisionError), contextlib.ExitStack() as parts:
        parts.callback(events.close)
        assert fails is False or 1 // 0
    assert run.finished is not fails


def test_flags_of_runs_need_a_project() -> None:
    with pytest.raises(UsageErrors, match="--wandb-exp-name needs --wandb-project"):
        config_of("--wandb-exp-name first")


def test_a_folder_of_earlier_runs_is_not_the_package(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wandb").mkdir()
    for name in [name for name in sys.modules if name.partition(".")[0] == "wandb"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    try:
        with pytest.raises(UsageError, match=r"install megatronapp-trainer\[wandb\]"):
            open_events(config_of("--wandb-project training"))
    finally:
        sys.modules.pop("wandb", None)


def unreachable(monkeypatch: pytest.MonkeyPatch, home: pathlib.Path, key: str | None) -> TrainerConfig:
    """Return flags of a run whose server cannot be reached."""
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("HOME", str(home))
    if key is None:
        monkeypatch.delenv("WANDB_API_KEY", raising=False)
    else:
        monkeypatch.setenv("WANDB_API_KEY", key)
    return config_of(f"--wandb-project training --wandb-save-dir {home}")


@pytest.mark.full("the package takes seconds to import and starts a process")
def test_a_run_that_cannot_start_names_a_remedy(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = unreachable(monkeypatch, tmp_path, None)
    with pytest.raises(UsageError, match="set WANDB_API_KEY, or WANDB_MODE=offline"):
        open_events(config)


@pytest.mark.full("the package tries again for half a minute")
@pytest.mark.timeout(300)
def test_a_server_that_cannot_be_reached_is_given_up(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = unreachable(monkeypatch, tmp_path, "0" * 40)
    with pytest.raises(UsageError, match="giving up after 3 attempt"):
        open_events(config)


def test_a_job_that_resumes_trains_without_the_server(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setenv(Env.ATTEMPT, "2")
    events = open_events(config_of("--wandb-project training"))
    events.add({"lm loss": 2.5}, 1)
    events.close()
    assert "no events are written to Weights & Biases in this attempt: --wandb-project needs" in caplog.text
