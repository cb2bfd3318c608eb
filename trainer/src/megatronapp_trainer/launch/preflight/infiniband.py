"""Check that InfiniBand can be used from here: the library that NCCL opens, the adapters it lists, and their devices.

The links of /sys do not show it: they list the node's adapters in every container.
"""

import ctypes
import os
import pathlib
import re
from collections.abc import Callable, Iterator

LIBRARY = "libibverbs.so.1"
DEVICES = pathlib.Path("/dev/infiniband")
CLASS = pathlib.Path("/sys/class/infiniband_verbs")
Chosen = Callable[[str, str], bool]
"""Predicate: `adapter:port` is chosen by NCCL_IB_HCA."""


def verbs_faults(
    hca: str,
    chosen: Chosen,
    *,
    library: str = LIBRARY,
    devices: pathlib.Path = DEVICES,
    classes: pathlib.Path = CLASS,
) -> Iterator[str]:
    """Yield why NCCL could not use the adapters that `hca` names, one sentence for each fault."""
    try:
        names = adapter_names(ctypes.CDLL(library))
    except (OSError, AttributeError) as error:
        yield (
            f"{library} cannot be used ({error}), and NCCL needs it for InfiniBand and RoCE: "
            "install libibverbs1 and ibverbs-providers in the image"
        )
        return
    if not names:
        yield f"{library} finds no adapter: the node has none, or the image lacks its provider (ibverbs-providers)"
    yield from _device_faults(hca, chosen, devices, classes)


def adapter_names(verbs: ctypes.CDLL) -> list[str]:
    """Return the adapters that the library lists (ibv_get_device_list(3)).

    Raises AttributeError if it is another library.
    """
    verbs.ibv_get_device_list.restype = ctypes.POINTER(ctypes.c_void_p)
    verbs.ibv_get_device_list.argtypes = [ctypes.POINTER(ctypes.c_int)]
    verbs.ibv_get_device_name.restype = ctypes.c_char_p
    verbs.ibv_get_device_name.argtypes = [ctypes.c_void_p]
    verbs.ibv_free_device_list.restype = None
    verbs.ibv_free_device_list.argtypes = [ctypes.POINTER(ctypes.c_void_p)]
    count = ctypes.c_int(0)
    found = verbs.ibv_get_device_list(ctypes.byref(count))
    if not found:  # an error, such as a kernel without InfiniBand
        return []
    try:
        return [verbs.ibv_get_device_name(found[index]).decode() for index in range(count.value)]
    finally:
        verbs.ibv_free_device_list(found)


def _device_faults(hca: str, chosen: Chosen, devices: pathlib.Path, classes: pathlib.Path) -> Iterator[str]:
    """With `hca` each of its adapters must open; without, any: a container may have some of those that it sees."""
    found = sorted(devices.glob("uverbs*"))
    if not found:
        yield (
            f"there is no {devices}/uverbs*: the pod was given no adapter; write the resource of the device plugin "
            "(network.rdma.resourceName), or network.rdma.devices: HostPath on the node's own network"
        )
        return
    adapters = {path: _adapter(path, classes) for path in found}
    any_port = re.sub(r":\d+", "", hca)
    chosen_devices = [path for path in found if not hca or chosen(f"{adapters[path]}:1", any_port)]
    if not chosen_devices:
        there = ", ".join(sorted(adapters.values()))
        yield f"no device in {devices} is of an adapter that {hca} names; there are devices of {there}"
    closed = {path: error for path in chosen_devices if (error := _opening_error(path)) is not None}
    if closed and (hca or len(closed) == len(chosen_devices)):
        named = ", ".join(f"{path} ({adapters[path]}): {error}" for path, error in closed.items())
        yield f"devices that cannot be opened: {named}"


def _adapter(device: pathlib.Path, classes: pathlib.Path) -> str:
    """Return the adapter of a device by the name that NCCL knows, or the device's name if /sys does not list it."""
    try:
        return (classes / device.name / "ibdev").read_text(encoding="ascii").strip()
    except OSError:
        return device.name


def _opening_error(device: pathlib.Path) -> str | None:
    try:
        os.close(os.open(device, os.O_RDWR | os.O_CLOEXEC))
    except OSError as error:
        return error.strerror
    return None
