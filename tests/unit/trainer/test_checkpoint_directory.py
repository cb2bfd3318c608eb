"""Names, claims and damage of checkpoint directories."""

import errno
import functools
import json
import os
import pathlib
import zlib
from dataclasses import asdict

import pytest

from megatronapp_trainer.checkpoint.checksums import WrittenFile, first_damage
from megatronapp_trainer.checkpoint.directory import (
    MANIFEST,
    BrokenCheckpointError,
    CheckpointDirectory,
    Manifest,
    OwnershipClaim,
    read_manifest,
)
from megatronapp_trainer.errors import StorageError, SupersededError
from megatronapp_trainer.utils.atomic_files import retry_transient_errors


def manifest(iteration: int, attempt: int = 0) -> Manifest:
    return Manifest(
        iteration=iteration,
        consumed_samples=iteration * 8,
        skipped_iterations=0,
        attempt=attempt,
        layout={"tensor": 1},
        optimizer="plain",
        random_states=True,
        arguments={"--seed": 1},
    )


@pytest.fixture
def directory(tmp_path: pathlib.Path) -> CheckpointDirectory:
    return CheckpointDirectory(tmp_path / "save")


def claimed(directory: CheckpointDirectory, attempt: int = 0, uid: str = "job") -> OwnershipClaim:
    claim = OwnershipClaim(uid=uid, attempt=attempt)
    directory.claim(claim)
    return claim


def write(directory: CheckpointDirectory, iteration: int, claim: OwnershipClaim) -> pathlib.Path:
    temporary = directory.begin(iteration, claim)
    (temporary / "data.distcp").write_bytes(b"weights")
    return directory.publish(temporary, manifest(iteration, claim.attempt), claim)


def names(directory: CheckpointDirectory) -> set[str]:
    return {path.name for path in directory.path.iterdir()}


def test_a_checkpoint_gets_its_name_last(directory: CheckpointDirectory) -> None:
    claim = claimed(directory, attempt=2)
    temporary = directory.begin(100, claim)
    assert temporary.name == f"iter_0000100.tmp-a2-{claim.token}"
    assert directory.checkpoints() == []
    (temporary / "data.distcp").write_bytes(b"weights")
    final = directory.publish(temporary, manifest(100, 2), claim)
    assert directory.checkpoints() == [final]
    assert final.name == "iter_0000100"
    assert (directory.path / "latest_checkpointed_iteration.txt").read_text() == "100"
    stored = read_manifest(final)
    assert (stored.iteration, stored.attempt, stored.files) == (100, 2, {"data.distcp": 7})


def test_the_newest_checkpoint_is_listed_first(directory: CheckpointDirectory) -> None:
    claim = claimed(directory)
    for iteration in (5, 10_000_000, 20):
        write(directory, iteration, claim)
    assert [path.name for path in directory.checkpoints()] == ["iter_10000000", "iter_0000020", "iter_0000005"]


def test_the_same_iteration_is_replaced(directory: CheckpointDirectory) -> None:
    write(directory, 5, claimed(directory, attempt=0))
    final = write(directory, 5, claimed(directory, attempt=1))
    assert read_manifest(final).attempt == 1
    assert names(directory) == {"iter_0000005", "latest_checkpointed_iteration.txt", "owner.json"}


def test_prune_keeps_the_newest_checkpoints(directory: CheckpointDirectory) -> None:
    claim = claimed(directory)
    for iteration in range(1, 6):
        write(directory, iteration, claim)
    directory.prune(2, claim, published=5)
    assert [path.name for path in directory.checkpoints()] == ["iter_0000005", "iter_0000004"]


def test_what_cannot_be_resumed_from_does_not_count(directory: CheckpointDirectory) -> None:
    claim = claimed(directory)
    for iteration in (50, 100, 200, 300):
        write(directory, iteration, claim)
    truncate_file(directory.path / "iter_0000200")
    remove_manifest(directory.path / "iter_0000300")
    (directory.path / "iter_0000010").mkdir()
    (directory.path / "iter_0000010" / "model_optim_rng.pt").write_bytes(b"of another program")
    write(directory, 150, claim)
    directory.prune(2, claim, published=150)
    left = ["iter_0000300", "iter_0000200", "iter_0000150", "iter_0000100", "iter_0000010"]
    assert [path.name for path in directory.checkpoints()] == left
    write(directory, 160, claim)
    left.insert(2, "iter_0000160")
    directory.prune(2, claim, published=160)
    left.remove("iter_0000100")
    assert [path.name for path in directory.checkpoints()] == left


def test_a_later_checkpoint_does_not_evict_the_published_checkpoint(directory: CheckpointDirectory) -> None:
    """Check a later one whose files have their sizes, but which this run could not read before it resumed from an
    earlier one."""
    claim = claimed(directory)
    for iteration in (50, 100, 200, 150):
        write(directory, iteration, claim)
    directory.prune(2, claim, published=150)
    assert [path.name for path in directory.checkpoints()] == ["iter_0000200", "iter_0000150", "iter_0000100"]


def test_prune_keeps_the_previous_complete_checkpoint(directory: CheckpointDirectory) -> None:
    claim = claimed(directory)
    for iteration in (1, 2, 3, 4):
        write(directory, iteration, claim)
    remove_manifest(directory.path / "iter_0000003")
    directory.prune(1, claim, published=4)
    assert [path.name for path in directory.checkpoints()] == ["iter_0000004", "iter_0000003", "iter_0000002"]


def test_each_deletion_asks_for_the_owner(directory: CheckpointDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    old = claimed(directory, attempt=1)
    for iteration in (1, 2, 3, 4):
        write(directory, iteration, old)
    rename = pathlib.Path.rename

    def taken_over(self: pathlib.Path, target: pathlib.Path) -> pathlib.Path:
        owner = OwnershipClaim(uid="job", attempt=2)
        (directory.path / "owner.json").write_text(json.dumps(asdict(owner)))
        return rename(self, target)

    monkeypatch.setattr(pathlib.Path, "rename", taken_over)
    with pytest.raises(SupersededError):
        directory.prune(2, old, published=4)
    assert len(directory.checkpoints()) == 3


def test_every_file_reaches_the_disk_before_the_name(
    directory: CheckpointDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut after the rename finds nothing that was not brought to the disk before."""
    claim = claimed(directory)
    temporary = directory.begin(3, claim)
    (temporary / "__0_0.distcp").write_bytes(b"synced by its writer")
    for name in ("common.pt", "metadata.json", ".metadata"):
        (temporary / name).write_bytes(name.encode())
    done: list[str] = []
    fsync, rename = os.fsync, pathlib.Path.rename

    def seen(descriptor: int) -> None:
        done.append(pathlib.Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    def renamed(self: pathlib.Path, target: pathlib.Path) -> pathlib.Path:
        done.append(f"rename {target.name}")
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", seen)
    monkeypatch.setattr(pathlib.Path, "rename", renamed)
    elsewhere = WrittenFile(size=9, checksum="of a rank whose file this node does not see yet")
    written = {"__0_0.distcp": WrittenFile(size=20, checksum="of its writer"), "__1_0.distcp": elsewhere}
    final = directory.publish(temporary, manifest(3), claim, written)
    before = done[: done.index("rename iter_0000003")]
    assert {"common.pt", "metadata.json", ".metadata", temporary.name} <= set(before)
    assert any(name.startswith(MANIFEST) for name in before)
    (final / "__1_0.distcp").write_bytes(b"elsewhere")
    stored = read_manifest(final)
    assert stored.checksums.keys() == stored.files.keys()
    assert (stored.files["__1_0.distcp"], stored.checksums["__0_0.distcp"]) == (9, "of its writer")
    assert stored.checksums["common.pt"] == f"crc32/67108864:{zlib.crc32(b'common.pt'):08x}"


def test_checkpoints_of_earlier_formats_are_read(directory: CheckpointDirectory) -> None:
    final = write(directory, 3, claimed(directory))
    content = json.loads((final / MANIFEST).read_text())
    content |= {"format": 2, "checksums": {"data.distcp": f"crc32:{zlib.crc32(b'weights'):08x}"}}
    (final / MANIFEST).write_text(json.dumps(content))
    assert first_damage(final, read_manifest(final).checksums) is None
    (final / "data.distcp").write_bytes(b"weighty")
    assert "data.distcp is damaged from byte 0 to its end" in str(first_damage(final, read_manifest(final).checksums))
    del content["checksums"]
    (final / MANIFEST).write_text(json.dumps({**content, "format": 1}))
    stored = read_manifest(final)
    assert (stored.iteration, stored.checksums) == (3, {})


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO])
def test_a_short_fault_of_the_file_system_is_outlasted(
    directory: CheckpointDirectory, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    claim = claimed(directory)
    final = write(directory, 3, claim)
    monkeypatch.setattr("megatronapp_trainer.utils.atomic_files.time.sleep", lambda _: None)
    read_bytes, faults = pathlib.Path.read_bytes, [number, number]

    def faulty(self: pathlib.Path) -> bytes:
        if faults:
            raise OSError(faults.pop(), "for a moment", str(self))
        return read_bytes(self)

    monkeypatch.setattr(pathlib.Path, "read_bytes", faulty)
    directory.check_owner(claim)
    faults.append(number)
    assert read_manifest(final).iteration == 3


def test_a_lasting_fault_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatronapp_trainer.utils.atomic_files.time.sleep", lambda _: None)
    tries: list[int] = []

    def failing(number: int) -> None:
        tries.append(number)
        raise OSError(number, "for ever")

    for number, expected in ((errno.EIO, 5), (errno.EACCES, 1)):
        tries.clear()
        with pytest.raises(OSError, match="for ever"):
            retry_transient_errors(functools.partial(failing, number))
        assert len(tries) == expected


def test_a_directory_that_a_cache_hides_is_waited_for(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from megatronapp_trainer.checkpoint.saving import files

    pauses: list[float] = []

    def appear(pause_s: float) -> None:
        pauses.append(pause_s)
        if len(pauses) == 3:
            (tmp_path / "late").mkdir()

    monkeypatch.setattr("megatronapp_trainer.checkpoint.saving.files.time.sleep", appear)
    files.require_shared(tmp_path / "late")
    assert len(pauses) == 3
    monkeypatch.setattr(files, "VISIBLE_WITHIN_S", 0.0)
    with pytest.raises(StorageError, match="could not be seen from here"):
        files.require_shared(tmp_path / "never")


def test_a_crash_while_replacing_loses_nothing(directory: CheckpointDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    write(directory, 5, claimed(directory))
    second = claimed(directory, attempt=1)
    temporary = directory.begin(5, second)
    (temporary / "data.distcp").write_bytes(b"weights")
    rename = pathlib.Path.rename

    def killed(self: pathlib.Path, target: pathlib.Path) -> pathlib.Path:
        if self == temporary:
            raise KeyboardInterrupt
        return rename(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(pathlib.Path, "rename", killed)
        with pytest.raises(KeyboardInterrupt):
            directory.publish(temporary, manifest(5, 1), second)
    assert directory.checkpoints() == []
    claimed(directory, attempt=2)
    assert read_manifest(directory.path / "iter_0000005").attempt == 0
    assert names(directory) == {"iter_0000005", "latest_checkpointed_iteration.txt", "owner.json"}


def test_a_partly_deleted_checkpoint_is_not_restored(directory: CheckpointDirectory) -> None:
    final = write(directory, 5, claimed(directory))
    remove_file(final)
    final.rename(final.with_name("iter_0000005.old-a0"))
    claimed(directory, attempt=1)
    assert directory.checkpoints() == []


def test_an_old_attempt_neither_renames_nor_deletes(directory: CheckpointDirectory) -> None:
    old = claimed(directory, attempt=1)
    write(directory, 1, old)
    write(directory, 2, old)
    half = directory.begin(3, old)
    new = claimed(directory, attempt=2)
    assert not half.exists()
    half.mkdir()
    with pytest.raises(SupersededError, match="belongs to attempt 2"):
        directory.publish(half, manifest(3), old)
    with pytest.raises(SupersededError):
        directory.prune(1, old, published=2)
    with pytest.raises(SupersededError):
        directory.begin(4, old)
    assert len(directory.checkpoints()) == 2
    write(directory, 3, new)
    assert len(directory.checkpoints()) == 3


def test_an_old_attempt_cannot_claim_back(directory: CheckpointDirectory) -> None:
    claimed(directory, attempt=3)
    with pytest.raises(SupersededError, match="attempt 3"):
        claimed(directory, attempt=2)


def test_the_same_attempt_started_twice_and_another_job(directory: CheckpointDirectory) -> None:
    first = claimed(directory, attempt=0)
    claimed(directory, attempt=0)
    with pytest.raises(SupersededError):
        directory.check_owner(first)
    second = claimed(directory, attempt=5)
    claimed(directory, attempt=0, uid="made again under the same name")
    with pytest.raises(SupersededError):
        directory.check_owner(second)


def test_two_claims_of_an_attempt_write_into_different_folders(directory: CheckpointDirectory) -> None:
    """Check that no folder is shared: ranks of the earlier claim may continue to write until they ask for the owner."""
    first = claimed(directory, attempt=0)
    early = directory.begin(5, first)
    second = claimed(directory, attempt=0)
    late = directory.begin(5, second)
    (late / "data.distcp").write_bytes(b"weights")
    early.mkdir()
    (early / "data.distcp").write_bytes(b"WEIGHTS")
    final = directory.publish(late, manifest(5), second)
    assert (final / "data.distcp").read_bytes() == b"weights"
    (directory.path / "iter_0000005.tmp-a0").mkdir()  # as earlier releases called it
    claimed(directory, attempt=1)
    assert names(directory) == {"iter_0000005", "latest_checkpointed_iteration.txt", "owner.json"}


def test_a_new_checkpoint_removes_what_its_claim_left_unfinished(directory: CheckpointDirectory) -> None:
    """A write that failed on a full disk may not be removed before the next begins, which needs its room."""
    other = OwnershipClaim(uid="job", attempt=0)
    claim = claimed(directory)
    write(directory, 1, claim)
    failed = directory.begin(2, claim)
    (failed / "data.distcp").write_bytes(b"wei")
    directory.temporary(2, other).mkdir()
    temporary = directory.begin(3, claim)
    assert {name for name in names(directory) if name.startswith("iter_")} == {
        "iter_0000001",
        directory.temporary(2, other).name,
        temporary.name,
    }


def test_a_vanished_owner_is_no_owner(directory: CheckpointDirectory) -> None:
    claim = claimed(directory)
    (directory.path / "owner.json").unlink()
    with pytest.raises(StorageError, match=r"owner\.json, .* is missing"):
        directory.check_owner(claim)


def test_a_claim_clears_what_was_left_half_done(directory: CheckpointDirectory) -> None:
    claim = claimed(directory)
    write(directory, 1, claim)
    directory.begin(2, claim)
    (directory.path / "iter_0000000.old-a0").mkdir()
    (directory.path / "notes").mkdir()
    claimed(directory, attempt=1)
    assert names(directory) == {"iter_0000001", "latest_checkpointed_iteration.txt", "notes", "owner.json"}


def test_a_directory_that_cannot_be_made(tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StorageError, match=r"--save .* cannot be written"):
        claimed(CheckpointDirectory(tmp_path / "file" / "save"))


def truncate_file(path: pathlib.Path) -> None:
    (path / "data.distcp").write_bytes(b"wei")


def remove_file(path: pathlib.Path) -> None:
    (path / "data.distcp").unlink()


def remove_manifest(path: pathlib.Path) -> None:
    (path / MANIFEST).unlink()


def truncate_manifest(path: pathlib.Path) -> None:
    (path / MANIFEST).write_text("{")


def replace_manifest(path: pathlib.Path) -> None:
    (path / MANIFEST).write_text("[]")


def age_manifest(path: pathlib.Path) -> None:
    content = json.loads((path / MANIFEST).read_text())
    (path / MANIFEST).write_text(json.dumps({**content, "format": 0}))


def rob_manifest(path: pathlib.Path) -> None:
    (path / MANIFEST).write_text(json.dumps({"format": 1, "iteration": 3}))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (truncate_file, "has 3 bytes instead of 7"),
        (remove_file, "is missing"),
        (remove_manifest, "not written to its end"),
        (truncate_manifest, "cannot be read"),
        (replace_manifest, "no JSON object"),
        (age_manifest, "another version"),
        (rob_manifest, "lacks entries"),
    ],
)
def test_damage_is_named(directory: CheckpointDirectory, damage: object, reason: str) -> None:
    final = write(directory, 7, claimed(directory))
    assert callable(damage)
    damage(final)
    with pytest.raises(BrokenCheckpointError, match=reason):
        read_manifest(final)
