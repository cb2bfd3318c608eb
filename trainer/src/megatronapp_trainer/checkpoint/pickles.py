"""Readers of other programs' pickles that run none of their code.

Tensors and plain values are read; all other objects become an `OpaqueObject`.
"""

import enum
import importlib
import io
import pathlib
import pickle
import types
import zipfile
from typing import IO, Any

import torch

from megatronapp_trainer.errors import DataError

_PLAIN = {
    ("argparse", "Namespace"),
    ("types", "SimpleNamespace"),
    ("collections", "OrderedDict"),
    ("collections", "defaultdict"),
    ("datetime", "timedelta"),
    ("_codecs", "encode"),
    ("torch", "Size"),
    ("torch", "device"),
    ("torch._utils", "_rebuild_tensor_v2"),
    ("torch._utils", "_rebuild_parameter"),
    ("torch.nn.parameter", "Parameter"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    *(
        ("torch.distributed.checkpoint.metadata", name)
        for name in (
            "Metadata",
            "MetadataIndex",
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    ),
    *(("builtins", name) for name in ("set", "frozenset", "slice", "complex", "bytearray", "int", "float", "list")),
}


class OpaqueObject:
    """Placeholder for an object of an unknown class; accepts any state of a pickle."""

    def __init__(self, *_arguments: object, **_keywords: object) -> None:
        pass

    def __call__(self, *_arguments: object, **_keywords: object) -> "OpaqueObject":
        """Behave as a constructor, which returns an object."""
        return self

    def __setstate__(self, _state: object) -> None:
        pass

    def __setitem__(self, _key: object, _value: object) -> None:
        pass

    def append(self, _value: object) -> None:
        """Accept an item, as a list does."""

    def extend(self, _values: object) -> None:
        """Accept items, as a list does."""


def _member(owner: object, name: str) -> object:
    """Return the member of an enumeration, the only permitted use of `getattr`."""
    if isinstance(owner, type) and issubclass(owner, enum.Enum):
        return owner.__members__[name]
    return OpaqueObject()


class PlainUnpickler(pickle.Unpickler):
    """Imports only what is listed here, and torch's types of numbers."""

    def find_class(self, module: str, name: str) -> Any:  # noqa: ANN401 - a class or function
        """Return the listed class or function of this name, or `OpaqueObject`."""
        if (module, name) in _PLAIN:
            return getattr(importlib.import_module(module), name)
        if (module, name) == ("builtins", "getattr"):  # as Python 3.11.0 to 3.11.3 pickles members of enumerations
            return _member
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if module == "torch" and name.endswith("Storage"):
            return getattr(torch, name)
        return OpaqueObject


def _load(stream: IO[bytes], **keywords: Any) -> Any:  # noqa: ANN401 - whatever it holds
    return PlainUnpickler(stream, **keywords).load()


PLAIN = types.SimpleNamespace(__name__="plain", Unpickler=PlainUnpickler, load=_load)
"""Pickle module in the form that `torch.load` accepts."""


def read_torch(path: pathlib.Path) -> Any:  # noqa: ANN401 - whatever it holds
    """Read a file of torch.save; tensors are mapped, so that they take memory only while they are used.

    Raises:
        OSError: the file cannot be read.
        DataError: it is a TorchScript program, which torch would run in spite of the unpickler.
        Exception: any error that a damaged file makes torch raise.
    """
    mapped = _is_archive(path)
    if mapped and _is_program(path):
        raise DataError(f"{path} is a TorchScript program, not a checkpoint; it is not read, as reading would run it")
    return torch.load(path, map_location="cpu", mmap=mapped, weights_only=False, pickle_module=PLAIN)


def read_plain(content: bytes) -> Any:  # noqa: ANN401 - whatever it holds
    """Read the content of a pickle."""
    return _load(io.BytesIO(content))


def _is_program(path: pathlib.Path) -> bool:
    """Return True for an archive of torch.jit.save, recognised by the same record as in torch.load."""
    with zipfile.ZipFile(path) as archive:
        return any(name.rpartition("/")[2] == "constants.pkl" for name in archive.namelist())


def _is_archive(path: pathlib.Path) -> bool:
    """Return True if torch 1.6 or newer has written it, which writes archives."""
    with path.open("rb") as stream:
        return stream.read(4) == b"PK\x03\x04"
