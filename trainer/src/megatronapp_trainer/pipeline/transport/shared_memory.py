"""Shared memory of a rank: the file system that it is in, its free room, and what an inbox takes there."""

import os
import pathlib
from typing import NamedTuple

from megatronapp_common.names import Env
from megatronapp_trainer.errors import UsageError
from megatronapp_trainer.pipeline.transport.tensor_transport import shared_memory_directory

FILE_BYTES = 64 << 10
"""Upper bound of what a file takes beyond its slots, but for `SLOT_BYTES`."""
SLOT_BYTES = 640
"""Upper bound of what a slot takes beyond its message: its announcement, its return, its flags, and padding."""


class SharedMemory(NamedTuple):
    """The file system of a rank's files in shared memory."""

    identity: str
    """Equal on the ranks that share it."""
    free: int | None
    """Bytes; None for a file system without a limit."""


def find_shared_memory(flag: str) -> SharedMemory:
    """Return the shared memory of this rank. Raises UsageError, which names `flag`, if its directory cannot be read."""
    directory = shared_memory_directory()
    try:
        status, system = pathlib.Path(directory).stat(), os.statvfs(directory)
    except OSError as error:
        raise UsageError(f"{flag}: {directory}: {error.strerror}; set {Env.SHM_DIR} to a tmpfs") from error
    boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    free = system.f_bavail * system.f_frsize if system.f_blocks else None
    return SharedMemory(f"{boot} {status.st_dev} {status.st_ino}", free)


def inbox_bytes(slots: int, slot_bytes: int, *, on_device: bool) -> int:
    """Return an upper bound of the shared memory of an inbox; slots of a device are in its own memory."""
    return slots * (SLOT_BYTES if on_device else slot_bytes + SLOT_BYTES) + FILE_BYTES


def mebibytes(size: int) -> int:
    """Return bytes as MiB, rounded up."""
    return -(-size // (1 << 20))
