"""Room for shipments as the operator computes it from a manifest is enough for what passes save."""

from collections.abc import Callable
from typing import Any

import pytest
from shipped_chunk import LLAMA, ShippedChunk

from megatronapp_common.job import Spec
from megatronapp_common.job.shipment_memory import pass_bytes

pytestmark = pytest.mark.torch
RunRanks = Callable[..., list[Any]]
MODEL = {"numLayers": 2, "hiddenSize": 128, "numAttentionHeads": 4, "seqLength": 64, "vocabSize": 120}
TRAINING = {"microBatchSize": 2, "trainIters": 4, "lr": 0.01}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "dropout": ("", {}, {}),
    "local": ("--transformer-impl local --openai-gelu", {"transformerImpl": "local"}, {}),
    "llama-bf16": (f"{LLAMA} --bf16", {"swiglu": True, "numQueryGroups": 2}, {"precision": "bf16"}),
    "llama": (LLAMA, {"swiglu": True, "numQueryGroups": 2}, {}),
}


def shipped(flags: str) -> int:
    """Return the bytes of the places of a pass, as many as it has messages and each as large as the largest."""
    from megatronapp_trainer.fbd.graph.shipments import shipment_layout

    chunk = ShippedChunk(f"--hidden-size 128 --seq-length 64 {flags}")
    layout = shipment_layout(chunk.graph.saved, chunk.graph.region_states, ends_with_report=True)
    return len(layout.sizes) * max(layout.sizes)


@pytest.mark.full("a sweep of models", but=("dropout", "llama-bf16"))
@pytest.mark.parametrize("name", CASES)
def test_the_bound_of_a_pass_is_above_its_messages_and_not_far(run_ranks: RunRanks, name: str) -> None:
    flags, model, training = CASES[name]
    bound = pass_bytes(Spec.model_validate({"model": MODEL | model, "training": TRAINING | training}))
    (needed,) = run_ranks(1, shipped, flags)
    small = 256 << 10  # what does not grow with the model, such as random states
    assert needed <= bound <= 3 * needed + small
