"""One forward pass of a whole model for the backward passes of a tensor group, against plain tensor parallelism."""

import collections
import math
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from shipped_chunk import LLAMA, ShippedChunk

from megatronapp_trainer.errors import TransferError
from megatronapp_trainer.fbd.graph.saved_tensors import (
    SavedSegment,
    SavedTensor,
    SavedTensors,
    SegmentMemory,
    slot_view,
)
from megatronapp_trainer.fbd.graph.slicing import PassSlicer, TensorPlace, slot_slices, weight_part

pytestmark = pytest.mark.torch

RunRanks = Callable[..., list[Any]]
FLOAT = torch.float32
VOCABULARY = 128
"""Tokens with padding, the same for all tensor-parallel sizes."""
STILL = "--attention-dropout 0 --hidden-dropout 0"
CASES = {
    "dropout": "--attention-dropout 0",  # 0.1 in hidden layers
    "sequence-parallel": f"{STILL} --sequence-parallel",
    "llama": f"{STILL} {LLAMA}",
    "llama-sequence-parallel": f"{STILL} {LLAMA} --sequence-parallel",
    "bf16": f"{STILL} --bf16",
    "local": f"{STILL} --transformer-impl local --openai-gelu --sequence-parallel",
    "full-recompute": "--attention-dropout 0 --recompute-granularity full --recompute-method uniform "
    "--recompute-num-layers 1",
    "selective-recompute": f"{STILL} --recompute-granularity selective --sequence-parallel",
}
FIRST = ("dropout", "llama-sequence-parallel", "bf16", "local", "full-recompute")
TOLERANCES = {"bf16": 2e-2}
"""Largest relative difference where sums are rounded to fewer bits; 1e-5 elsewhere."""


def flags_of(case: str, ranks: int) -> str:
    flags = f"{CASES[case]} --make-vocab-size-divisible-by {VOCABULARY // ranks} --tensor-model-parallel-size {ranks}"
    return flags if ranks > 1 else flags.replace("--sequence-parallel", "")


def run_whole_models(cases: Sequence[str], ranks: int, folder: str) -> None:
    """Write what the passes of whole models save, group by group, and each rank's parts of their weights."""
    from megatronapp_trainer.checkpoint import random_states

    for case in cases:
        chunk = ShippedChunk(flags_of(case, 1))
        random_states.restore(chunk.first_states)
        passes = [chunk.ship_groups(batch) for batch in chunk.batches]
        weights = [
            [weight_part(weight, rank, ranks).clone() for weight in chunk.chunk.parameters()] for rank in range(ranks)
        ]
        torch.save((chunk.saved, passes, weights), f"{folder}/{case}.pt")


def compare(cases: Sequence[str], ranks: int, folder: str) -> dict[str, dict[str, Any]]:
    """By case what `compare_gradients` returns."""
    return {case: compare_gradients(case, ranks, f"{folder}/{case}.pt") for case in cases}


def compare_gradients(case: str, ranks: int, path: str) -> dict[str, Any]:
    """The largest relative difference of a gradient to plain tensor parallelism, and two other results."""
    import torch.distributed as dist

    from megatronapp_trainer.checkpoint import random_states

    chunk = ShippedChunk(flags_of(case, ranks))
    place = TensorPlace(rank=dist.get_rank(), ranks=ranks, micro_batch_size=2, vocabulary=VOCABULARY)
    whole, passes, weights = torch.load(path, weights_only=False)
    random_states.restore(chunk.first_states)
    order = list(range(len(chunk.batches)))
    losses = [chunk.forward(batch) for batch in chunk.batches]
    expected = chunk.gradients(lambda microbatch: losses[microbatch].backward(), order)

    forwards, saved = chunk.forwards, chunk.graph.saved
    slices = PassSlicer(whole, saved, slot_slices(whole, saved, place))

    def backward(microbatch: int) -> None:
        groups, regions = passes[microbatch]
        segments = [torch.empty(segment.bytes, dtype=torch.uint8) for segment in saved.segments]
        for group, found in enumerate(groups):
            own = {at: segments[at] for at, segment in enumerate(saved.segments) if segment.group == group}
            for at in list(own):
                source = slices.source_range(at)
                if source is not None:
                    part = found[source.segment][source.offset : source.offset + saved.segments[at].bytes]
                    own.pop(at).copy_(part)
            slices.fill(group, found.__getitem__, own)
        chunk.graph.backward(list(map(SegmentMemory, segments)), regions, torch.ones(()))

    found = chunk.gradients(backward, order)
    pairs = zip(expected, found, strict=True)
    parts = zip(chunk.chunk.parameters(), weights[place.rank], strict=True)
    return {
        "difference": torch.stack([(plain - other).norm() / plain.norm() for plain, other in pairs]).max().item(),
        "weights": all(torch.equal(weight.view_as(part), part) for weight, part in parts),
        "forwards since": chunk.forwards - forwards,
        "as they are": sum(slices.source_range(number) is not None for number in range(len(saved.segments))),
        "segments": len(saved.segments),
    }


@pytest.mark.full("a sweep of models and ranks", but=("2-first",))
@pytest.mark.parametrize(
    ("ranks", "cases"),
    [(2, FIRST), (2, [case for case in CASES if case not in FIRST]), (4, ["sequence-parallel", "local"])],
    ids=["2-first", "2-others", "4"],
)
def test_gradients_from_a_merged_forward_are_those_of_tensor_parallelism(
    run_ranks: RunRanks, tmp_path: pathlib.Path, ranks: int, cases: Sequence[str]
) -> None:
    run_ranks(1, run_whole_models, cases, ranks, str(tmp_path))
    for rank, results in enumerate(run_ranks(ranks, compare, cases, ranks, str(tmp_path))):
        assert list(results) == list(cases)
        for case, result in results.items():
            assert result["difference"] <= TOLERANCES.get(case, 1e-5), (case, rank, result)
            assert result["weights"], (case, rank)
            assert result["forwards since"] == 0, (case, rank)
            assert result["as they are"] >= result["segments"] // 3, (case, rank, result)


def saved_by(*slots: Any) -> SavedTensors:
    """One group in which each slot, (module, shape, dtype), has a separate segment."""
    counts: collections.Counter[str] = collections.Counter()
    found, segments = [], []
    for number, (module, shape, dtype) in enumerate(slots):
        stride = tuple(math.prod(shape[dimension + 1 :]) for dimension in range(len(shape)))
        found.append(SavedTensor(module, counts[module], shape, stride, dtype, number, 0))
        segments.append(SavedSegment(math.prod(shape) * dtype.itemsize, 0))
        counts[module] += 1
    return SavedTensors(tuple(found), (0,) * len(slots), tuple(segments))


def place_of(rank: int, ranks: int = 2, batch: int = 2) -> TensorPlace:
    return TensorPlace(rank=rank, ranks=ranks, micro_batch_size=batch, vocabulary=4 * ranks)


def filled(whole: SavedTensors, part: SavedTensors, place: TensorPlace, *tensors: torch.Tensor) -> list[torch.Tensor]:
    """The tensors of a rank's slots."""
    targets = [torch.zeros(segment.bytes, dtype=torch.uint8) for segment in part.segments]
    segments = [tensor.contiguous().flatten().view(torch.uint8) for tensor in tensors]
    PassSlicer(whole, part, slot_slices(whole, part, place)).fill(0, segments.__getitem__, dict(enumerate(targets)))
    return [slot_view(targets[slot.segment], slot) for slot in part.slots if isinstance(slot, SavedTensor)]


@given(
    ranks=st.sampled_from([2, 4]),
    batch=st.integers(1, 3),
    heads=st.integers(1, 3),
    rows=st.integers(1, 4),
    flat=st.booleans(),
)
def test_parts_of_heads_are_together_the_whole(ranks: int, batch: int, heads: int, rows: int, flat: bool) -> None:
    def saved(heads: int) -> SavedTensors:
        shape = (batch * heads, rows, 1) if flat else (batch, heads, rows, 1)
        return saved_by(("decoder.layers.0.self_attention.core_attention", shape, FLOAT))

    whole = torch.arange(float(batch * heads * ranks * rows)).view(batch, heads * ranks, rows)
    parts = [filled(saved(heads * ranks), saved(heads), place_of(at, ranks, batch), whole) for at in range(ranks)]
    assert torch.equal(torch.cat([part.view(batch, heads, rows) for (part,) in parts], dim=1), whole)


def test_ids_and_masks_are_those_of_the_rank() -> None:
    ids = torch.tensor([[0, 3, 4], [7, 5, 1]])
    embedding = "embedding.word_embeddings"
    whole = saved_by((embedding, (2, 3), torch.int64))
    part = saved_by((embedding, (2, 3), torch.int64), (embedding, (2, 3), torch.bool))
    for rank in (0, 1):
        local, foreign = filled(whole, part, place_of(rank), ids)
        own = ids // 4 == rank
        assert torch.equal(foreign, ~own)
        assert torch.equal(local, torch.where(own, ids % 4, 0))


REFUSED = {
    "nothing there": ([("mlp", (4,), FLOAT)], [("mlp", (2,), FLOAT), ("mlp", (2,), FLOAT)]),
    "needs the ids": ([], [("embedding.word_embeddings", (2,), torch.int64)]),
    "saves nothing": ([("mlp", (4,), FLOAT), ("mlp", (4,), FLOAT)], [("mlp", (2,), FLOAT)]),
    "neither the same nor an equal part": ([("mlp", (6,), FLOAT)], [("mlp", (2,), FLOAT)]),
    "of one dimension": ([("mlp", (4, 4), FLOAT)], [("mlp", (2, 2), FLOAT)]),
    "tensor 0 of mlp": ([("mlp", (4,), FLOAT)], [("mlp", (4,), torch.bfloat16)]),
    "mixture of experts": ([("mlp.experts", (4,), FLOAT)], [("mlp.experts", (2,), FLOAT)]),
}


@pytest.mark.parametrize(("text", "slots"), REFUSED.items(), ids=list(REFUSED))
def test_models_that_do_not_match_are_refused(text: str, slots: tuple[list[Any], list[Any]]) -> None:
    whole, part = (saved_by(*found) for found in slots)
    with pytest.raises(TransferError, match=text):
        slot_slices(whole, part, place_of(0))


def test_a_tensor_that_is_shipped_with_another_group_is_refused() -> None:
    whole, part = (saved_by(("mlp", (4,), FLOAT)) for _ in range(2))
    late = whole._replace(segments=(SavedSegment(16, 1),), groups=(1,))
    with pytest.raises(TransferError, match="shipped with group 1, and needed with group 0"):
        slot_slices(late, part, place_of(0))


def test_a_vocabulary_without_equal_parts_is_refused() -> None:
    with pytest.raises(TransferError, match="pad the vocabulary"):
        TensorPlace(rank=0, ranks=4, micro_batch_size=1, vocabulary=126)


def test_the_part_of_a_gated_weight_is_that_of_both_halves() -> None:
    weight = torch.nn.Parameter(torch.arange(16.0).view(8, 2))
    weight.tensor_model_parallel, weight.partition_dim, weight.partition_stride = True, 0, 2  # type: ignore[attr-defined]
    own = torch.full((4, 2), -1.0)
    part = weight_part(weight, 1, 2)
    part.copy_(own.view_as(part))
    assert weight.detach()[:, 0].tolist() == [0.0, 2.0, -1.0, -1.0, 8.0, 10.0, -1.0, -1.0]
