"""Data sets of the package `datasets`: local files, folders, or names of the hub; optional."""

import functools
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from megatronapp_trainer.errors import DataError, UsageError

_FORMATS = {
    ".parquet": "parquet",
    ".jsonl": "json",
    ".json": "json",
    ".csv": "csv",
    ".txt": "text",
    ".arrow": "arrow",
}
_COMPRESSIONS = (".gz", ".zst", ".xz", ".bz2")


class StreamedPart(Protocol):
    """Methods used of an `IterableDataset`."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Iterate over the examples, from the loaded state on."""

    def state_dict(self) -> dict[str, Any]:
        """Return where the iteration is, in values of JSON."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Let the next iteration begin there."""


def open_parts(paths: Sequence[str], split: str, parts: int) -> Callable[[int], StreamedPart]:
    """Open a data set and return a function that returns one of its disjoint parts, at its beginning.

    Parts are whole files where their number can be divided by `parts`, otherwise every `parts`-th example.

    Raises:
        UsageError: the package is missing, or the formats of the files differ or are not known.
        DataError: the data set cannot be opened.
    """
    try:
        import datasets
        from datasets.distributed import split_dataset_by_node
    except ImportError as error:
        raise UsageError("--hf-dataset needs the package datasets; install megatronapp-trainer[datasets]") from error
    datasets.disable_progress_bars()
    arguments = _load_arguments(paths)
    try:
        whole = datasets.load_dataset(**arguments, split=split, streaming=True)
    except Exception as error:  # of many libraries
        raise DataError(f"--hf-dataset {' '.join(paths)} cannot be opened: {error}") from error
    return functools.partial(_part, split_dataset_by_node, whole, parts)


def _part(split_by_node: Callable[..., StreamedPart], whole: Any, parts: int, number: int) -> StreamedPart:  # noqa: ANN401 - untyped library
    return split_by_node(whole, rank=number, world_size=parts)


def _load_arguments(paths: Sequence[str]) -> dict[str, Any]:
    files = [path for path in paths if pathlib.Path(path).is_file()]
    if len(files) == len(paths):
        formats = {_format_of(path) for path in files}
        if len(formats) > 1:
            raise UsageError(f"--hf-dataset takes files of a single format, not {', '.join(sorted(formats))}")
        return {"path": formats.pop(), "data_files": files}
    if files or len(paths) > 2:
        missing = [path for path in paths if path not in files]
        raise UsageError(f"--hf-dataset: {' '.join(missing)} does not exist; give files, a folder, or NAME [CONFIG]")
    return {"path": paths[0], **({"name": paths[1]} if len(paths) > 1 else {})}


def _format_of(path: str) -> str:
    suffixes = [suffix for suffix in pathlib.Path(path).suffixes if suffix not in _COMPRESSIONS]
    kind = _FORMATS.get(suffixes[-1] if suffixes else "")
    if kind is None:
        raise UsageError(f"--hf-dataset {path}: the format is not known; take one of {', '.join(_FORMATS)}")
    return kind
