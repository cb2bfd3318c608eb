"""Files that hold the values of flags: `--data-args-path` and `--per-split-data-args-path`."""

import dataclasses
import json
import pathlib
from typing import Any

from megatronapp_trainer.config.data import DataConfig
from megatronapp_trainer.errors import UsageError

_SPLITS = ("train", "valid", "test")


def with_data_files(data: DataConfig) -> DataConfig:
    """Return the flags of data with the values of the files that they name.

    Raises:
        UsageError: a file cannot be read, has another form, or the flag whose values it holds is given, too.
    """
    if data.data_args_path is not None:
        _refuse_both("--data-args-path", {"--data-path": data.data_path})
        values = _read("--data-args-path", data.data_args_path).split()
        if not values:
            raise UsageError(f"--data-args-path {data.data_args_path} is empty; write the values of --data-path there")
        data = dataclasses.replace(data, data_path=tuple(values))
    if data.per_split_data_args_path is not None:
        given = {f"--{split}-data-path": getattr(data, f"{split}_data_path") for split in _SPLITS}
        _refuse_both("--per-split-data-args-path", {"--data-path": data.data_path, **given})
        found = _read_splits(data.per_split_data_args_path)
        data = dataclasses.replace(
            data,
            train_data_path=found.get("train"),
            valid_data_path=found.get("valid"),
            test_data_path=found.get("test"),
        )
    return data


def _refuse_both(flag: str, others: dict[str, tuple[str, ...] | None]) -> None:
    for other, values in others.items():
        if values is not None:
            raise UsageError(f"{flag} and {other} exclude each other; leave one of them out")


def _read(flag: str, path: str) -> str:
    try:
        return pathlib.Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{flag} {path} cannot be read: {error}") from error


def _read_splits(path: str) -> dict[str, tuple[str, ...]]:
    """Read the values of each split: a list, or a text of values."""
    flag = "--per-split-data-args-path"
    try:
        found: Any = json.loads(_read(flag, path))
    except ValueError as error:
        raise UsageError(f"{flag} {path} is not valid JSON: {error}") from error
    if not isinstance(found, dict) or not found or set(found) - set(_SPLITS):
        raise UsageError(
            f'{flag} {path} must be an object such as {{"train": ["0.3", "a", "0.7", "b"], "valid": ["c"]}}'
        )
    return {split: values for split, value in found.items() if (values := _values(value, f"{flag} {path}: {split}"))}


def _values(value: object, where: str) -> tuple[str, ...]:
    if value is None:
        return ()
    if isinstance(value, str):
        return tuple(value.split())
    if isinstance(value, list) and all(isinstance(entry, str | int | float) for entry in value):
        return tuple(str(entry) for entry in value)
    raise UsageError(f"{where} must be a list of values, or a text of them")
