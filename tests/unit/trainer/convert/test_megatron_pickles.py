"""Reading files of other programs runs none of their code."""

import pathlib

import pytest
import torch

from megatronapp_trainer.convert.megatron.pickles import read_torch
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
