"""torch's file writer, with the size and the checksum of every data file as it is written."""

import contextlib
import errno
import io
import os
import pathlib
from collections.abc import Iterator

from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter

from megatronapp_trainer.checkpoint.checksums import ChecksummedFile, WrittenFile
from megatronapp_trainer.checkpoint.directory import DATA_SUFFIX

CORE_FORMAT = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
"""Content of megatron-core's metadata.json."""


class ChecksummingWriter(FileSystemWriter):
    """Writes one data file in the calling thread, and syncs it to the disk."""

    def __init__(self, folder: pathlib.Path, *, per_thread_copy_ahead: int = 10_000_000) -> None:
        # SummedFile syncs on close, after it has flushed its own buffer; torch would sync before that.
        super().__init__(folder, thread_count=1, sync_files=False, per_thread_copy_ahead=per_thread_copy_ahead)
        self._files = _ChecksummingFiles()
        self.fs = self._files

    def written(self) -> dict[str, WrittenFile]:
        """Return the data files of this process, by name."""
        return self._files.written


class _ChecksummingFiles(FileSystem):
    def __init__(self) -> None:
        self.written: dict[str, WrittenFile] = {}

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        """Create nothing: a folder that was deleted has lost the files of other ranks, too. Raises OSError."""
        if not pathlib.Path(path).is_dir():
            raise FileNotFoundError(errno.ENOENT, "the folder of the checkpoint does not exist", os.fspath(path))

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        if mode != "wb" or not os.fspath(path).endswith(DATA_SUFFIX):
            with super().create_stream(path, mode) as stream:
                yield stream
            return
        place = pathlib.Path(path)
        with ChecksummedFile(place) as summed:
            yield summed
        self.written[place.name] = summed.written()
