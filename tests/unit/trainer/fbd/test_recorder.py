"""Recording of what a forward pass saves: what differs from the first pass is refused, and nothing stays."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.torch

RunRanks = Callable[..., list[Any]]
LAYERS = 3


def record_passes() -> dict[str, Any]:
    """Errors of passes over layers that save one tensor together, and the recorded passes that stay in memory."""
    import torch

    from megatronapp_trainer.errors import TransferError
    from megatronapp_trainer.fbd.graph import recorder

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(4))

        def forward(self, hidden: torch.Tensor, shared: torch.Tensor) -> torch.Tensor:
            return hidden * self.weight * shared

    class Chunk(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList([Layer() for _ in range(LAYERS)])
            self.changed: int | None = None
            """Layer that saves another tensor than the others."""
            self.dtype = torch.float32

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            first: Any = self.layers[0]
            shared = (torch.arange(4.0) + 1) * first.weight  # with a graph
            for index, layer in enumerate(self.layers):
                hidden = layer(hidden, shared * 2 if index == self.changed else shared)
            return torch.tanh(hidden.to(self.dtype)).sum()

    alive = []

    class WatchedPass(recorder._RecordedPass):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            alive.append(weakref.ref(self))

    patched: Any = recorder
    patched._RecordedPass = WatchedPass
    chunk = Chunk()
    saved, _ = recorder.learn_saved_tensors(chunk, lambda: chunk(torch.ones(4)))
    forward = recorder.ForwardRecorder(chunk, saved)
    errors: dict[str, str] = {}

    def attempt(name: str) -> None:
        try:
            with forward.recording(lambda _group, _segments: None):
                chunk(torch.ones(4))
        except TransferError as error:
            errors[name] = str(error)

    attempt("same")
    for chunk.changed in range(1, LAYERS):
        attempt(f"layer {chunk.changed}")
    chunk.changed, chunk.dtype = None, torch.float64
    attempt("dtype")
    gc.collect()
    return {"errors": errors, "passes": len(alive), "alive": sum(found() is not None for found in alive)}


def test_what_differs_from_the_first_pass_is_refused_and_no_pass_stays(run_ranks: RunRanks) -> None:
    (found,) = run_ranks(1, record_passes)
    errors = found["errors"]
    assert list(errors) == ["layer 1", "layer 2", "dtype"]
    for layer in (1, 2):
        assert "shares no memory with those it did in the first pass" in errors[f"layer {layer}"]
    assert "of torch.float64" in errors["dtype"]
    assert found["passes"] == 1 + len(errors)
    assert found["alive"] == 0
