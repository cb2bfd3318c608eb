"""The files of a worker in shared memory."""

import glob
import pathlib

from megatronapp_common.names import ShmFile

RINGS = (ShmFile.RANK_RING.format(rank="*"), str(ShmFile.WORKER_RING), str(ShmFile.PROGRESS))


def worker_ring(directory: pathlib.Path, prefix: str) -> pathlib.Path:
    """Return the path of the launcher's own ring."""
    return directory / f"{prefix}.{ShmFile.WORKER_RING}"


def remove_leftovers(directory: pathlib.Path, prefix: str) -> None:
    """Remove what an earlier life of this worker wrote; the agent's control document may be new and stays."""
    for suffix in RINGS:
        for path in directory.glob(f"{glob.escape(prefix)}.{suffix}"):
            path.unlink(missing_ok=True)


def remove_all(directory: pathlib.Path, prefix: str) -> None:
    """Remove every file of this worker."""
    for path in directory.glob(f"{glob.escape(prefix)}.*"):
        path.unlink(missing_ok=True)
