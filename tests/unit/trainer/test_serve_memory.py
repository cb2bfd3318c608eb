"""Memory that a rank may take for its cache: the machine's, the container's, and its share among ranks."""

import pathlib

import psutil
import pytest

from megatronapp_trainer.device import host_memory

GIB = 1 << 30


def group(folder: pathlib.Path, limit: str, usage: int, cache: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{usage}\n")
    (folder / "memory.stat").write_text(f"anon {usage - cache}\ninactive_file {cache}\n")


@pytest.fixture
def own(tmp_path: pathlib.Path) -> pathlib.Path:
    path = tmp_path / "cgroup"
    path.write_text("0::/kubepods/pod1/main\n")
    return path


def test_every_group_around_a_process_bounds_it(own: pathlib.Path, tmp_path: pathlib.Path) -> None:
    groups = tmp_path / "groups"
    group(groups / "kubepods" / "pod1" / "main", "max", GIB)
    group(groups / "kubepods" / "pod1", str(4 * GIB), 3 * GIB, cache=2 * GIB)
    group(groups / "kubepods", str(16 * GIB), 15 * GIB)
    assert sorted(host_memory.group_bytes(own, groups)) == [GIB, 3 * GIB]


def test_a_container_that_sees_its_group_as_the_root_and_version_1(own: pathlib.Path, tmp_path: pathlib.Path) -> None:
    group(tmp_path / "groups", str(2 * GIB), 3 * GIB)
    assert host_memory.group_bytes(own, tmp_path / "groups") == [0]
    old = tmp_path / "old" / "memory" / "docker"
    old.mkdir(parents=True)
    for name, value in (("limit_in_bytes", 2 * GIB), ("usage_in_bytes", GIB)):
        (old / f"memory.{name}").write_text(str(value))
    own.write_text("4:cpu,memory:/docker\n1:name=systemd:/docker\nnonsense\n")
    assert host_memory.group_bytes(own, tmp_path / "old") == [GIB]
    assert host_memory.group_bytes(tmp_path / "nothing", tmp_path) == []


def test_a_rank_takes_its_fraction_of_memory(
    own: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = psutil.virtual_memory().available // 4
    group(tmp_path / "groups", str(limit), 0)
    monkeypatch.setattr(host_memory, "_OWN_GROUP", own)
    monkeypatch.setattr(host_memory, "_GROUPS", tmp_path / "groups")
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert host_memory.free_host_bytes() == limit
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    assert host_memory.free_host_bytes() == limit // 3


def test_the_check_of_the_cache_asks_for_it(
    own: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    from megatronapp_trainer.device import Device
    from megatronapp_trainer.device.free_memory import free_bytes

    group(tmp_path / "groups", str(1 << 20), 0)
    monkeypatch.setattr(host_memory, "_OWN_GROUP", own)
    monkeypatch.setattr(host_memory, "_GROUPS", tmp_path / "groups")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert free_bytes(Device(torch_device=torch.device("cpu"), name="cpu")) == 1 << 19
