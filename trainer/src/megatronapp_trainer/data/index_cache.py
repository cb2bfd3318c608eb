"""Cache of megatron-core's orders of samples, built by any rank, on shared and on separate file systems.

megatron-core lets rank 0 alone write and all others read, which fails where nodes do not share a file system, and a
writer that dies leaves files that seem whole. Here a builder works in a separate directory, in which existing files are
linked, and renames new ones into the cache. Any rank may build at any time: two builders make the same.
"""

import contextlib
import hashlib
import json
import os
import pathlib
import shutil
import sys
import tempfile
import time
import types
from collections.abc import Iterator, Sequence
from typing import Any

from megatronapp_trainer.errors import StorageError

_DATASET_MODULES = (
    "megatron.core.datasets.gpt_dataset",
    "megatron.core.datasets.blended_dataset",
    "megatron.core.datasets.blended_megatron_dataset_builder",
    "megatron.core.datasets.masked_dataset",
)

_STAGE = ".building-"
_ABANDONED_SECONDS = 24 * 3600.0
"""Age above which a stage that no builder has written to since is a leftover of a killed one."""


def cache_directory(chosen: str | None, prefixes: Sequence[str]) -> pathlib.Path:
    """Return the cache of these corpora in their present state: a corpus that is prepared again gets another one."""
    root = pathlib.Path(chosen) if chosen is not None else pathlib.Path(prefixes[0]).parent / "index-cache"
    return root / _identity(prefixes)


def _identity(prefixes: Sequence[str]) -> str:
    facts = []
    for prefix in prefixes:
        stat = os.stat(prefix + ".idx")
        facts.append([prefix, stat.st_size, stat.st_mtime_ns])
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


@contextlib.contextmanager
def staged(cache: pathlib.Path) -> Iterator[pathlib.Path]:
    """Create a directory to build in, with links to the files of `cache`; new files are moved to `cache` at the end.

    No two builders share that directory, nor do those of a container that starts again with equal names and process
    ids: what a killed builder left is not read, and is removed a day later.

    Raises:
        StorageError: the cache cannot be written.
    """
    stage: pathlib.Path | None = None
    try:
        cache.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(cache)
        stage = pathlib.Path(tempfile.mkdtemp(prefix=_STAGE, dir=cache))
        for known in cache.iterdir():
            if known.is_file():
                (stage / known.name).symlink_to(known.absolute())
        yield stage
        for made in stage.iterdir():
            if not made.is_symlink():
                made.replace(cache / made.name)
    except OSError as error:
        raise StorageError(
            f"cannot store the order of samples in {error.filename or cache}: {error.strerror or error}; "
            "give a writable directory with free space with --data-cache-path"
        ) from error
    finally:
        if stage is not None:
            shutil.rmtree(stage, ignore_errors=True)


def _remove_abandoned(cache: pathlib.Path) -> None:
    """Remove stages of builders that were killed, as far as this process may."""
    for stage in cache.glob(_STAGE + "*"):
        with contextlib.suppress(OSError):  # its builder, or another one, has just removed it
            newest = max(path.lstat().st_mtime for path in (stage, *stage.iterdir()))
            if time.time() - newest > _ABANDONED_SECONDS:
                shutil.rmtree(stage, ignore_errors=True)


@contextlib.contextmanager
def without_process_group() -> Iterator[None]:
    """Hide the process group from megatron-core's dataset modules: they build directly, without barriers.

    Only the name `torch` inside these modules is replaced, and only inside the context.
    """
    modules = [sys.modules[name] for name in _DATASET_MODULES if name in sys.modules]
    originals = [module.torch for module in modules]
    try:
        for module, torch in zip(modules, originals, strict=True):
            module.torch = _SingleProcessTorch(torch)  # type: ignore[attr-defined]
        yield
    finally:
        for module, torch in zip(modules, originals, strict=True):
            module.torch = torch  # type: ignore[attr-defined]


class _SingleProcessTorch(types.ModuleType):
    """Proxy of torch, with a `distributed` that has no process group."""

    def __init__(self, torch: Any) -> None:  # noqa: ANN401  # a module, or a substitute for it
        super().__init__("torch")
        self._torch = torch
        self.distributed = types.SimpleNamespace(is_initialized=lambda: False, get_rank=lambda: 0)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        return getattr(self._torch, name)
