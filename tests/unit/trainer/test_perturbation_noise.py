"""Noise of perturbations: the published generator, its distributions, and global indices over any sharding."""

import math
import unittest.mock
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatronapp_common.scope.perturbation.recipe import Bits, Perturbation, parse_recipe
from megatronapp_trainer.hooks.perturbation import activations, noise
from megatronapp_trainer.hooks.perturbation.activations import ActivationPerturbations, PlacedPerturbation
from megatronapp_trainer.hooks.perturbation.model_shard import ModelShard, global_features
from megatronapp_trainer.hooks.perturbation.noise import activation_block, element_block, noise_key
from megatronapp_trainer.hooks.perturbation.parameters import (
    EMBEDDING,
    FC1,
    FC2,
    PROJECTION,
    QKV,
    LocalParameter,
    element_index,
)
from megatronapp_trainer.hooks.perturbation.philox import Counter, normal, philox, uniform
from megatronapp_trainer.hooks.perturbation.row_context import RowContext
from megatronapp_trainer.hooks.perturbation.storage import flipped
from megatronapp_trainer.hooks.sites import site_of

pytestmark = pytest.mark.torch
CPU = torch.device("cpu")
ONES = 0xFFFFFFFF


@pytest.mark.parametrize(
    ("counter", "key", "block"),
    [
        (Counter(0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (Counter(ONES, ONES, ONES, ONES), (ONES, ONES), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            Counter(0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_blocks_are_the_known_answers_of_random123(
    counter: Counter, key: tuple[int, int], block: tuple[int, ...]
) -> None:
    assert tuple(int(number) for number in philox(counter, key, CPU)) == block


def test_numbers_have_their_distributions() -> None:
    block = element_block(noise_key(5, "a"), torch.arange(200_000))
    normals, uniforms = normal(block).double(), uniform(block.first)
    assert abs(normals.mean()) < 0.01
    assert abs(normals.std() - 1) < 0.01
    assert abs((normals.abs() < 1).double().mean() - math.erf(math.sqrt(0.5))) < 0.005
    assert abs(uniforms.mean() - 0.5) < 0.005
    assert abs(uniforms.var() - 1 / 12) < 0.001
    assert 0 < uniforms.min() < uniforms.max() < 1


def test_elements_beyond_four_billion_have_noise_of_their_own() -> None:
    low, high = (element_block(noise_key(5, "a"), torch.tensor([7 + offset])) for offset in (0, 1 << 32))
    assert not torch.equal(low.first, high.first)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bits", ["sign", "exponent", "mantissa"])
def test_a_flip_changes_a_bit_of_its_part(dtype: torch.dtype, bits: Bits) -> None:
    values = torch.full((4096,), 1.5, dtype=dtype)
    changed = flipped(values, bits, 0.5, element_block(noise_key(1, "w"), torch.arange(4096)))
    moved = changed != values
    assert 0.4 < moved.double().mean() < 0.6
    if bits == "sign":
        assert torch.equal(changed[moved], -values[moved])
    elif bits == "mantissa":
        assert bool(((changed >= 1) & (changed < 2)).all())
        assert len(set(changed.tolist())) == {torch.float32: 24, torch.bfloat16: 8, torch.float16: 11}[dtype]
    else:
        sizes = {torch.float32: 9, torch.bfloat16: 9, torch.float16: 6}
        assert len(set(changed.view(torch.int16 if dtype.itemsize == 2 else torch.int32).tolist())) == sizes[dtype]


def shard_of(rank: int, size: int, **sizes: Any) -> ModelShard:
    defaults: dict[str, Any] = {
        "layers": 1, "heads": 8, "key_heads": 4, "head_width": 2, "hidden": 6, "ffn": 8, "gated": True,
        "vocabulary": 13, "tied": True, "stages": ((0, 1),),
    }  # fmt: skip
    return ModelShard(tensor_rank=rank, tensor_size=size, **(defaults | sizes))


def perturbed_heads(values: torch.Tensor) -> torch.Tensor:
    """Apply noise to heads of two prompts at some positions."""
    action = {"type": "gaussian", "coefficient": 0.5}
    chosen = {"kind": "calculation", "site": "head_output", "heads": [1, 6], "positions": [{"first": 2}]}
    recipe = parse_recipe({"seed": 3, "perturbations": [chosen | {"action": action}]})
    activations = ActivationPerturbations(recipe, torch.nn.Module(), shard_of(0, 1), slots=2, source_lengths={})
    count = values.size(0)
    activations.rows = RowContext(
        positions_N=torch.arange(count), samples_N=torch.arange(count) % 2, prompts_N=torch.full((count,), count),
        slots_N=torch.zeros(count, dtype=torch.int64),
    )  # fmt: skip
    placed = PlacedPerturbation(place=0, perturbation=recipe.perturbations[0])
    return activations.changed(values, 0, site_of("head_output"), placed)


def test_noise_of_activations_is_drawn_in_bounded_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[int] = []
    isin = unittest.mock.Mock(wraps=torch.isin)
    values = torch.randn(11, 8, 2)
    whole = perturbed_heads(values)

    def recorded(*arguments: Any, **coordinates: Any) -> Any:
        block = activation_block(*arguments, **coordinates)
        drawn.append(block.first.numel())
        return block

    monkeypatch.setattr(activations, "activation_block", recorded)
    monkeypatch.setattr(noise, "BLOCK_ELEMENTS", 40)
    monkeypatch.setattr(torch, "isin", isin)
    assert torch.equal(perturbed_heads(values), whole)
    assert not torch.equal(whole, values)
    assert max(drawn) <= 40
    assert isin.call_count == 1, "the mask of heads is built for each block or step"


@given(st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4, 8]), st.booleans())
def test_each_activation_has_its_global_place_on_any_sharding(size: int, key_heads: int, gated: bool) -> None:
    shards = [shard_of(rank, size, key_heads=key_heads, gated=gated) for rank in range(size)]
    inner = 16 if gated else 8
    found = [int(place) for shard in shards for place in places(shard, "mlp1", torch.Size([inner // size]))]
    assert sorted(found) == list(range(inner))
    heads = [head for shard in shards for head in global_heads(shard, "q", 8 // size)]
    assert heads == list(range(8))
    key_heads_of_ranks = [head for shard in shards for head in global_heads(shard, "k", max(1, key_heads // size))]
    assert key_heads_of_ranks == sorted(head for head in range(key_heads) for _ in range(max(1, size // key_heads)))


def places(shard: ModelShard, site: str, shape: torch.Size) -> torch.Tensor:
    return global_features(site_of(site), shape, shard, CPU).features


def global_heads(shard: ModelShard, site: str, count: int) -> list[int]:
    heads = global_features(site_of(site), torch.Size([count, 2]), shard, CPU).heads
    assert heads is not None
    return [int(head) for head in heads.flatten()]


WHOLE = {QKV: (32, 6), PROJECTION: (6, 16), FC1: (16, 6), FC2: (6, 8), EMBEDDING: (16, 6)}
"""Shapes of the whole parameters with 8 heads and 4 key heads of 2 channels; block with 3 rows of padding."""


def storage(module: str, **fields: object) -> Perturbation:
    document = {"kind": "storage", "parameter": module, "action": {"type": "zero"}, **fields}
    return parse_recipe({"perturbations": [document]}).perturbations[0]


def elements(module: str, shard: ModelShard, **fields: object) -> list[int]:
    """Global indices of the selected elements of a shard."""
    rows, columns = WHOLE[module]
    by_columns = module in {PROJECTION, FC2}
    shape = (rows, columns // shard.tensor_size) if by_columns else (rows // shard.tensor_size, columns)
    local = LocalParameter(name="w", parameter=torch.nn.Parameter(torch.zeros(shape)), module=module)
    index = element_index(local, storage(module, **fields), shard)
    everything = slice(0, shape[0])
    return [int(place) for place in index.indices(everything)[index.chosen(everything)]]


@given(st.sampled_from(sorted(WHOLE)), st.sampled_from([1, 2, 4, 8]))
def test_each_element_has_its_global_index_on_any_sharding(module: str, size: int) -> None:
    found = [place for rank in range(size) for place in elements(module, shard_of(rank, size))]
    rows, columns = WHOLE[module]
    assert sorted(found) == list(range((13 if module == EMBEDDING else rows) * columns))


@given(st.sampled_from([1, 2, 4, 8]), st.sampled_from(["query", "key", "value"]))
def test_parts_of_queries_keys_and_values_are_those_of_their_heads(size: int, part: str) -> None:
    heads = 8 if part == "query" else 4
    found = [
        sorted(place for rank in range(size) for place in elements(QKV, shard_of(rank, size), part=part, heads=[head]))
        for head in range(heads)
    ]
    group_rows, repeats = 8, 2  # two query heads, a key and a value of 2 channels each
    for head, indices in enumerate(found):
        group, place = divmod(head, repeats) if part == "query" else (head, {"key": 2, "value": 3}[part])
        first = (group * group_rows + place * 2) * 6
        assert indices == list(range(first, first + 2 * 6))


@given(st.sampled_from([1, 2, 4]), st.integers(0, 7))
def test_gate_and_up_and_columns_of_a_head(size: int, head: int) -> None:
    shards = [shard_of(rank, size) for rank in range(size)]
    gate = sorted(place for shard in shards for place in elements(FC1, shard, part="gate"))
    assert gate == list(range(8 * 6))
    columns = sorted(place for shard in shards for place in elements(PROJECTION, shard, heads=[head]))
    assert columns == sorted(row * 16 + head * 2 + channel for row in range(6) for channel in range(2))
