"""Checkpoints that are damaged, of another model, or cannot be written; and the files that remain."""

import contextlib
import json
import pathlib
import resource
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import small_training

pytestmark = pytest.mark.torch

RunRanks = Callable[..., list[Any]]

MODEL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 2 "
    "--global-batch-size 4 --lr 2e-3 --mock-data --train-iters 10 --vocab-size 60 --eval-iters 0"
)


def build(flags: str) -> tuple[Any, Any]:
    """A run that is ready to train, and its checkpoint manager."""
    from megatronapp_trainer.checkpoint.manager import CheckpointManager

    run = small_training.prepare(f"{MODEL} {flags}")
    return run, CheckpointManager(run.config, run.layout)


def train_and_save(flags: str) -> None:
    """A run that saves after steps 2, 4 and so on."""
    run, manager = build(f"{flags} --save-interval 2")
    manager.load(run.state)
    small_training.train(run, checkpoints=manager)


def train_and_save_in_small_blocks(flags: str) -> None:
    from megatronapp_trainer.checkpoint import checksums

    checksums.BLOCK_BYTES = 1024
    train_and_save(flags)


def collected_warnings() -> list[str]:
    """Return a list that receives the warnings of the trainer from now on."""
    import logging

    warnings: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("megatronapp_trainer").addHandler(handler)
    return warnings


def resume(flags: str) -> tuple[bool, int, list[str]]:
    """Return whether there was a checkpoint to resume, at which iteration, and the messages."""
    warnings = collected_warnings()
    run, manager = build(flags)
    return manager.load(run.state), run.state.iteration, warnings


def read_weights(load: str) -> tuple[str, list[str]]:
    """Return the name of the checkpoint that a model to serve was read from, and the messages."""
    from megatronapp_trainer.device import prepare_device
    from megatronapp_trainer.inference.build import build_model, load_weights

    warnings = collected_warnings()
    run, _ = build("")
    device = prepare_device(run.layout.local_rank)
    model = build_model(run.config, run.layout, device, vocab_size=60, drawn=False)
    return load_weights(model, run.config, pathlib.Path(load)).name, warnings


def resume_during_a_deletion(flags: str) -> tuple[bool, int, list[str]]:
    """Resume as `resume` does; the newest checkpoint is deleted once it is verified."""
    from megatronapp_trainer.checkpoint import manager, storage

    def verified(directory: pathlib.Path, *arguments: Any, **keywords: Any) -> None:
        storage.verify(directory, *arguments, **keywords)
        if directory.name == "iter_0000006":
            shutil.rmtree(directory, ignore_errors=True)

    manager.verify = verified  # type: ignore[attr-defined]
    return resume(flags)


def failing(action: str, flags: str) -> tuple[str, str]:
    """The class and text of the error that loading, or saving with room for 4 KiB a file, ends with on this rank."""
    run, manager = build(flags)
    try:
        if action == "load":
            manager.load(run.state)
        else:
            run.state.optimizer.step()
            run.state.iteration = 1
            manager.load(run.state)
            with raise_disk_full(run.layout.rank):
                manager.save(run.state)
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def losing_a_peer(message: str, flags: str) -> tuple[str, str, list[str]]:
    """Return how saving ends when a peer is lost while the others write, and the names that remain."""
    run, manager = build(flags)
    manager.load(run.state)
    folder = pathlib.Path(flags.removeprefix("--save "))

    def write(_state: Any, temporary: pathlib.Path) -> None:
        (temporary / "half.distcp").write_bytes(b"written by a rank that lives")
        raise RuntimeError(message)

    manager._write = write
    try:
        manager.save(run.state)
    except Exception as error:
        return type(error).__name__, str(error), [path.name for path in folder.iterdir()]
    return "", "", []


@contextlib.contextmanager
def raise_disk_full(rank: int) -> Any:
    """Limit files to 4 KiB on the last rank alone, like on a full disk."""
    import torch.distributed as dist

    if rank == dist.get_world_size() - 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


@pytest.fixture
def call(run_ranks: RunRanks) -> Callable[..., list[Any]]:
    def run(world: int, function: Callable[..., Any], *arguments: Any, **environment: str) -> list[Any]:
        return run_ranks(world, function, *arguments, environment=environment)

    return run


@pytest.fixture(scope="module")
def trained(run_ranks: RunRanks, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("trained") / "save"
    run_ranks(1, train_and_save, f"--save {path} --exit-interval 6")
    return path


@pytest.fixture
def save(trained: pathlib.Path, tmp_path: pathlib.Path) -> pathlib.Path:
    """Checkpoints of steps 2, 4 and 6, which the test may damage."""
    return shutil.copytree(trained, tmp_path / "save")


def flip_a_byte(checkpoint: pathlib.Path) -> None:
    """Damage that leaves all sizes as they are."""
    path = next(checkpoint.glob("*.distcp"))
    content = bytearray(path.read_bytes())
    for place in range(0, len(content), 512):
        content[place] ^= 0xFF
    path.write_bytes(bytes(content))


def test_damaged_checkpoints_are_left_out(save: pathlib.Path, call: RunRanks) -> None:
    (next((save / "iter_0000006").glob("*.distcp"))).unlink()
    ((found, iteration, warnings),) = call(1, resume, f"--save {save}")
    assert (found, iteration) == (True, 4)
    assert "iter_0000006 is skipped" in warnings[0]
    assert "is missing" in warnings[0]
    flip_a_byte(save / "iter_0000004")
    first, second = call(2, resume, f"--save {save}")
    assert tuple(first[:2]) == tuple(second[:2]) == (True, 2)
    assert "iter_0000004 is skipped: its file __0_0.distcp is damaged" in first[2][1]
    assert second[2] == []


def test_a_model_to_serve_is_read_from_a_whole_checkpoint_and_the_damage_is_logged(
    save: pathlib.Path, call: RunRanks
) -> None:
    flip_a_byte(save / "iter_0000006")
    ((name, warnings),) = call(1, read_weights, str(save))
    assert name == "iter_0000004"
    assert [f"{save}/iter_0000006 is skipped: its file __0_0.distcp is damaged" in text for text in warnings] == [True]


def test_a_checkpoint_that_is_deleted_while_it_is_read_is_left_out(save: pathlib.Path, call: RunRanks) -> None:
    first, second = call(2, resume_during_a_deletion, f"--save {save}")
    assert tuple(first[:2]) == tuple(second[:2]) == (True, 4)
    assert "iter_0000006 is skipped: its common.pt cannot be read" in first[2][0]
    assert second[2] == []


@pytest.mark.full("a variant of damaged checkpoints")
def test_a_damaged_common_part_of_the_first_release_is_left_out(save: pathlib.Path, call: RunRanks) -> None:
    """Check a manifest that has no checksums, and does not say whether --decoupled-lr was given."""
    newest = save / "iter_0000006"
    manifest = json.loads((newest / "megatronapp.json").read_text())
    del manifest["arguments"]["--decoupled-lr"]
    (newest / "megatronapp.json").write_text(json.dumps(manifest | {"format": 1, "checksums": {}}))
    common = newest / "common.pt"
    common.write_bytes(bytes(common.stat().st_size))
    first, second = call(2, resume, f"--save {save}")
    assert tuple(first[:2]) == tuple(second[:2]) == (True, 4)
    assert "iter_0000006 is skipped: its common.pt cannot be read" in first[2][0]
    assert second[2] == []


def test_nothing_whole_is_not_a_fresh_start(save: pathlib.Path, call: RunRanks) -> None:
    for checkpoint in save.glob("iter_*"):
        (checkpoint / "megatronapp.json").unlink()
    ((kind, text),) = call(1, failing, "load", f"--save {save}")
    assert kind == "CheckpointError"
    assert "none of the 3 checkpoints" in text
    assert "remove" not in text


@pytest.mark.full("both flags have one search", but=("--save",))
@pytest.mark.parametrize("flag", ["--load", "--save"])
def test_a_checkpoint_of_megatron_is_no_fresh_start(call: RunRanks, tmp_path: pathlib.Path, flag: str) -> None:
    folder = tmp_path / "there" / "iter_0000020" / "mp_rank_00"
    folder.mkdir(parents=True)
    (folder / "model_optim_rng.pt").touch()
    for kind, text in call(2, failing, "load", f"{flag} {tmp_path / 'there'}"):
        assert kind == "CheckpointError"
        assert "a checkpoint of Megatron-LM in the legacy layout" in text
        assert "megatronapp checkpoint convert --load-dir" in text


@pytest.mark.full("flags are compared alike", but=("optimizer",))
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--num-attention-heads 2", "--num-attention-heads (4 there, 2 here)"),
        ("--use-distributed-optimizer", "--use-distributed-optimizer (off there, on here)"),
        ("--vocab-size 300", "--vocab-size (60 there, 300 here)"),
    ],
    ids=["heads", "optimizer", "vocabulary"],
)
def test_another_model_is_refused(save: pathlib.Path, call: RunRanks, flags: str, message: str) -> None:
    for kind, text in call(2, failing, "load", f"--save {save} {flags}"):
        assert kind == "CheckpointError"
        assert message in text


def test_weights_alone_may_be_taken_over(save: pathlib.Path, call: RunRanks, tmp_path: pathlib.Path) -> None:
    flags = f"--load {save} --finetune --use-distributed-optimizer --save {tmp_path / 'other'}"
    ((found, iteration, warnings),) = call(1, resume, flags)
    assert (found, iteration, warnings) == (True, 0, [])


@pytest.mark.full("weights are stored alike by both", but=("distributed",))
@pytest.mark.parametrize(
    "optimizer", [pytest.param("", id="plain"), pytest.param("--use-distributed-optimizer", id="distributed")]
)
def test_damaged_weights_are_found_by_readers_of_weights_alone(
    call: RunRanks, tmp_path: pathlib.Path, optimizer: str
) -> None:
    from megatronapp_trainer.checkpoint.tensor_files import StoredTensors

    save, other = tmp_path / "save", tmp_path / "other"
    call(1, train_and_save_in_small_blocks, f"--save {save} --exit-interval 2 {optimizer}")
    checkpoint = save / "iter_0000002"
    data = checkpoint / "__0_0.distcp"
    content = data.read_bytes()
    places = StoredTensors(checkpoint).places_of_weights()
    assert places == {data.name: [(0, places[data.name][0][1])]}
    end = places[data.name][0][1]
    assert end < len(content) / 2
    weights, whole = f"--load {save} --finetune --save {other}", f"--save {save} {optimizer}"
    for place, flags in ((end + 1024, whole), (end - 1024, weights)):
        data.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        for kind, text in call(2, failing, "load", flags):
            assert (kind, "none of the 1 checkpoints" in text) == ("CheckpointError", True)
        if flags is whole:
            assert call(1, resume, weights) == [(True, 0, [])]


def test_load_without_a_checkpoint(call: RunRanks, tmp_path: pathlib.Path) -> None:
    ((found, iteration, warnings),) = call(1, resume, f"--load {tmp_path}")
    assert (found, iteration) == (False, 0)
    assert "starts from the beginning" in warnings[0]
    ((kind, text),) = call(1, failing, "load", f"--load {tmp_path} --exit-on-missing-checkpoint")
    assert (kind, str(tmp_path) in text) == ("CheckpointError", True)


def test_a_run_that_continues_logs_once_that_the_other_directory_is_not_read(
    save: pathlib.Path, call: RunRanks, tmp_path: pathlib.Path
) -> None:
    other = shutil.copytree(save, tmp_path / "other")
    flags = f"--save {save} --load {other} --finetune"
    ((found, iteration, warnings),) = call(1, resume, flags)
    assert (found, iteration) == (True, 6)
    assert [f"--load {other} is not read, because --save {save} holds" in text for text in warnings] == [True]
    assert call(1, resume, flags, MEGATRONAPP_ATTEMPT="1") == [(True, 6, [])]


def test_weights_are_not_read_from_the_directory_to_save_in(save: pathlib.Path) -> None:
    from megatronapp_trainer.errors import UsageError

    with pytest.raises(UsageError, match="--save must name another directory than --load"):
        build(f"--save {save} --load {save}/../{save.name}/ --finetune")


def test_a_full_disk_leaves_nothing_half_done(save: pathlib.Path, call: RunRanks) -> None:
    before = {path.name for path in save.iterdir()}
    flags = f"--save {save} --pipeline-model-parallel-size 2"
    for kind, text in call(2, failing, "save", flags):
        assert kind == "StorageError"
        assert "could not be written" in text
        assert "File too large" in text
    assert {path.name for path in save.iterdir()} == before


def test_a_full_disk_on_the_rank_that_writes_the_common_part(save: pathlib.Path, call: RunRanks) -> None:
    before = {path.name for path in save.iterdir()}
    ((kind, text),) = call(1, failing, "save", f"--save {save}")
    assert kind == "StorageError"
    assert "removed" in text
    assert {path.name for path in save.iterdir()} == before


@pytest.mark.parametrize(
    ("message", "kind"),
    [("Connection closed by peer [127.0.0.3]", "RuntimeError"), ("unexpected pos 7", "StorageError")],
)
def test_a_peer_lost_while_saving_is_no_storage_error(
    call: RunRanks, tmp_path: pathlib.Path, message: str, kind: str
) -> None:
    ((found, text, left),) = call(1, losing_a_peer, message, f"--save {tmp_path}")
    assert found == kind
    assert message in text
    assert any(name.startswith("iter_0000000.tmp-a0-") for name in left) == (kind == "RuntimeError")


def test_an_old_attempt_does_not_start(save: pathlib.Path, call: RunRanks) -> None:
    call(1, resume, f"--save {save}", MEGATRONAPP_ATTEMPT="3", MEGATRONAPP_JOB_UID="u")
    for kind, text in call(2, failing, "load", f"--save {save}", MEGATRONAPP_ATTEMPT="2", MEGATRONAPP_JOB_UID="u"):
        assert kind == "SupersededError"
        assert "attempt 3" in text
