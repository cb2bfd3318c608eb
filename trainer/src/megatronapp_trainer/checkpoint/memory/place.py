"""Place of a worker's files in memory, which outlive its ranks: they are files of the job, not of an attempt.

On a cluster it is the pod's memory volume, which stays when ranks or containers start again and ends with the pod. On
one computer workers share a directory, and the index of the worker in the names keeps their files apart.
"""

import hashlib
import os
import pathlib
from dataclasses import dataclass

import psutil

from megatronapp_common.names import DEFAULT_SHM_DIR, Env
from megatronapp_trainer.checkpoint.memory.parts import PART_SUFFIX
from megatronapp_trainer.config import TrainerConfig
from megatronapp_trainer.errors import StorageError, UsageError
from megatronapp_trainer.parallel.agreement import broadcast_from_zero, gather_from_all, on_all_ranks, rank

_CGROUP = pathlib.Path("/sys/fs/cgroup")
_DIRECTORY_FLAG = "--non-persistent-local-ckpt-dir"


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPlace:
    """Directory and names of the files of this rank's worker, and the ranks that share them."""

    directory: pathlib.Path
    prefix: str
    workers: tuple[str, ...]
    """Name of the worker of each rank."""
    rank: int

    @property
    def worker(self) -> str:
        """Return the name of this rank's worker."""
        return self.workers[self.rank]

    @property
    def ranks(self) -> list[int]:
        """Return the ranks of this worker."""
        return [rank for rank, worker in enumerate(self.workers) if worker == self.worker]

    @property
    def is_first(self) -> bool:
        """Return True on the rank that lists and deletes the files of its worker."""
        return self.ranks[0] == self.rank

    def path(self, name: str) -> pathlib.Path:
        """Return the path of a file of this worker."""
        return self.directory / f"{self.prefix}.{name}"

    def remove(self, keep: frozenset[pathlib.Path] = frozenset()) -> None:
        """Delete the files of this worker, but for some."""
        for path in self.directory.glob(f"{self.prefix}.rank*"):
            if path not in keep:
                path.unlink(missing_ok=True)


def find_place(config: TrainerConfig) -> MemoryPlace:
    """Return the place of this rank's files; collective.

    Raises:
        UsageError: on every rank, if the directory of one does not exist or cannot be written.
    """
    directory = pathlib.Path(
        config.checkpoint.non_persistent_local_ckpt_dir or os.environ.get(Env.SHM_DIR) or DEFAULT_SHM_DIR
    )
    on_all_ranks(lambda: _require_directory(directory))
    prefix = f"{broadcast_from_zero(lambda: _job_prefix(config))}-w{_worker_index()}"
    return MemoryPlace(directory=directory, prefix=prefix, workers=tuple(gather_from_all(prefix)), rank=rank())


def _require_directory(directory: pathlib.Path) -> None:
    if not directory.is_dir() or not os.access(directory, os.W_OK | os.X_OK):
        raise UsageError(
            f"checkpoints in memory are files in {directory}, which is no directory that this user can write; give "
            f"{_DIRECTORY_FLAG} a directory in memory, or set {Env.SHM_DIR}"
        )


def _job_prefix(config: TrainerConfig) -> str:
    """Return a prefix of the job, by which its backend deletes the files at the end; of ranks alone, of --save."""
    uid = os.environ.get(Env.JOB_UID)
    if uid:
        return f"megatronapp-{uid}-memory"
    assert config.checkpoint.save is not None, "a rule of the flags"
    folder = pathlib.Path(config.checkpoint.save)
    try:
        name = os.fsencode(folder.resolve())
    except OSError as error:
        raise StorageError(f"--save {folder} cannot be read: {error.strerror or error}") from error
    return f"megatronapp-{hashlib.sha256(name).hexdigest()[:16]}-memory"


def _worker_index() -> str:
    index = os.environ.get(Env.WORKER_INDEX) or os.environ.get("GROUP_RANK")
    if index:
        return index
    return str(rank() // max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))


def free_bytes(directory: pathlib.Path) -> int:
    """Return how much more memory files in a directory can take: of the file system, the host and the container."""
    found = os.statvfs(directory)
    space = found.f_bavail * found.f_frsize if found.f_blocks else None  # a tmpfs may have no limit
    limits = [space, psutil.virtual_memory().available, _container_bytes()]
    return min(limit for limit in limits if limit is not None)


def _container_bytes() -> int | None:
    """Return the memory that is left to this container, None without a limit (cgroup v2)."""
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        if limit == "max":
            return None
        used = int((_CGROUP / "memory.current").read_text())
        counters = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
        reclaimable = sum(int(counters.get(name, 0)) for name in ("active_file", "inactive_file"))  # cached disk files
        return max(0, int(limit) - used + reclaimable)
    except (OSError, ValueError):
        return None


def allocated_bytes(place: MemoryPlace) -> int:
    """Return the bytes that the files of this worker have already."""
    return sum(path.stat().st_blocks * 512 for path in place.directory.glob(f"{place.prefix}.rank*{PART_SUFFIX}"))
