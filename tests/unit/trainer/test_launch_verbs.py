"""The check of InfiniBand, on a real shared library with its three functions and on folders of devices."""

import os
import pathlib
import subprocess

import pytest

from megatronapp_trainer.launch.preflight import infiniband
from megatronapp_trainer.launch.preflight.machine import is_chosen

SOURCE = """
#include <stddef.h>
struct device { const char *name; };
static struct device found[] = {{"mlx5_0"}, {"mlx5_1"}};
static struct device *list[] = {&found[0], &found[1], NULL};
struct device **ibv_get_device_list(int *count) { if (count) *count = COUNT; return COUNT < 0 ? NULL : list; }
const char *ibv_get_device_name(struct device *device) { return device->name; }
void ibv_free_device_list(struct device **devices) { (void)devices; }
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """Build a library for each number of adapters that it lists; -1: it fails."""
    folder, made = tmp_path_factory.mktemp("verbs"), {}
    (folder / "verbs.c").write_text(SOURCE)
    for count in (-1, 0, 2):
        made[count] = str(folder / f"libverbs{count}.so")
        command = ["cc", "-shared", "-fPIC", f"-DCOUNT={count}", "-o", made[count], str(folder / "verbs.c")]
        subprocess.run(command, check=True)
    return made


@pytest.fixture
def devices(tmp_path: pathlib.Path) -> pathlib.Path:
    """Two devices that open, of mlx5_0 and mlx5_1."""
    for number in range(2):
        (tmp_path / "class" / f"uverbs{number}").mkdir(parents=True)
        (tmp_path / "class" / f"uverbs{number}" / "ibdev").write_text(f"mlx5_{number}\n")
        (tmp_path / "dev").mkdir(exist_ok=True)
        (tmp_path / "dev" / f"uverbs{number}").touch()
    return tmp_path


def found(library: str, devices: pathlib.Path, hca: str = "") -> str:
    places = {"devices": devices / "dev", "classes": devices / "class"}
    return "; ".join(infiniband.verbs_faults(hca, is_chosen, library=library, **places))


def close(devices: pathlib.Path, number: int) -> None:
    """Replace a device by a dangling link, which root cannot open either."""
    path = devices / "dev" / f"uverbs{number}"
    path.unlink()
    os.symlink("nowhere", path)


def test_adapters_that_are_listed_and_open_are_no_fault(library: dict[int, str], devices: pathlib.Path) -> None:
    assert found(library[2], devices) == found(library[2], devices, "mlx5_0:2,mlx5_1") == ""


def test_an_image_without_the_library_is_named(devices: pathlib.Path) -> None:
    problem = found("libibverbs.so.none", devices)
    assert "libibverbs.so.none cannot be used" in problem
    assert "install libibverbs1 and ibverbs-providers in the image" in problem
    assert "libc.so.6 cannot be used" in found("libc.so.6", devices), "another library"


@pytest.mark.parametrize("count", [-1, 0])
def test_a_library_without_a_provider_is_named(count: int, library: dict[int, str], devices: pathlib.Path) -> None:
    assert "finds no adapter: the node has none, or the image lacks its provider" in found(library[count], devices)


def test_a_pod_without_devices_suggests_the_field_to_set(library: dict[int, str], tmp_path: pathlib.Path) -> None:
    problem = found(library[2], tmp_path)
    assert f"there is no {tmp_path}/dev/uverbs*" in problem
    assert "network.rdma.resourceName" in problem and "network.rdma.devices: HostPath" in problem


def test_each_adapter_that_is_named_must_open(library: dict[int, str], devices: pathlib.Path) -> None:
    close(devices, 1)
    assert found(library[2], devices) == "", "a container may have one of the two that it sees"
    assert found(library[2], devices, "mlx5_0") == found(library[2], devices, "^mlx5_1") == ""
    problem = found(library[2], devices, "mlx5")
    assert problem == f"devices that cannot be opened: {devices}/dev/uverbs1 (mlx5_1): No such file or directory"
    close(devices, 0)
    assert "uverbs0 (mlx5_0)" in found(library[2], devices)
    assert "is of an adapter that irdma names; there are devices of mlx5_0, mlx5_1" in found(
        library[2], devices, "irdma"
    )
