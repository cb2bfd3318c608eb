"""Backward passes on shipped tensors: gradients bit-equal to those of plain ones, from a graph built once."""

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import pytest
from shipped_chunk import LLAMA, MICROBATCHES, ShippedChunk

pytestmark = pytest.mark.torch

RunRanks = Callable[..., list[Any]]
CASES = {
    "dropout": "",  # 0.1 by default
    "llama-bf16": f"{LLAMA} --bf16 --attention-dropout 0 --hidden-dropout 0",
    "local": "--transformer-impl local --openai-gelu",
    "full-recompute": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "selective-recompute": "--recompute-granularity selective",
    "half-recomputed-bf16": "--recompute-granularity full --recompute-method block --recompute-num-layers 1 --bf16",
}
LAYERS = 2
RECOMPUTED = {
    "": "",
    "full": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2",
    "selective": "--recompute-granularity selective",
}


def compare(flags: str, order: list[int]) -> dict[str, Any]:
    """Gradients with and without shipping, where the passes draw the same random numbers."""
    from megatronapp_trainer.checkpoint import random_states

    chunk = ShippedChunk(flags)
    states = random_states.capture()
    losses = [chunk.forward(batch) for batch in chunk.batches]
    expected = chunk.gradients(lambda microbatch: losses[microbatch].backward(), order)
    random_states.restore(states)
    shipped = [chunk.ship(batch) for batch in chunk.batches]
    forwards = chunk.forwards
    loss_gradient = chunk.torch.ones(())
    found = chunk.gradients(lambda microbatch: chunk.graph.backward(*shipped[microbatch], loss_gradient), order)
    return {
        "equal": all(chunk.torch.equal(*pair) for pair in zip(expected, found, strict=True)),
        "moved": any(bool(gradient.abs().sum()) for gradient in expected),
        "same form": chunk.saved == chunk.graph.saved,
        "forwards since": chunk.forwards - forwards,
    }


@pytest.mark.parametrize("flags", CASES.values(), ids=list(CASES))
def test_gradients_from_shipped_tensors_are_bit_equal(run_ranks: RunRanks, flags: str) -> None:
    order = list(range(MICROBATCHES))
    random.shuffle(order)
    (result,) = run_ranks(1, compare, flags, order)
    assert result == {"equal": True, "moved": True, "same form": True, "forwards since": 0}, order


def compare_modes(flags: str) -> dict[str, Any]:
    """For each mode, all built before: gradients equal to plain ones, bytes, and passes of modules by name."""
    from megatronapp_trainer.checkpoint import random_states
    from megatronapp_trainer.config import FbdConfig, ShipMode
    from megatronapp_trainer.fbd.ship_modes import ShipSwitch

    chunk = ShippedChunk(flags)
    states = random_states.capture()
    order = list(range(MICROBATCHES))
    losses = [chunk.forward(batch) for batch in chunk.batches]
    expected = chunk.gradients(lambda microbatch: losses[microbatch].backward(), order)
    config = dataclasses.replace(chunk.run.config, fbd=FbdConfig(fbd_ship="auto"))
    switch = ShipSwitch(config, [chunk.chunk])
    halves = {}
    for mode in ShipMode:
        switch.set(mode)
        chunk.build()
        halves[mode] = (chunk.saved, chunk.graph, chunk.recorder)

    def shipped_in(mode: ShipMode) -> dict[str, Any]:
        switch.set(mode)
        chunk.saved, chunk.graph, chunk.recorder = halves[mode]
        random_states.restore(states)
        shipped = [chunk.ship(batch) for batch in chunk.batches]
        chunk.passes.clear()
        ones = chunk.torch.ones(())
        found = chunk.gradients(lambda microbatch: chunk.graph.backward(*shipped[microbatch], ones), order)
        return {
            "equal": all(chunk.torch.equal(*pair) for pair in zip(expected, found, strict=True)),
            "bytes": sum(segment.bytes for segment in chunk.saved.segments),
            "passes": dict(chunk.passes),
            "groups": 1 + max(chunk.saved.groups),
            "in layers": sum("layers" in slot.module for slot in chunk.saved.slots),
        }

    return {str(mode): shipped_in(mode) for mode in reversed(ShipMode)}


@pytest.mark.parametrize("recomputed", ["", "full", "selective"])
def test_modes_ship_less_and_recompute_only_their_regions(run_ranks: RunRanks, recomputed: str) -> None:
    """The user's own recomputation changes nothing of a mode that is asked for."""
    (results,) = run_ranks(1, compare_modes, RECOMPUTED[recomputed])
    saved, selective, full = (results[mode] for mode in ("saved", "selective", "full"))
    assert saved["equal"] and selective["equal"] and full["equal"]
    assert saved["bytes"] > selective["bytes"] > full["bytes"]
    assert saved["groups"] == selective["groups"] == LAYERS + 2, "layers, what comes before, and what comes after"
    assert full["groups"] == LAYERS + 1, "the input of the last layer leaves with what comes after"
    assert full["in layers"] == 0
    assert saved["passes"] == {}
    assert list(selective["passes"].values()) == [LAYERS * MICROBATCHES], "core attention alone"
    assert full["passes"]["TransformerLayer"] == full["passes"]["SelfAttention"] == LAYERS * MICROBATCHES
    assert not {"GPTModel", "TransformerBlock", "VocabParallelEmbedding"} & set(full["passes"])


def refusals() -> list[str]:
    """Errors of passes that save other tensors than the first one, or whose tensors are written into."""
    from megatronapp_trainer.errors import TransferError

    chunk = ShippedChunk("--attention-dropout 0 --hidden-dropout 0")
    texts = []

    def attempt(change: Callable[[], Any]) -> None:
        try:
            with chunk.recorder.recording(lambda group, found: None):
                change()
        except TransferError as error:
            texts.append(str(error))

    attempt(lambda: None)
    half = chunk.torch.nn.functional.gelu
    attempt(lambda: half(chunk.torch.ones(3, requires_grad=True)))

    def double_input(module: Any, arguments: tuple[Any, ...], output: Any) -> None:
        with chunk.torch.no_grad():
            arguments[0].mul_(2)

    def overwrite() -> None:
        layer = chunk.chunk.module.decoder.layers[0].mlp.linear_fc2
        handle = layer.register_forward_hook(double_input)
        try:
            chunk.forward(chunk.batches[0])
        finally:
            handle.remove()

    attempt(overwrite)
    return texts


def test_a_pass_that_saves_something_else_is_refused(run_ranks: RunRanks) -> None:
    ((nothing, other, overwritten),) = run_ranks(1, refusals)
    assert "has saved 0 tensors" in nothing
    assert "in the first pass" in other
    assert "changed in place after it was saved" in overwritten
