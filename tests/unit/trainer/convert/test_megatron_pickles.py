"""Reading files of other programs runs none of their code."""

import pathlib
import pickle

import pytest
import torch
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, TensorProperties

from megatronapp_trainer.checkpoint.pickles import OpaqueObject, read_plain, read_torch
from megatronapp_trainer.errors import DataError


class Writes(torch.nn.Module):
    """A program that writes a file as soon as torch.load reads it."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path
        self.values = torch.zeros(2)

    @torch.jit.export
    def __getstate__(self) -> tuple[torch.Tensor, str, bool]:
        return (self.values, self.path, self.training)

    @torch.jit.export
    def __setstate__(self, state: tuple[torch.Tensor, str, bool]) -> None:
        torch.save(state[0], state[1])
        self.values, self.path, self.training = state[0], state[1], state[2]

    def forward(self) -> torch.Tensor:
        return self.values


def test_a_torchscript_program_is_refused_unread(tmp_path: pathlib.Path) -> None:
    source, written = tmp_path / "model_optim_rng.pt", tmp_path / "written"
    torch.jit.script(Writes(str(written))).save(str(source))  # type: ignore[no-untyped-call]
    with pytest.raises(DataError, match="TorchScript"):
        read_torch(source)
    assert not written.exists()


def test_members_of_enumerations_are_read_as_each_python_writes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = TensorProperties(dtype=torch.bfloat16, memory_format=torch.contiguous_format)
    newer = pickle.dumps(properties)
    # Python 3.11.0 to 3.11.3, which Debian 12 has
    monkeypatch.setattr(_MEM_FORMAT_ENCODING, "__reduce_ex__", lambda member, _: (getattr, (type(member), member.name)))
    older = pickle.dumps(properties)
    assert b"getattr" in older and b"getattr" not in newer
    assert read_plain(older) == read_plain(newer) == properties


def test_no_other_attribute_is_fetched() -> None:
    class Fetched:
        def __reduce__(self) -> tuple[object, tuple[object, str]]:
            return getattr, (TensorProperties, "__init__")

    assert isinstance(read_plain(pickle.dumps(Fetched())), OpaqueObject)
