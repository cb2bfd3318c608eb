"""Data sets of the package `datasets`: local files, folders, or names of the hub; optional."""

import functools
import os
import pathlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from megatronapp_trainer.errors import DataError, UsageError

_TEXT = "text"
_FORMATS = {
    ".parquet": "parquet",
    ".jsonl": "json",
    ".json": "json",
    ".csv": "csv",
    ".txt": _TEXT,
    ".arrow": "arrow",
}
_COMPRESSIONS = (".gz", ".zst", ".xz", ".bz2")
_HIDDEN = (".", "__")
"""Beginnings of names that the package does not read."""
_LARGEST_TEXT_BYTES = 64 << 20
"""Size of the largest .txt: it is a single document, whose remaining tokens are in memory and in checkpoints."""


class StreamedPart(Protocol):
    """Methods used of an `IterableDataset`."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Iterate over the examples, from the loaded state on."""

    def state_dict(self) -> dict[str, Any]:
        """Return where the iteration is, in values of JSON."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Let the next iteration begin there."""


def open_parts(flag: str, paths: Sequence[str], split: str, parts: int) -> Callable[[int], StreamedPart]:
    """Open a data set and return a function that returns one of its disjoint parts, at its beginning.

    Parts are whole files where their number can be divided by `parts`, otherwise every `parts`-th example. A file of
    plain text is an example.

    Raises:
        UsageError: the package is missing, a file is too large, or the formats of the files differ or are not known.
        DataError: the data set cannot be opened.
    """
    arguments = load_arguments(flag, paths)
    # The package counts each use at a server, also that of local files, and each rank would wait for the answer.
    os.environ.setdefault("HF_UPDATE_DOWNLOAD_COUNTS", "0")
    try:
        import datasets
        from datasets.distributed import split_dataset_by_node
    except ImportError as error:
        raise UsageError(f"{flag} needs the package datasets; install megatronapp-trainer[datasets]") from error
    datasets.disable_progress_bars()
    try:
        if "data_files" not in arguments and (found := _text_files(datasets.load_dataset_builder(**arguments))):
            _check_texts(flag, [path for path in found if os.path.isfile(path)])
            arguments["sample_by"] = "document"
        whole = datasets.load_dataset(**arguments, split=split, streaming=True)
    except UsageError:
        raise
    except Exception as error:  # of many libraries
        raise DataError(
            f"{flag} {' '.join(paths)} cannot be opened with --hf-split {split}: {cause_of(error)}"
        ) from error
    return functools.partial(_part, split_dataset_by_node, whole, parts)


def _text_files(builder: Any) -> list[str]:  # noqa: ANN401 - untyped library
    """Return the files of a data set of plain text; empty for another one."""
    if not hasattr(builder.config, "sample_by"):
        return []
    return [path for files in (builder.config.data_files or {}).values() for path in files]


def _check_texts(flag: str, files: Sequence[str]) -> None:
    """Raise UsageError for a file of plain text that is too large for a single document."""
    for path in files:
        if (size := os.path.getsize(path)) > _LARGEST_TEXT_BYTES:
            raise UsageError(
                f"{flag} {path} has {size >> 20} MiB: a .txt is a single document, of at most "
                f"{_LARGEST_TEXT_BYTES >> 20} MiB; write a file for each document, or JSON lines, or prepare the text "
                "with `megatronapp data prepare` and give it by --data-path"
            )


def local_files(paths: Sequence[str]) -> list[tuple[str, int]]:
    """Return names, in folders relative to them, and sizes of the local files of a data set; empty for the hub's."""
    found: list[tuple[str, int]] = []
    for path in paths:
        if os.path.isfile(path):
            found.append((os.path.basename(path), os.path.getsize(path)))
        for folder, folders, names in os.walk(path):
            folders[:] = [name for name in folders if not name.startswith(_HIDDEN)]
            shown = [name for name in names if not name.startswith(_HIDDEN) and _suffix(name) in _FORMATS]
            within = [os.path.join(folder, name) for name in shown]
            found += [(os.path.relpath(name, path), os.path.getsize(name)) for name in within]
    return sorted(found)


def is_text(files: Sequence[tuple[str, int]]) -> bool:
    """Return True if most of these files are plain text, which is how the package recognises a folder."""
    suffixes = Counter(_suffix(name) for name, _ in files)
    return bool(suffixes) and _FORMATS[suffixes.most_common(1)[0][0]] == _TEXT


def _part(split_by_node: Callable[..., StreamedPart], whole: Any, parts: int, number: int) -> StreamedPart:  # noqa: ANN401 - untyped library
    return split_by_node(whole, rank=number, world_size=parts)


def cause_of(error: BaseException) -> str:
    """Describe an error with those that it was raised for: the last error of `datasets` is often without a reason."""
    texts: list[str] = []
    found: BaseException | None = error
    while found is not None:
        text = str(found) or type(found).__name__
        if text not in texts:
            texts.append(text)
        found = found.__cause__ or (None if found.__suppress_context__ else found.__context__)
    return "; ".join(texts)


def load_arguments(flag: str, paths: Sequence[str]) -> dict[str, Any]:
    """Return the arguments of `datasets.load_dataset` for the values of a flag. Needs no package.

    Raises:
        UsageError: a file or folder does not exist, a file is empty or too large, or formats of files differ or are
            not known.
    """
    files = [path for path in paths if pathlib.Path(path).is_file()]
    if len(files) == len(paths):
        empty = [path for path in files if os.path.getsize(path) == 0]
        if empty:
            raise UsageError(f"{flag}: {' '.join(empty)} is empty; leave it out, or write examples into it")
        formats = {_format_of(flag, path) for path in files}
        if len(formats) > 1:
            raise UsageError(f"{flag} takes files of a single format, not {', '.join(sorted(formats))}")
        (kind,) = formats
        if kind == _TEXT:
            _check_texts(flag, files)
            return {"path": kind, "data_files": files, "sample_by": "document"}
        return {"path": kind, "data_files": files}
    if any(pathlib.Path(path).is_dir() for path in paths[1:]) or (files and any(map(os.path.isdir, paths))):
        raise UsageError(
            f"{flag} takes a single folder, or files; give the files of several folders, such as a/*.parquet"
        )
    missing = [path for path in paths if path not in files and (files or len(paths) > 2 or _means_file(path))]
    if missing:
        raise UsageError(
            f"{flag}: {' '.join(missing)} does not exist; give files, a folder, or NAME [CONFIG] of the hub"
        )
    return {"path": paths[0], **({"name": paths[1]} if len(paths) > 1 else {})}


def _means_file(path: str) -> bool:
    """Return whether a value can be no name of the hub, nor of a configuration."""
    return not os.path.exists(path) and (
        path.startswith(("/", "./", "../", "~")) or path.count("/") > 1 or "*" in path or _suffix(path) in _FORMATS
    )


def _suffix(path: str) -> str:
    suffixes = [suffix for suffix in pathlib.Path(path).suffixes if suffix not in _COMPRESSIONS]
    return suffixes[-1] if suffixes else ""


def _format_of(flag: str, path: str) -> str:
    kind = _FORMATS.get(_suffix(path))
    if kind is None:
        raise UsageError(f"{flag} {path}: the format is not known; take one of {', '.join(_FORMATS)}")
    return kind
